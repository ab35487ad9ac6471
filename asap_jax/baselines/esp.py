"""ESP attention (ESPFormer: expected sliced transport plans), a baseline without a scaling loop.

Each slice sorts queries and keys and matches equal ranks. The attention matrix is the average of
the matchings, weighted by their cost. Training uses SoftSort, and its temperature may be annealed;
inference may use exact sorting, which is doubly stochastic.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.attention import outputs
from asap_jax.attention.flax_call import Call, Result, attention_function
from asap_jax.baselines import expected_plans, softsort
from asap_jax.checks import scalar
from asap_jax.solvers.plan import DensePlan
from asap_jax.spec import PADDINGS

MODES = ("soft", "hard_released", "hard")
IMPLEMENTATIONS = {
    "auto": expected_plans.streaming_soft_plan,
    "streaming": expected_plans.streaming_soft_plan,
    "dense": expected_plans.dense_soft_plan,
}
SCHEDULES = dict(constant="constant", init="constant", annealed="annealed", sharp="annealed")


@attention_function
def esp_attention(
    call: Call,
    *,
    directions: ArrayLike | None = None,
    mode: str = "soft",
    temperature: ArrayLike = 1e-3,
    inverse_temperature: ArrayLike = 0.1,
    scale: float | None = None,
    padding: str = "self",
    implementation: str = "auto",
) -> Result:
    """Expected-sliced-plan attention.

    Let ``x = scale q`` and ``y = scale k``, and let P_l and R_l be the rank matrices of
    ``x . theta_l`` and ``y . theta_l`` for a slice direction theta_l. Then::

      Gamma_l = P_l' R_l,    c_l = sum_ij |x_i - y_j| Gamma_l,ij,
      A = sum_l w_l Gamma_l,    w_l proportional to exp(-T (c_l - min c)).

    ``mode`` selects the rank matrix:

    * ``"soft"``: SoftSort, whose row r is a softmax of ``-(x_(r) - x_i)^2 / tau``. Its rows sum to
      1, so A has total mass N, but rows and columns of A sum to 1 only in the limit of small tau.
    * ``"hard_released"``: SoftSort with each row rounded to its top entry, as in the released code.
      Without ties this is the sort; with ties, an entry may be used twice and another not at all.
      The gradient is that of ``"soft"`` (straight through).
    * ``"hard"``: the exact matching of equal ranks, ties in the order of the tokens. Rows and
      columns sum to 1. Gradients reach the values and, through the costs, the weights w_l.

    Masks. Only active tokens are sorted; the rows and columns of the others are exactly 0. With
    ``padding="self"`` and N = M, a token whose key is masked is inactive as a query too; with
    ``padding="none"``, every query that has a key is active. Single pairs cannot be masked: a mask
    that is not ``query_valid[:, None] & key_valid[None, :]`` raises ValueError if its values are
    concrete; under a trace its masked entries are set to 0 without renormalising.

    Lengths. If n queries and m keys are active and n differs from m, soft ranks are coupled as in
    ``softsort.rank_coupling``: rows sum to 1 and columns to n / m. ``"hard"`` then raises
    ValueError; for traced masks, its ranks without a partner give 0.

    Memory. ``"streaming"`` computes the plan of one slice at a time: about 6 arrays of the size of
    A, 12 with gradients, for any L. ``"dense"`` holds the plans of all L slices: about 3 L and 7 L
    arrays. Only ``"dense"`` has forward-mode derivatives. Both take O(L N^3) operations. ``"hard"``
    takes O(L N log N + N^2 d) operations and about 5 and 7 arrays.

    Args:
      query, key, value, mask, return_weights and Flax's other keywords: as in
        ``sinkhorn_attention``; ``precision`` also applies to the plans.
      bias: may only mask, by entries <= -1e8. Other non-zero entries raise ValueError if they are
        concrete, and are ignored under a trace.
      directions: ``(L, head_dim)``, scaled to unit length; the coordinate axes when None.
      mode: ``"soft"``, ``"hard_released"`` or ``"hard"``. Static.
      temperature: tau > 0 of SoftSort: a number, or a traced scalar, for instance from
        ``esp_temperature_schedule``.
      inverse_temperature: T >= 0, a number or a traced scalar; 0 averages the slices equally.
      scale: > 0; ``1 / sqrt(head_dim)`` when None.
      padding: ``"self"`` or ``"none"``, see above. Static.
      implementation: ``"auto"`` (streaming), ``"streaming"`` or ``"dense"``, for the relaxation.

    Returns:
      ``(..., N, heads, value_dim)`` in the input dtype, or ``(out, weights)``.

    Raises:
      ValueError, TypeError: as ``sinkhorn_attention``, and as described above.
    """
    checks.one_of("mode", mode, MODES)
    checks.one_of("padding", padding, PADDINGS)
    checks.one_of("implementation", implementation, IMPLEMENTATIONS)
    p = call.problem(scale)
    _check_bias(call.bias)
    _check_support(call.mask, call.bias, p.score_shape, padding, mode)
    dtype, name = p.q.dtype, "inverse_temperature"
    tau = scalar("temperature", temperature, dtype, checks.positive_float)
    inverse = scalar(name, inverse_temperature, dtype, checks.non_negative_float)
    q_valid, k_valid = masks.feature_validity(p.validity, padding) or (None, None)
    q, k = masks.zero_inactive(p.q, q_valid), masks.zero_inactive(p.k, k_valid)
    # Not scaled: tau is divided by scale^2 instead, so that differences of close values are exact.
    a = expected_plans.project(q, directions, q_valid)
    b = expected_plans.project(k, directions, k_valid)
    distance = p.scale * expected_plans.distances(q, k)
    # All plans have the same mass, so this shifts all costs equally; smaller sums keep more digits.
    distance = distance - jax.lax.stop_gradient(distance.mean((-2, -1), keepdims=True))
    zero = jnp.zeros_like(distance[..., 0, 0])
    floor = math.sqrt(float(jnp.finfo(dtype).tiny))
    sharpness = p.scale**2 / jnp.maximum(tau, jnp.asarray(floor, dtype)) + zero
    slices = expected_plans.Slices(a, b, distance, sharpness, inverse + zero)
    support = expected_plans.Support(q_valid, k_valid)
    if mode == "hard":
        weights = expected_plans.hard_plan(slices, support)
    else:
        support = _with_coupling(support, q.shape[-2], k.shape[-2], dtype)
        average = IMPLEMENTATIONS[implementation]
        weights = average(slices, support, mode == "hard_released", p.precision)
    if p.mask is not None:
        weights = jnp.where(p.mask, weights, jnp.zeros_like(weights))
    return outputs.finish(call, p, DensePlan(weights))


def esp_temperature_schedule(
    name: str, *, init_value: float = 1e-3, end_value: float = 1e-6, num_steps: int | None = None
) -> optax.Schedule:
    """A schedule of SoftSort's temperature, from a training step to tau.

    Args:
      name: ``"constant"`` (or ``"init"``): always ``init_value``; ``"annealed"`` (or
        ``"sharp"``): geometric decay to ``end_value`` in ``num_steps`` steps, then constant.
      init_value, end_value: temperatures > 0, ``end_value <= init_value``.
      num_steps: >= 1; needed by ``"annealed"``.

    Returns:
      An optax schedule, for ``esp_attention(..., temperature=schedule(step))``.

    Raises:
      ValueError, TypeError: an unknown name; values out of range.
    """
    checks.one_of("name", name, SCHEDULES)
    init_value = checks.positive_float("init_value", init_value)
    if SCHEDULES[name] == "constant":
        return optax.constant_schedule(init_value)
    end_value = checks.positive_float("end_value", end_value)
    if end_value > init_value:
        raise ValueError(f"end_value must be <= init_value = {init_value}, got {end_value}")
    return optax.exponential_decay(
        init_value,
        transition_steps=checks.positive_int("num_steps", num_steps),
        decay_rate=end_value / init_value,
        end_value=end_value,
    )


def _with_coupling(
    support: expected_plans.Support, n: int, m: int, dtype: Any
) -> expected_plans.Support:
    """``support`` with the coupling of ranks, if the numbers of active tokens may differ."""
    query, key, _ = support
    if query is key and n == m:  # both None, or the same tokens
        return support
    count = lambda valid, size: jnp.asarray(size, jnp.int32) if valid is None else valid.sum(-1)
    coupling = softsort.rank_coupling(count(query, n), count(key, m), (n, m), dtype)
    return support._replace(coupling=coupling)


def _masking(bias: Any) -> np.ndarray:
    """Where a concrete bias masks, see ``masks.as_bias``."""
    bias = np.asarray(bias)
    return bias <= masks.mask_limit(bias.dtype)


def _check_bias(bias) -> None:
    """Raises ValueError if a concrete bias does more than mask."""
    if bias is None or isinstance(bias, jax.core.Tracer):
        return
    if (~_masking(bias) & (np.asarray(bias) != 0)).any():
        raise ValueError(
            f"bias of shape {np.shape(bias)} has entries that neither mask (<= -1e8) nor are 0: "
            f"ESP attention matches sorted projections and has no scores to add them to"
        )


def _check_support(mask, bias, shape: tuple, padding: str, mode: str) -> None:
    """Raises ValueError for a concrete mask and bias that no matching satisfies."""
    if any(isinstance(x, jax.core.Tracer) for x in (mask, bias)):
        return
    allowed = np.ones((1,) * len(shape), bool)
    if mask is not None:
        allowed = allowed & (np.asarray(mask) != 0)
    if bias is not None:
        allowed = allowed & ~_masking(bias)
    query, key = allowed.any(-1, keepdims=True), allowed.any(-2, keepdims=True)
    if (allowed != (query & key)).any():
        raise ValueError(
            f"mask of shape {allowed.shape} is not of the form query_valid[:, None] & "
            f"key_valid[None, :]: ESP attention matches whole tokens by rank, so it can leave "
            f"tokens out but cannot forbid single pairs"
        )
    if mode != "hard" or (padding == "self" and shape[-2] == shape[-1]):
        return
    n = np.broadcast_to(query, (*shape[:-1], 1)).sum((-2, -1))
    m = np.broadcast_to(key, (*shape[:-2], 1, shape[-1])).sum((-2, -1))
    if (n != m).any():
        at = np.unravel_index(np.argmax(n != m), n.shape)  # the first problem that does not fit
        raise ValueError(
            f"mode='hard' matches queries and keys one to one, so their numbers must be equal, "
            f"but scores of shape {shape} have {n[at]} active queries and {m[at]} active keys; "
            f"use mode='soft'"
        )

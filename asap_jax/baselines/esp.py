"""ESP attention (ESPFormer: expected sliced transport plans): a baseline without a loop.

Slices sort the queries and the keys and match ranks; the attention matrix is the average of the
matchings, weighted by their cost. Training uses SoftSort, whose temperature may be annealed;
inference may use exact sorting, which is doubly stochastic.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.attention import outputs
from asap_jax.attention.flax_call import Call, Result, attention_function
from asap_jax.baselines import expected_plans, softsort
from asap_jax.solvers.plan import DensePlan
from asap_jax.spec import PADDINGS

MODES = ("soft", "hard_released", "hard")
IMPLEMENTATIONS = {
    "auto": expected_plans.streaming_soft_plan,
    "streaming": expected_plans.streaming_soft_plan,
    "dense": expected_plans.dense_soft_plan,
}
SCHEDULES = {
    "constant": "constant",
    "init": "constant",
    "annealed": "annealed",
    "sharp": "annealed",
}


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

    With ``x = scale q``, ``y = scale k`` and a slice direction theta_l, P_l and R_l the rank
    matrices of ``x . theta_l`` and ``y . theta_l``,

      Gamma_l = P_l' R_l,    c_l = sum_ij |x_i - y_j| Gamma_l,ij,
      A = sum_l w_l Gamma_l,    w_l proportional to exp(-T (c_l - min c)).

    ``mode`` says what a rank matrix is:

    * ``"soft"``: SoftSort, row r a softmax over entries of ``-(x_(r) - x_i)^2 / tau``. Its rows
      sum to 1, so A has total mass N, but rows and columns of A sum to 1 only as tau falls.
    * ``"hard_released"``: the hard flag of the released code, the top entry of each row of the
      relaxation. Without equal values that is the sort; with them an entry may be taken twice
      and another not at all. The gradient is that of ``"soft"`` (straight through).
    * ``"hard"``: the exact matching of equal ranks by argsort, equal values in the order of
      their tokens. Rows and columns sum to 1. The gradient reaches the values and, through the
      costs, the weights w_l.

    Masks. Only tokens that are active take part in the sorting; rows and columns of the others
    are exactly 0, and nothing in them spreads. With ``padding="self"`` and N = M a token whose
    key is masked is a padded token and is no query either, so a key-only mask and
    ``make_attention_mask(valid, valid)`` mean the same; with ``padding="none"`` (cross-attention)
    every query that has a key is active. A matching knows only who takes part: a mask that is not
    of the form ``query_valid[:, None] & key_valid[None, :]`` is refused where its values are
    known; where they are traced, the plan is that of the tokens left active and the further
    masked entries are set to 0 without renormalising.

    Lengths. If n queries and m keys are active and n differs from m, soft ranks are joined by the
    optimal plan between n and m equal masses on a line (``softsort.rank_coupling``, rows summing
    to 1 and columns to n / m), so a query rank meets the keys of its quantiles.
    ``"hard"`` is refused, and where the counts are traced ranks without a partner give 0.

    Memory. ``"streaming"`` makes the plan of one slice at a time, forward and backward, and keeps
    about 6 (forward) and 12 (with gradient) arrays of the size of A, however many slices there
    are. ``"dense"`` is the released form with the plans of all L slices at once, about 3 L and
    7 L such arrays; it alone supports forward-mode derivatives. Both need O(L N^3) operations;
    ``"hard"`` needs O(L N log N + N^2 d) and about 5 and 7 arrays.

    Args:
      query: ``(..., N, heads, head_dim)``.
      key: ``(..., M, heads, head_dim)``; value: ``(..., M, heads, value_dim)``. Fewer key/value
        heads that divide the query heads are broadcast.
      bias: only entries <= -1e8, which mask, have a meaning; other non-zero entries are refused
        where their values are known, and ignored where they are traced.
      mask: rank of the scores, size-1 axes allowed, bool or 0/1.
      directions: ``(L, head_dim)``, rows normalised to unit length; None: the coordinate axes.
      mode: ``"soft"``, ``"hard_released"`` or ``"hard"``. Static.
      temperature: tau > 0 of SoftSort; a number or a traced scalar, so it may be annealed inside
        a jitted step (see ``esp_temperature_schedule``).
      inverse_temperature: T >= 0 of the average over slices; 0 is the plain mean. Likewise.
      scale: > 0; ``1 / sqrt(head_dim)`` when None.
      padding: ``"self"`` or ``"none"``, see above. Static.
      return_weights: static; also return A ``(..., heads, N, M)``.
      implementation: ``"auto"`` (streaming), ``"streaming"`` or ``"dense"``, for the relaxation.

    Returns:
      ``(..., N, heads, value_dim)`` in the input dtype, or ``(out, weights)``.

    Raises:
      ValueError, TypeError: at trace time, naming the argument and both shapes or the setting;
        unknown names are answered with the known ones.

    Flax's keywords: as in ``sinkhorn_attention``; ``precision`` also applies to the plans.
    """
    checks.one_of("mode", mode, MODES)
    checks.one_of("padding", padding, PADDINGS)
    checks.one_of("implementation", implementation, IMPLEMENTATIONS)
    p = call.problem(None if scale is None else checks.positive_float("scale", scale))
    _check_bias(call.bias)
    _check_support(call.mask, call.bias, p.score_shape, padding, mode)
    active = masks.feature_validity(p.validity, padding)
    if active is not None:
        p = p.replace(
            q=masks.zero_inactive(p.q, active.query), k=masks.zero_inactive(p.k, active.key)
        )
    weights = expected_plan(
        p.q,
        p.k,
        directions,
        active,
        mode=mode,
        temperature=scalar("temperature", temperature, p.q.dtype, checks.positive_float),
        inverse_temperature=scalar(
            "inverse_temperature", inverse_temperature, p.q.dtype, checks.non_negative_float
        ),
        scale=p.scale,
        implementation=implementation,
        precision=p.precision,
    )
    if p.mask is not None:
        weights = jnp.where(p.mask, weights, jnp.zeros_like(weights))
    return outputs.finish(call, p, DensePlan(weights))


def expected_plan(
    q,
    k,
    directions,
    active: masks.Validity | None,
    *,
    mode: str,
    temperature: jax.Array,
    inverse_temperature: jax.Array,
    scale: float,
    implementation: str = "auto",
    precision=None,
) -> jax.Array:
    """A ``(..., N, M)`` from q ``(..., N, d)``, k ``(..., M, d)`` and who is active.

    Projections are left unscaled and the temperature is divided by ``scale^2`` instead: the
    differences that the relaxation squares are then exact for close values of a coordinate. The
    mean distance is subtracted: every plan has the same mass, so that shifts all costs alike, and
    smaller sums keep more digits of the differences between them.
    """
    a = expected_plans.project(q, directions, None if active is None else active.query)
    b = expected_plans.project(k, directions, None if active is None else active.key)
    distance = scale * expected_plans.distances(q, k)
    distance = distance - jax.lax.stop_gradient(distance.mean((-2, -1), keepdims=True))
    zero = jnp.zeros_like(distance[..., 0, 0])
    inverse_temperature = inverse_temperature + zero
    if mode == "hard":
        support = expected_plans.Support(*(active or ()))
        return expected_plans.hard_plan(a, b, distance, support, inverse_temperature)
    support = _support(active, q.shape[-2], k.shape[-2], q.dtype)
    floor = math.sqrt(float(jnp.finfo(q.dtype).tiny))
    sharpness = scale**2 / jnp.maximum(temperature, jnp.asarray(floor, q.dtype)) + zero
    average = IMPLEMENTATIONS[implementation]
    harden = mode == "hard_released"
    return average(a, b, distance, support, sharpness, inverse_temperature, harden, precision)


def esp_temperature_schedule(
    name: str, *, init_value: float = 1e-3, end_value: float = 1e-6, num_steps: int | None = None
) -> optax.Schedule:
    """A schedule of SoftSort's temperature, from a training step to tau.

    Args:
      name: ``"constant"`` (or ``"init"``): ``init_value`` throughout; ``"annealed"`` (or
        ``"sharp"``): geometric decay to ``end_value`` in ``num_steps`` steps, constant from then.
      init_value, end_value: temperatures > 0, ``end_value <= init_value``.
      num_steps: >= 1; needed by ``"annealed"``.

    Returns:
      An optax schedule; ``esp_attention(..., temperature=schedule(step))`` takes its values.

    Raises:
      ValueError, TypeError: an unknown name, answered with the known ones; values out of range.
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


def scalar(name: str, x, dtype, check) -> jax.Array:
    """A 0-d array of ``dtype`` from a number that passes ``check``, or from a traced scalar."""
    if not isinstance(x, jax.core.Tracer):
        return jnp.asarray(check(name, x), dtype)
    if x.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {x.shape}")
    return checks.real_array(name, x).astype(dtype)


def _support(active: masks.Validity | None, n: int, m: int, dtype) -> expected_plans.Support:
    """Active tokens, and the coupling of ranks where their numbers may differ."""
    if active is None:
        if n == m:
            return expected_plans.Support()
        count = jnp.zeros((), jnp.int32)
        coupling = softsort.rank_coupling(count + n, count + m, (n, m), dtype)
        return expected_plans.Support(coupling=coupling)
    if active.query is active.key:
        return expected_plans.Support(*active)
    counts = (valid.sum(-1) for valid in active)
    return expected_plans.Support(*active, softsort.rank_coupling(*counts, (n, m), dtype))


def _masking(bias) -> np.ndarray:
    """Where a bias with known values masks, see ``masks.as_bias``."""
    bias = np.asarray(bias)
    return bias <= max(masks.MASKED_BIAS, float(jnp.finfo(bias.dtype).min))


def _check_bias(bias) -> None:
    """Raises ValueError for a bias that does more than mask, where its values are known."""
    if bias is None or isinstance(bias, jax.core.Tracer):
        return
    if (~_masking(bias) & (np.asarray(bias) != 0)).any():
        raise ValueError(
            f"bias of shape {np.shape(bias)} has entries that neither mask (<= -1e8) nor are 0: "
            f"ESP attention matches sorted projections and has no scores to add them to"
        )


def _check_support(mask, bias, shape: tuple, padding: str, mode: str) -> None:
    """Raises ValueError, where values are known, for a support that no matching can have."""
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
        at = np.unravel_index(np.argmax(n != m), n.shape)
        raise ValueError(
            f"mode='hard' matches queries and keys one to one, so their numbers must be equal, "
            f"but scores of shape {shape} have {n[at]} active queries and {m[at]} active keys; "
            f"use mode='soft'"
        )

"""Attention functions in Flax's layout: the Sinkhorn teacher, the compiled layer, softmax.

All are pure and work directly, under ``functools.partial``, under ``jax.jit``, and as
``attention_fn`` of ``flax.linen.MultiHeadDotProductAttention`` and ``flax.nnx.MultiHeadAttention``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.attention import detached, outputs
from asap_jax.attention.flax_call import Call, Result, attention_function
from asap_jax.predictor import DualPair, Predictor, row_mass
from asap_jax.predictor.starting_dual import DeferredStart, predicted_dual
from asap_jax.problem import Problem
from asap_jax.solvers import ctransform, registry
from asap_jax.solvers.closures import Closures
from asap_jax.solvers.plan import ClosedPlan, DensePlan, Plan, ScaledPlan
from asap_jax.spec import SinkhornSpec

CLOSURES = ("one_sided", "two_sided")


@attention_function
def sinkhorn_attention(
    call: Call,
    *,
    spec: SinkhornSpec,
    implementation: str = "auto",
    detach_key_dual: bool = False,
    axis_name: str | None = None,
) -> Result:
    """Finite-budget Sinkhorn attention (paper, eq. sinkhorn_iterations), the teacher.

    Args:
      query: ``(..., N, heads, head_dim)``.
      key: ``(..., M, heads, head_dim)``; value: ``(..., M, heads, value_dim)``. Their number of
        heads may divide that of the query; each is then used for a group of query heads.
      bias: additive, rank of the scores ``(..., heads, N, M)``; entries <= -1e8 are masked.
      mask: rank of the scores, size-1 axes allowed, bool or 0/1. A traced mask with other values
        makes the result NaN; give additive masks as bias.
      spec: the finite-budget convention.
      implementation: ``"log"`` computes in the log domain; ``"scaling"`` exponentiates once, and
        falls back to the log domain if the result cannot be trusted; ``"streaming"`` works block
        by block, with memory linear in the length; ``"auto"`` is ``"scaling"``, or ``"streaming"``
        if the kernel is too large to store. ``"fused"`` takes the attention kernel of the platform:
        on CUDA ``"cudnn"`` for layers of one call and ``"tokamax"`` for others (the extra
        ``asap_jax[fused]``), in bfloat16 or float16; ``"splash"`` on TPUs. It computes in the dtype
        of the inputs, and takes masks and biases of the keys, ``(..., heads, 1, M)``, or of the
        queries, ``(..., heads, N, 1)``. It has not run on a card yet. ``chosen_implementation``
        says what a call takes. The names of these three kernels are accepted too.
      detach_key_dual: static. True: no gradient passes through the key dual, as in the released
        code of Sinkformers for text; the result is the same. Needs ``num_steps`` >= 2 and
        ``implementation`` ``"auto"`` or ``"log"``, and stores the weights. False: the true
        gradient.
      axis_name: static. None, or the axis of an enclosing ``jax.shard_map`` over which the tokens
        of query, key, value and of a mask or bias are sharded; each device then gives its own.
        Masks and biases are of the keys, ``(..., heads, 1, M)``, or of the queries,
        ``(..., heads, N, 1)``; no weights are computed, so there is no dropout. The keys go round
        the devices: the result is that of one device, and no device holds all tokens.
        ``"auto"`` is then ``"streaming"``.
      return_weights: static; also return the weights ``(..., heads, N, M)``.
      dropout_rng, dropout_rate, broadcast_dropout, deterministic: dropout on the normalised
        weights; it breaks the marginals.
      dtype: dtype of the inputs and the output; computations are in float32 at least.
      precision: matmul precision of the scores and of the product with the values; fused kernels
        have their own.
      module: a Flax module to sow the weights into.
      is_causal, qk_attn_weights_einsum, attn_weights_value_einsum: not supported, ValueError.

    Returns:
      ``(..., N, heads, value_dim)`` in the input dtype, or ``(out, weights)``. Queries with no
      key give exactly 0.

    Raises:
      ValueError, TypeError: at trace time; the message names the argument and both shapes.
        ValueError also if a fused kernel cannot compute the call.
    """
    checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
    checks.one_of("implementation", implementation, registry.NAMES)
    detach = checks.static_bool("detach_key_dual", detach_key_dual)
    if detach:
        detached.check(spec, implementation, axis_name)
    p = call.problem(spec.scale, axis_name)
    plan: Plan = detached.plan(p, spec) if detach else sinkhorn_plan(p, spec, implementation)
    return outputs.finish(call, p, plan)


@attention_function
def asap_attention(
    call: Call,
    *,
    predictor: Predictor | DualPair,
    spec: SinkhornSpec,
    closures: str | int = "two_sided",
    ending: str = "teacher",
    implementation: str = "auto",
    axis_name: str | None = None,
) -> Result:
    """The compiled layer: closures of a predicted dual (paper, eq. asap_source_prediction ff.).

    Args:
      query, key, value, bias, mask, implementation, and Flax's keywords: as in
        ``sinkhorn_attention``.
      predictor: the fitted predictor.
      spec: the teacher's convention, to which the predictor was fitted. The modules check that;
        this function cannot.
      closures: static. ``"one_sided"`` (ASAP-0): one key closure. ``"two_sided"`` (ASAP): key,
        query, key for a layer that ends on columns; key, query for one that ends on rows. An int
        n: n closures from the predictor's side, the last one where ``ending`` says. ``"none"``
        (ablation): no closure, with a DualPair as ``predictor``; no marginal is exact.
      ending: static. ``"teacher"``: the last closure is on the side of the teacher's last step.
        ``"row"``: it is on rows; a teacher that ends on columns is then continued by one row step.
        The rows have equal shares of the teacher's total mass, or those of ``predictor.row_mass``.
        One closure from a key dual is then softmax attention with a bias on the keys.
      axis_name: as in ``sinkhorn_attention``, for a predictor with features that add up over
        devices (``fit="moments"``).

    Returns:
      ``(..., N, heads, value_dim)`` in the input dtype, or ``(out, weights)``.

    Raises:
      ValueError, TypeError: as ``sinkhorn_attention``; closures that the predictor's side does
        not allow.
    """
    checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
    checks.one_of("implementation", implementation, registry.NAMES)
    suffix = f"for closures={closures!r}"
    plan: Plan
    if isinstance(closures, str) and closures == "none":
        pair = checks.instance("predictor", predictor, DualPair, f"a DualPair {suffix}")
        if ending != "teacher":
            raise ValueError(f"closures='none' has no last closure, got ending={ending!r}")
        if axis_name is not None:
            raise ValueError(f"closures='none' computes weights, got axis_name={axis_name!r}")
        p = call.problem(spec.scale)
        plan = DensePlan(weights_from_both_duals(pair, p, spec))
    else:
        predictor = checks.instance("predictor", predictor, Predictor, f"a Predictor {suffix}")
        p = call.problem(spec.scale, axis_name)
        if axis_name is not None:
            _check_sharded(predictor, axis_name)
        plan = compiled_plan(predictor, spec, closures, ending, implementation)
    return outputs.finish(call, p, plan)


@attention_function
def softmax_attention(
    call: Call,
    *,
    scale: float | None = None,
    implementation: str = "auto",
    axis_name: str | None = None,
) -> Result:
    """Row-softmax attention: ``sinkhorn_attention`` with ``num_steps=1, epsilon=1``.

    Arguments and result as there. ``scale`` > 0 is ``1 / sqrt(head_dim)`` when None.
    """
    checks.one_of("implementation", implementation, registry.NAMES)
    p = call.problem(scale, axis_name)
    return outputs.finish(call, p, sinkhorn_plan(p, SinkhornSpec(num_steps=1), implementation))


def _check_sharded(predictor: Predictor, axis_name: str) -> None:
    """Raises ValueError for parts of a predictor that need all tokens on one device."""
    for name, there in (
        ("corrections", predictor.corrections != ()),
        ("token_bias", predictor.token_bias is not None),
        ("baseline='first_step'", predictor.baseline == "first_step"),
    ):
        if there:
            raise ValueError(
                f"axis_name={axis_name!r} does not support a predictor with {name}, which needs "
                f"all tokens on one device: compile with fit='moments'"
            )


def sinkhorn_plan(p: Problem, spec: SinkhornSpec, implementation: str) -> ClosedPlan:
    """The teacher's plan: S closures from the key dual 0."""
    closures = Closures("key", spec.num_steps, spec.epsilon)
    return ClosedPlan(jnp.zeros_like(p.k[..., 0]), closures, spec.key_mass, implementation)


def compiled_plan(
    predictor: Predictor,
    spec: SinkhornSpec,
    closures: str | int,
    ending: str,
    implementation: str,
) -> ClosedPlan | ScaledPlan:
    """The compiled layer's plan: ``closures`` from the predicted dual.

    The start includes one closure for each correction of the predictor; the plan has the others.
    """
    total = num_closures(closures, predictor.side, spec, ending)
    rows = row_mass.rows_of(
        predictor.row_mass, spec, ending, predictor.padding, predictor.statistics
    )
    start = DeferredStart.of(predictor, spec, total)
    remaining = Closures(start.side, total - len(predictor.corrections), spec.epsilon)
    plan = ClosedPlan(start, remaining, spec.key_mass, implementation)
    return plan if rows is None else ScaledPlan(plan, rows)


def weights_from_both_duals(pair: DualPair, p: Problem, spec: SinkhornSpec) -> jax.Array:
    """Weights from two predicted duals, without any c-transform (paper, design table)."""
    for side in (pair.query, pair.key):
        if side.row_mass is not None or side.corrections:
            raise ValueError("closures='none' allows no corrections and no row_mass in a DualPair")
    f, g = (predicted_dual(side, p, spec, absolute=True) for side in (pair.query, pair.key))
    g = g + checks.array("offset", pair.offset).astype(g.dtype)
    return ctransform.attention_weights(p.scores, f, g, epsilon=spec.epsilon, mask=p.mask)


def num_closures(closures: Any, side: str, spec: SinkhornSpec, ending: str = "teacher") -> int:
    """The number of half-steps that ``closures`` means, from a dual of ``side``.

    Raises:
      ValueError: an unknown name, n < 1, or closures that end on the wrong side.
      TypeError: neither a string nor a static int.
    """
    last_step = spec.ended(ending).last_step
    if isinstance(closures, str):
        if closures not in CLOSURES:
            known = ", ".join(map(repr, (*CLOSURES, "none")))
            raise ValueError(
                f"closures={closures!r} is not known; known: {known}, or a number of closures"
            )
        if side != "query":
            raise ValueError(
                f"closures={closures!r} needs a predictor with side='query', got "
                f"side={side!r}; give the number of closures instead"
            )
        if closures == "one_sided" and ending == "row":
            raise ValueError("closures='one_sided' ends on columns, got ending='row'")
        return 1 if closures == "one_sided" else (3 if last_step == "column" else 2)
    if not isinstance(closures, int) and not hasattr(closures, "__index__"):
        raise TypeError(f"closures must be 'one_sided', 'two_sided' or an int, got {closures!r}")
    n = checks.positive_int("closures", closures)
    ends_on = "column" if (side == "query") == (n % 2 == 1) else "row"
    if ends_on != last_step:
        raise ValueError(
            f"closures={n} from side={side!r} end on a {ends_on} step, but a layer with "
            f"ending={ending!r} of a teacher with num_steps={spec.num_steps} ends on a {last_step}"
        )
    return n

"""Attention functions in Flax's layout: the Sinkhorn teacher, the compiled layer, softmax.

Each is a pure function that works raw, under ``functools.partial``, under ``jax.jit`` with
nothing marked static but ``return_weights``, and as ``attention_fn`` of
``flax.linen.MultiHeadDotProductAttention`` and ``flax.nnx.MultiHeadAttention``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from asap_jax import checks, problem
from asap_jax.attention import outputs
from asap_jax.predictor import corrections as chain
from asap_jax.predictor import starting_dual
from asap_jax.predictor.predictor import DualPair, Predictor
from asap_jax.solvers import ctransform
from asap_jax.solvers import log_domain as closing
from asap_jax.solvers import plan as plans
from asap_jax.spec import SinkhornSpec

CLOSURES = ("one_sided", "two_sided")

_KEYWORDS = """
    Flax's keywords:
      dropout_rng, dropout_rate, broadcast_dropout, deterministic: dropout on the normalised
        weights; it breaks the marginals.
      dtype: computation dtype of the inputs and the output; inside, float32 at least.
      precision: matmul precision of the scores and of the product with the values.
      module: a Flax module to sow the weights into.
      is_causal, qk_attn_weights_einsum, attn_weights_value_einsum: refused, with the reason.
"""


def sinkhorn_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    spec: SinkhornSpec,
    return_weights: bool = False,
    implementation: str = "auto",
    dropout_rng=None,
    dropout_rate=0.0,
    broadcast_dropout=True,
    deterministic=True,
    dtype=None,
    precision=None,
    module=None,
    is_causal=False,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
):
    """Finite-budget Sinkhorn attention (paper, eq. sinkhorn_iterations), the teacher.

    Args:
      query: ``(..., N, heads, head_dim)``.
      key: ``(..., M, heads, head_dim)``; value: ``(..., M, heads, value_dim)``. Fewer key/value
        heads that divide the query heads are broadcast.
      bias: additive, rank of the scores ``(..., heads, N, M)``; entries <= -1e8 are masked.
      mask: rank of the scores, size-1 axes allowed, bool or 0/1; honoured entry by entry.
      spec: the finite-budget convention.
      return_weights: static; also return the weights ``(..., heads, N, M)``.
      implementation: ``"log"`` keeps to the log domain; ``"scaling"`` exponentiates once and falls
        back to the log domain where that form cannot be trusted; ``"streaming"`` works tile by
        tile, its memory linear in the length; ``"auto"`` is ``"scaling"``, or ``"streaming"`` where
        a kernel is too large to be kept.

    Returns:
      ``(..., N, heads, value_dim)`` in the input dtype, or ``(out, weights)``. Queries with no
      key give exactly 0.

    Raises:
      ValueError, TypeError: at trace time, naming the argument and both shapes or the setting.
    """
    checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
    p = problem.make_problem(
        query,
        key,
        value,
        bias,
        mask,
        scale=spec.scale,
        dtype=dtype,
        precision=precision,
        is_causal=is_causal,
        implementation=implementation,
        einsums=(qk_attn_weights_einsum, attn_weights_value_einsum),
    )
    zero = jnp.zeros_like(p.k[..., 0])
    return outputs.finish(
        p,
        _plan(p, spec, zero, "key", spec.num_steps, implementation),
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        module=module,
        return_weights=return_weights,
    )


def asap_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    predictor: Predictor,
    spec: SinkhornSpec,
    closures="two_sided",
    return_weights: bool = False,
    implementation: str = "auto",
    dropout_rng=None,
    dropout_rate=0.0,
    broadcast_dropout=True,
    deterministic=True,
    dtype=None,
    precision=None,
    module=None,
    is_causal=False,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
):
    """The compiled layer: predict a dual, then close (paper, eq. asap_source_prediction ff.).

    Args:
      query, key, value, bias, mask, return_weights, implementation: as in
        ``sinkhorn_attention``.
      predictor: the fitted predictor.
      spec: the teacher's convention.
      closures: ``"one_sided"`` (ASAP-0: one key closure), ``"two_sided"`` (ASAP: key, query, key
        for a column-ending teacher; key, query for a row-ending one), an int n: n closures
        from the predictor's side, ending on the teacher's last step, or ``"none"`` (ablation:
        ``predictor`` is a DualPair and no marginal is exact). Static.

    Returns:
      ``(..., N, heads, value_dim)`` in the input dtype, or ``(out, weights)``.

    Raises:
      ValueError, TypeError: as ``sinkhorn_attention``; closures that the predictor's side does
        not allow.
    """
    checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
    direct = isinstance(closures, str) and closures == "none"
    wanted = DualPair if direct else Predictor
    checks.instance(
        "predictor", predictor, wanted, f"a {wanted.__name__} for closures={closures!r}"
    )
    num_steps = 0 if direct else num_closures(closures, predictor.side, spec)
    p = problem.make_problem(
        query,
        key,
        value,
        bias,
        mask,
        scale=spec.scale,
        dtype=dtype,
        precision=precision,
        is_causal=is_causal,
        implementation=implementation,
        einsums=(qk_attn_weights_einsum, attn_weights_value_einsum),
    )
    if direct:
        plan = plans.Dense(direct_weights(predictor, p, spec))
    else:
        corrections = chain.checked(predictor.corrections, num_steps)
        start = starting_dual.Prediction.of(predictor, spec)
        remaining = num_steps - len(corrections)
        plan = _plan(p, spec, start, start.side, remaining, implementation)
    return outputs.finish(
        p,
        plan,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        module=module,
        return_weights=return_weights,
    )


def softmax_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale: float | None = None,
    return_weights: bool = False,
    implementation: str = "auto",
    dropout_rng=None,
    dropout_rate=0.0,
    broadcast_dropout=True,
    deterministic=True,
    dtype=None,
    precision=None,
    module=None,
    is_causal=False,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
):
    """Row-softmax attention, the plain Transformer baseline.

    Arguments and result as ``sinkhorn_attention``; equals it at ``num_steps=1, epsilon=1``.
    ``scale`` > 0 is ``1 / sqrt(head_dim)`` when None. Queries with no key give exactly 0.
    """
    scale = None if scale is None else checks.positive_float("scale", scale)
    p = problem.make_problem(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        dtype=dtype,
        precision=precision,
        is_causal=is_causal,
        implementation=implementation,
        einsums=(qk_attn_weights_einsum, attn_weights_value_einsum),
    )
    zero = jnp.zeros_like(p.k[..., 0])
    return outputs.finish(
        p,
        _plan(p, SinkhornSpec(num_steps=1), zero, "key", 1, implementation),
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        module=module,
        return_weights=return_weights,
    )


def _plan(p: problem.Problem, spec, start, side: str, num_steps: int, implementation: str):
    """The plan of ``num_steps`` closures from ``start`` on ``side``; see ``plans.Closed``."""
    target = closing.log_key_target(spec.key_mass, p.mask, p.score_shape, p.q.dtype)
    settings = plans.Settings(side, num_steps, spec.epsilon, p.scale, implementation)
    return plans.Closed(p, start, target, settings)


def num_closures(closures, side: str, spec: SinkhornSpec) -> int:
    """The number of half-steps that ``closures`` stands for, from a dual on ``side``.

    Raises:
      ValueError: an unknown name, n < 1, or a parity that would end on the wrong side.
      TypeError: a traced value.
    """
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
        return 1 if closures == "one_sided" else (3 if spec.last_step == "column" else 2)
    if not isinstance(closures, int) and not hasattr(closures, "__index__"):
        raise TypeError(f"closures must be 'one_sided', 'two_sided' or an int, got {closures!r}")
    n = checks.positive_int("closures", closures)
    ends_on = "column" if (side == "query") == (n % 2 == 1) else "row"
    if ends_on != spec.last_step:
        raise ValueError(
            f"closures={n} from side={side!r} end on a {ends_on} step, but the "
            f"teacher with num_steps={spec.num_steps} ends on a {spec.last_step}"
        )
    return n


def direct_weights(pair: DualPair, p: problem.Problem, spec: SinkhornSpec) -> jax.Array:
    """Weights from two predicted duals, without any c-transform (paper, design table)."""
    f, g = (starting_dual.predicted_dual(side, p, spec) for side in (pair.query, pair.key))
    g = g + checks.array("offset", pair.offset).astype(g.dtype)
    return ctransform.attention_weights(p.scores, f, g, epsilon=spec.epsilon, mask=p.mask)


for _function in (sinkhorn_attention, asap_attention):
    _function.__doc__ = _function.__doc__.rstrip() + "\n" + _KEYWORDS
del _function

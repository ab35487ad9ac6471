"""Ways to compute one plan: exponentiated once, in the log domain, a few problems at a time."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from jax.sharding import AxisType, PartitionSpec
from scipy.special import logsumexp

import asap_jax as aj
from asap_jax.solvers import batching, matrix_scaling, plan, tiled
from asap_jax.solvers import log_domain as closures
from asap_jax.solvers.kernel import Kernel

SHAPE = (2, 3, 7, 5)  # batch, heads, queries, keys


def kernel_of(log):
    """The Kernel whose log entries are exactly those given, -inf where it is masked."""
    mask = log != -jnp.inf
    scores = jnp.where(mask, log, 0.0)
    unit = jnp.broadcast_to(
        jnp.eye(log.shape[-1], dtype=log.dtype), (*log.shape[:-2], *(log.shape[-1],) * 2)
    )
    return Kernel(scores, unit, None, mask, 1.0)


def closing(rng, side, num_steps, size, dtype=jnp.float32):
    """Arguments of closures.finish and scaling.scale: scores of that spread, a start, a target."""
    kernel = jnp.asarray(rng.normal(size=SHAPE) * size, dtype)
    count = SHAPE[-2] if side == "query" else SHAPE[-1]
    start = jnp.asarray(rng.normal(size=(*SHAPE[:2], count)) * size / 3, dtype)
    target = jnp.log(jnp.asarray(SHAPE[-2] / SHAPE[-1], dtype))
    return (kernel, start), dict(side=side, num_steps=num_steps, log_target=target)


def alternating(kernel, start, side, num_steps, log_target):
    """Weights after half-steps that start on `side`, in float64 log domain."""
    u, v = (start, 0.0) if side == "query" else (0.0, start)
    for _ in range(num_steps):
        if side == "query":
            v = float(log_target) - logsumexp(kernel + u[..., None], axis=-2)
        else:
            u = -logsumexp(kernel + v[..., None, :], axis=-1)
        side = closures.OTHER[side]
    return np.exp(kernel + u[..., None] + v[..., None, :])


@pytest.mark.parametrize("size", [1, 10, 100, 300])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 20])
@pytest.mark.parametrize("side", ["query", "key"])
def test_scaling_gives_the_log_domain_weights(rng, side, num_steps, size):
    args, settings = closing(rng, side, num_steps, size)
    expected = alternating(*(np.asarray(a, np.float64) for a in args), **settings)
    kernel, start = kernel_of(args[0]), args[1]
    fits = bool(matrix_scaling.fits(kernel, start, side=side))
    assert fits == (size == 1)
    for divided in (True, False) if fits else (True,):
        run = functools.partial(matrix_scaling.scale, **settings, divided=divided)
        scaled = jax.jit(run)(kernel, start)
        assert bool(scaled.ok)
        # Scores of size s carry a rounding of s eps, which is relative in the weights.
        np.testing.assert_allclose(scaled.weights(), expected, rtol=0, atol=1e-6 + 1e-7 * size)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 10])
def test_teacher_weights_follow_the_paper_at_any_sharpness(rng, num_steps):
    for size, tolerance in ((10, 5e-6), (50, 2e-5)):
        s = problems.uniform_scores(rng, 12, 12, bound=size)
        # Scores enter as a bias on zero queries, so that their float32 values are exact.
        q = jnp.zeros((12, 1, 4))
        bias = jnp.asarray(s, jnp.float32)[None]
        v = jnp.eye(12)[:, None]
        out = aj.sinkhorn_attention(q, q, v, bias, spec=aj.SinkhornSpec(num_steps))
        expected = reference.sinkhorn(np.asarray(bias[0], np.float64), num_steps=num_steps)
        np.testing.assert_allclose(out[:, 0], expected, rtol=0, atol=tolerance)


def starved(dtype=jnp.float32):
    """Two queries that may only attend one key of unit mass: the scalings grow without bound."""
    mask = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 1]], bool)
    q, k, v = jax.random.normal(jax.random.key(3), (3, 1, 3, 2, 4), dtype)
    return q, k, v, jnp.asarray(mask)[None, None], aj.SinkhornSpec(num_steps=150)


def test_scalings_beyond_the_range_fall_back_to_the_log_domain():
    q, k, v, mask, spec = starved()
    kernel = Kernel(*(jnp.swapaxes(x, 1, 2) for x in (q, k)), None, mask, 0.5)
    settings = dict(side="key", num_steps=150, log_target=jnp.zeros(()))
    for divided in (True, False):
        assert not bool(
            matrix_scaling.scale(kernel, jnp.zeros((1, 2, 3)), **settings, divided=divided).ok
        )

    def outputs(implementation):
        function = functools.partial(
            aj.sinkhorn_attention, mask=mask, spec=spec, implementation=implementation
        )
        loss = lambda *qkv: jnp.sum(jnp.sin(function(*qkv)))
        return function(q, k, v), jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    chex.assert_trees_all_equal(outputs("scaling"), outputs("log"))
    chex.assert_tree_all_finite(outputs("scaling"))


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("masked", [False, True])
def test_no_entry_goes_beyond_what_the_norms_say(rng, side, masked):
    for size, fitting in ((0.5, True), (40.0, False)):
        q, k = (problems.normal(rng, 2, 3, n, 4) * size for n in (6, 5))
        bias = problems.normal(rng, 1, 3, 6, 5)
        mask = jnp.asarray(problems.random_mask(rng, 2, 1, 6, 5)) if masked else None
        kernel = Kernel(q, k, bias, mask, 0.5, 0.7)
        log = np.asarray(kernel.log())
        assert np.abs(log[np.isfinite(log)]).max() <= float(kernel.reach()) * (1 + 1e-6)
        start = problems.normal(rng, 2, 3, 6 if side == "query" else 5) * size
        fits = [bool(matrix_scaling.fits(kernel, start + by, side=side)) for by in (0, 500)]
        assert fits == 2 * [fitting]


def test_a_long_scaling_does_not_fit(rng):
    """The exponents of the kernel and of the start add up; tokens without an entry do not count."""
    q, k = (problems.normal(rng, 1, 1, 5, 4) for _ in range(2))
    mask = jnp.ones((1, 1, 5, 5), bool).at[..., 0].set(False)
    fits = lambda start: bool(
        matrix_scaling.fits(
            Kernel(q, k, None, mask, 0.5), jnp.asarray(start)[None, None], side="key"
        )
    )
    assert fits([1e9, 0.0, 0.0, 0.0, 40.0])
    assert not fits([0.0, 0.0, 0.0, 0.0, 64.0])


def test_the_guard_stays_one_scalar_under_vmap():
    q, k, v, mask, spec = starved()
    function = functools.partial(aj.sinkhorn_attention, mask=mask[0], spec=spec)
    text = str(jax.make_jaxpr(jax.vmap(function))(q, k, v))
    assert "cond[" in text  # a batched predicate would have turned it into a select of both
    mapped = jax.vmap(function)(jnp.concatenate([q, q]), *(jnp.concatenate([x, x]) for x in (k, v)))
    chex.assert_trees_all_close(mapped[1], function(q[0], k[0], v[0]), atol=1e-6)


@pytest.mark.parametrize(
    ("num_steps", "masked", "size"), [(1, True, 2), (3, False, 2), (6, True, 2), (4, True, 8)]
)
def test_derivatives_of_the_scaling_form(rng, x64, num_steps, masked, size):
    """Sizes 2 and 8: a kernel exponentiated as it is, and with its peaks divided out."""
    q, k, v = (jnp.asarray(size * rng.normal(size=(2, n, 2, 3))) for n in (5, 6, 6))
    mask = jnp.asarray(rng.random((2, 2, 5, 6)) > 0.3) if masked else None
    heads = [jnp.swapaxes(x, 1, 2) for x in (q, k)]
    kernel = Kernel(*heads, None, mask, 3**-0.5)
    assert bool(matrix_scaling.fits(kernel, jnp.zeros((2, 2, 6)), side="key")) == (size == 2)

    def of(implementation):
        function = functools.partial(
            aj.sinkhorn_attention,
            mask=mask,
            spec=aj.SinkhornSpec(num_steps),
            implementation=implementation,
        )
        loss = lambda *qkv: jnp.sum(jnp.sin(function(*qkv)))
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        forward = jax.jvp(function, (q, k, v), (k[:, :5], v, k))[1]
        second = jax.jvp(gradient, (q, k, v), (k[:, :5], v, k))[1]
        return gradient(q, k, v), forward, second

    of = jax.jit(of, static_argnums=0)
    # The largest second derivatives grow with the scores.
    chex.assert_trees_all_close(of("scaling"), of("log"), atol=5e-12 * size)


def test_implementations_agree_for_every_operator(rng):
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6)
    bias = problems.normal(rng, 1, 3, 6, 6)
    mask = jnp.asarray(problems.random_mask(rng, 2, 1, 6, 6))
    bank = jnp.asarray(rng.normal(size=(5, q.shape[-1])), jnp.float32)
    predictor = aj.Predictor(directions=bank, coefficients=jnp.full(5, 0.3))
    spec = aj.SinkhornSpec(num_steps=4)
    for function in (
        functools.partial(aj.sinkhorn_attention, spec=spec),
        functools.partial(aj.asap_attention, predictor=predictor, spec=spec, closures="one_sided"),
        functools.partial(aj.asap_attention, predictor=predictor, spec=spec),
        aj.softmax_attention,
    ):
        results = [
            function(q, k, v, bias, mask, implementation=name, return_weights=weights)
            for name in ("auto", "scaling", "streaming", "log")
            for weights in (False, True)
        ]
        outs = [r[0] if isinstance(r, tuple) else r for r in results]
        for out in outs[1:]:
            chex.assert_trees_all_close(out, outs[0], atol=2e-6)


# ------------------------------------------------------------------- a few problems at a time


@pytest.mark.parametrize(
    ("lead", "kernel", "limit", "expected"),
    [
        ((4, 8), 100, 10_000, (4, 8)),  # all at once
        ((4, 8), 100, 1_600, (2, 8)),  # heads whole, two examples
        ((4, 8), 100, 500, (1, 4)),  # half the heads of one example
        ((4, 8), 100, 10, (1, 1)),  # one problem even where it does not fit
        ((3, 7), 100, 500, (1, 1)),  # only divisors
        ((2, 1, 6), 10, 120, (2, 1, 6)),
        ((), 10, 1, ()),
    ],
)
def test_how_many_problems_are_done_at_a_time(lead, kernel, limit, expected):
    assert batching.sizes(lead, kernel, limit) == expected


@pytest.mark.parametrize("step", [(1, 1), (1, 3), (2, 1), (2, 2), (4, 6)])
def test_parts_give_the_whole(rng, step):
    x, shared, head = (rng.normal(size=s).astype("f") for s in ((4, 6, 5), (1, 1, 5), (1, 6, 1)))

    def function(x, shared, head, nothing):
        assert nothing is None
        assert x.shape[:2] == step
        return jnp.cumsum(x * shared, -1) + head

    out = batching.over_problems(function, (x, shared, head, None), (4, 6), step)
    np.testing.assert_allclose(out, np.cumsum(x * shared, -1) + head, rtol=1e-5)


def test_chunked_attention_and_its_gradient_are_those_of_the_whole(rng, monkeypatch):
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6, batch=4)
    bias = problems.normal(rng, 1, 3, 6, 6)
    mask = jnp.asarray(problems.random_mask(rng, 4, 1, 1, 6))

    def results():
        function = functools.partial(aj.sinkhorn_attention, mask=mask, spec=aj.SinkhornSpec(5))
        loss = lambda *args: jnp.sum(jnp.sin(function(*args)))
        return function(q, k, v, bias), jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)

    monkeypatch.setattr(batching, "ELEMENTS", {})
    whole = results()
    monkeypatch.setattr(batching, "ELEMENTS", {jax.default_backend(): 36})
    chex.assert_trees_all_close(results(), whole, atol=1e-5)


# ------------------------------------------------------------------------------ tile by tile


@pytest.mark.parametrize(
    ("size", "masked", "num_steps"),
    [(1, False, 1), (1, False, 4), (300, True, 2), (300, True, 3), (300, True, 7)],
)
@pytest.mark.parametrize("side", ["query", "key"])
def test_tiles_give_the_dense_plan_and_its_gradient(rng, x64, side, num_steps, masked, size):
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, n, 4))) for n in (11, 7, 7))
    q = q * size
    bias = jnp.asarray(rng.normal(size=(1, 3, 1, 7)))
    mask = jnp.asarray(rng.random((2, 1, 11, 7)) > 0.3) if masked else None
    start = jnp.asarray(rng.normal(size=(2, 3, 11 if side == "query" else 7)))
    target = jnp.full((1, 1, 1), np.log(11 / 7))
    settings = plan.Settings(side, num_steps, 1.0, 0.5, "log")

    def tiled(q, k, v, bias, start):
        given = (q, k, bias, mask, start, target, v)
        return tiled.mix(*given, settings=settings, precision=(None, None), block=4)

    def dense(q, k, v, bias, start):
        kernel = Kernel(q, k, bias, mask, 0.5)
        return plan.read(kernel, start, target, v, settings, None)

    def results(function):
        loss = lambda *args: jnp.sum(jnp.sin(function(*args)))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))(q, k, v, bias, start)

    chex.assert_trees_all_close(results(tiled), results(dense), atol=1e-10)


def test_tiles_notice_what_they_cannot_represent(rng):
    """A key that no query likes: its column of the row-closed plan underflows."""
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6)
    bias = jnp.zeros((1, 1, 1, 6)).at[..., 2].set(-120.0)
    heads = lambda x: jnp.swapaxes(x, 1, 2)
    settings = plan.Settings("key", 4, 1.0, 0.5, "streaming")
    tiles = tiled.cut(heads(q), heads(k), bias, None, None, settings, None, 2)
    start, target = jnp.zeros(heads(k).shape[:-1]), jnp.zeros((1, 1, 1))
    assert not bool(tiled._run(tiles, start, target, heads(v), None, None, robust=False)[1])
    outs = [
        aj.sinkhorn_attention(q, k, v, bias, spec=aj.SinkhornSpec(4), implementation=name)
        for name in ("streaming", "log")
    ]
    chex.assert_trees_all_close(*outs, rtol=1e-5, atol=1e-6)


def test_memory_of_tiles_does_not_grow_with_the_square_of_the_length():
    def temporary(length, implementation):
        like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        function = functools.partial(
            aj.sinkhorn_attention, spec=aj.SinkhornSpec(3), implementation=implementation
        )
        loss = lambda *qkv: jnp.sum(function(*qkv))
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return step.lower(like, like, like).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192, "streaming") < 0.05 * temporary(8192, "scaling")
    assert temporary(8192, "streaming") < 3 * temporary(4096, "streaming")


# ---------------------------------------------------------------------- other transformations


@pytest.mark.parametrize("implementation", ["scaling", "streaming", "log"])
def test_gradients_under_shard_map(implementation):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    spec = aj.SinkhornSpec(num_steps=4)
    attend = functools.partial(aj.sinkhorn_attention, spec=spec, implementation=implementation)
    gradient = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v) ** 2))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    shards = jax.shard_map(
        gradient, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
    )
    chex.assert_trees_all_close(jax.jit(shards)(q, k, v), gradient(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    ("families", "masked"),
    [
        ((aj.SlicedPotentials(aj.slice_directions(0, 3, 4), outside="zero"),), True),
        ((aj.RankDisplacement(aj.slice_directions(0, 3, 4)),), True),
        ((aj.Moments(),), False),
        ((aj.Moments(),), True),
    ],
    ids=["sliced", "rank", "moments", "moments masked"],
)
def test_compiled_layers_and_gradients_on_a_mesh_with_explicit_axes(families, masked):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    mask = jnp.ones((2, 1, 5, 5), bool).at[1, ..., -2:].set(False) if masked else None
    width = sum(family.num_features(4) for family in families)
    attend = functools.partial(
        aj.asap_attention,
        spec=aj.SinkhornSpec(num_steps=4),
        predictor=aj.Predictor(families, aj.LinearHead(jnp.ones(width) / width)),
    )
    loss = lambda q, k, v, mask: jnp.sum(attend(q, k, v, mask=mask) ** 2)
    both = jax.jit(lambda *arrays: (attend(*arrays[:3], mask=arrays[3]), jax.grad(loss)(*arrays)))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(both(*jax.device_put((q, k, v, mask), sharding)))
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in found)
    chex.assert_trees_all_close(jax.device_get(found), both(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize("closures", [0, 1, 2])
def test_export_with_a_symbolic_batch(closures):
    """0 stands for the teacher, the others for compiled layers."""
    side = "query" if closures % 2 else "key"
    predictor = aj.Predictor(directions=jnp.eye(4), coefficients=jnp.ones(4), side=side)
    spec = aj.SinkhornSpec(num_steps=4)
    attend = functools.partial(aj.sinkhorn_attention, spec=spec)
    if closures:
        attend = functools.partial(
            aj.asap_attention, spec=spec, predictor=predictor, closures=closures
        )
    (batch,) = jax.export.symbolic_shape("b")
    like = jax.ShapeDtypeStruct((batch, 5, 2, 4), jnp.float32)
    exported = jax.export.export(jax.jit(attend))(like, like, like)
    for size in (1, 3):
        q, k, v = jax.random.normal(jax.random.key(size), (3, size, 5, 2, 4))
        chex.assert_trees_all_close(exported.call(q, k, v), attend(q, k, v), atol=1e-6)


def test_an_empty_batch_gives_an_empty_result():
    empty = jnp.zeros((0, 5, 2, 4))
    for name in ("scaling", "streaming", "log"):
        out = aj.sinkhorn_attention(
            empty, empty, empty, spec=aj.SinkhornSpec(num_steps=4), implementation=name
        )
        chex.assert_shape(out, (0, 5, 2, 4))

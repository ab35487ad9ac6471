"""Every implementation of a plan under every operator and transformation."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import problems
import pytest
from jax.sharding import AxisType, PartitionSpec

import asap_jax as aj


@pytest.mark.parametrize("implementation", ["scaling", "streaming", "log"])
def test_gradients_are_right_under_shard_map(implementation):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    spec = aj.SinkhornSpec(num_steps=4)
    attend = functools.partial(aj.sinkhorn_attention, spec=spec, implementation=implementation)
    both = problems.graded(attend)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    shards = jax.shard_map(
        both, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
    )
    chex.assert_trees_all_close(jax.jit(shards)(q, k, v), both(q, k, v), atol=1e-5)


@pytest.mark.parametrize(
    ("families", "masked"),
    [
        ((aj.SlicedPotentials(aj.slice_directions(0, 3, 4), outside="zero"),), True),
        ((aj.Moments(),), False),
        ((aj.Moments(),), True),
    ],
    ids=["sliced", "moments", "moments masked"],
)
def test_compiled_layers_and_gradients_work_on_a_mesh_with_explicit_axes(families, masked):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    mask = jnp.ones((2, 1, 5, 5), bool).at[1, ..., -2:].set(False) if masked else None
    width = sum(family.num_features(4) for family in families)
    attend = functools.partial(
        aj.asap_attention,
        spec=aj.SinkhornSpec(num_steps=4),
        predictor=aj.Predictor(families, aj.LinearHead(jnp.ones(width) / width)),
    )
    both = problems.graded(lambda q, k, v, mask: attend(q, k, v, mask=mask))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    with jax.set_mesh(mesh):
        found = jax.block_until_ready(both(*jax.device_put((q, k, v, mask), sharding)))
    leaves = jax.tree.leaves(found)
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in leaves)
    chex.assert_trees_all_close(jax.device_get(found), both(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize("closures", [0, 1, 2])
def test_export_works_with_a_symbolic_batch(closures):
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

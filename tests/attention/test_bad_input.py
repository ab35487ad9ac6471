"""Input that does not fit is refused at trace time, with a message that names what and how."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import asap_jax as aj

SPEC = aj.SinkhornSpec(num_steps=4)
PREDICTOR = aj.Predictor(directions=jnp.eye(4)[:3], coefficients=jnp.ones(3))

FUNCTIONS = {
    "sinkhorn": functools.partial(aj.sinkhorn_attention, spec=SPEC),
    "compiled": functools.partial(aj.asap_attention, spec=SPEC, predictor=PREDICTOR),
    "softmax": aj.softmax_attention,
}


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def inputs(**changes):
    """Shapes of a call that fits, with some of them replaced."""
    fitting = {"query": array(2, 7, 3, 4), "key": array(2, 5, 3, 4), "value": array(2, 5, 3, 4)}
    return fitting | changes


def refused(function, arguments, error, *parts):
    """Checks that tracing the call raises `error` with every part in its message."""
    with pytest.raises(error) as caught:
        jax.eval_shape(function, **arguments)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"value": array(2, 6, 3, 4)}, ["(2, 5, 3, 4)", "(2, 6, 3, 4)", "key", "value"]),
        ({"key": array(2, 5, 3, 5)}, ["(2, 7, 3, 4)", "(2, 5, 3, 5)", "query", "key"]),
        ({"query": array(2, 7, 4, 4)}, ["(2, 7, 4, 4)", "(2, 5, 3, 4)", "heads"]),
        (
            {"key": array(2, 5, 2, 4), "value": array(2, 5, 2, 4)},
            ["(2, 7, 3, 4)", "(2, 5, 2, 4)", "heads"],
        ),
        ({"value": array(2, 5, 1, 4)}, ["(2, 5, 3, 4)", "(2, 5, 1, 4)", "heads"]),
        (
            {"key": array(3, 5, 3, 4), "value": array(3, 5, 3, 4)},
            ["(2, 7, 3, 4)", "(3, 5, 3, 4)", "batch"],
        ),
        (
            {"key": array(1, 5, 3, 4), "value": array(1, 5, 3, 4)},
            ["(2, 7, 3, 4)", "(1, 5, 3, 4)", "batch"],
        ),
        ({"query": array(7, 3, 4)}, ["(7, 3, 4)", "(2, 5, 3, 4)", "rank"]),
        ({"query": array(7, 4), "key": array(5, 4), "value": array(5, 4)}, ["(7, 4)", "rank"]),
        ({"query": array(4), "key": array(4), "value": array(4)}, ["(4,)", "rank"]),
        ({"query": array(2, 0, 3, 4)}, ["(2, 0, 3, 4)"]),
        ({"key": array(2, 0, 3, 4), "value": array(2, 0, 3, 4)}, ["(2, 0, 3, 4)"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, changes, parts):
    refused(FUNCTIONS[name], inputs(**changes), ValueError, *parts)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_dtypes_that_are_not_real_floating_are_refused(name, which, dtype):
    shape = inputs()[which].shape
    refused(FUNCTIONS[name], inputs(**{which: array(*shape, dtype=dtype)}), TypeError, which, dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("which", ["mask", "bias"])
@pytest.mark.parametrize(
    "shape",
    [
        (5,),
        (2, 5),
        (7, 5),
        (2, 7, 5),
        (2, 3, 7, 4),
        (3, 1, 1, 5),
        (2, 2, 7, 5),
        (2, 1, 6, 5),
        (1, 2, 3, 7, 5),
    ],
)
def test_masks_and_biases_that_do_not_broadcast_are_refused(name, which, shape):
    dtype = "bool" if which == "mask" else "float32"
    refused(
        FUNCTIONS[name],
        inputs(**{which: array(*shape, dtype=dtype)}),
        ValueError,
        which,
        str(shape),
        "(2, 3, 7, 5)",
    )


def test_a_key_mask_without_its_middle_axes_is_refused_even_if_it_broadcasts():
    square = inputs(query=array(5, 5, 3, 4), key=array(5, 5, 3, 4), value=array(5, 5, 3, 4))
    refused(
        FUNCTIONS["sinkhorn"],
        square | {"mask": array(5, 5, dtype="bool")},
        ValueError,
        "mask",
        "(5, 5)",
        "(5, 3, 5, 5)",
        "(batch, 1, 1, keys)",
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_a_bias_of_another_dtype_is_refused(name, dtype):
    refused(FUNCTIONS[name], inputs(bias=array(1, 1, 7, 5, dtype=dtype)), TypeError, "bias", dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_complex_mask_is_refused(name):
    refused(
        FUNCTIONS[name],
        inputs(mask=array(1, 1, 7, 5, dtype="complex64")),
        TypeError,
        "mask",
        "complex64",
    )


@pytest.mark.parametrize(
    ("settings", "error", "part"),
    [
        ({"num_steps": 0}, ValueError, "num_steps"),
        ({"num_steps": -3}, ValueError, "num_steps"),
        ({"num_steps": 2.5}, TypeError, "num_steps"),
        ({"num_steps": True}, TypeError, "num_steps"),
        ({"num_steps": "4"}, TypeError, "num_steps"),
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"epsilon": -1.0}, ValueError, "epsilon"),
        ({"epsilon": float("nan")}, ValueError, "epsilon"),
        ({"epsilon": float("inf")}, ValueError, "epsilon"),
        ({"epsilon": "1"}, TypeError, "epsilon"),
        ({"epsilon": np.ones(2)}, TypeError, "epsilon"),
        ({"scale": 0.0}, ValueError, "scale"),
        ({"scale": -0.5}, ValueError, "scale"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"key_mass": "half"}, ValueError, "half"),
        ({"padding": "left"}, ValueError, "left"),
    ],
)
def test_settings_of_a_spec_out_of_range_are_refused(settings, error, part):
    with pytest.raises(error, match=part):
        aj.SinkhornSpec(**settings)


@pytest.mark.parametrize("name", ["sinkhorn", "compiled"])
@pytest.mark.parametrize("spec", [None, 10, {"num_steps": 10}])
def test_a_spec_of_another_type_is_refused(name, spec):
    refused(functools.partial(FUNCTIONS[name], spec=spec), inputs(), TypeError, "spec")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("implementation", ["", "fast", "LOG", None])
def test_an_unknown_implementation_is_refused_with_the_known_ones(name, implementation):
    function = functools.partial(FUNCTIONS[name], implementation=implementation)
    refused(
        function, inputs(), ValueError, "implementation", repr(implementation), "'auto'", "'log'"
    )


@pytest.mark.parametrize(
    ("closures", "error"),
    [
        ("three_sided", ValueError),
        (0, ValueError),
        (-1, ValueError),
        (2, ValueError),
        (1.0, TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_unknown_closures_are_refused(closures, error):
    function = functools.partial(FUNCTIONS["compiled"], closures=closures)
    refused(function, inputs(), error, "closures")


@pytest.mark.parametrize("before_end", [0, -1, 4, 7, 1.5, "1"])
def test_an_aligned_dual_of_a_step_that_does_not_exist_is_refused(before_end):
    with pytest.raises((ValueError, TypeError), match="before_end"):
        aj.sinkhorn_duals(jnp.zeros((3, 3)), spec=SPEC, before_end=before_end)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (aj.scores, {"q": array(2, 7, 4), "k": array(2, 5, 4)}),
        (aj.query_shift, {"q": array(2, 7, 4)}),
        (
            functools.partial(aj.sliced_potentials, directions=jnp.eye(4)),
            {"q": array(2, 7, 4), "k": array(2, 5, 4)},
        ),
        (functools.partial(aj.predict, PREDICTOR), {"q": array(2, 7, 4), "k": array(2, 5, 4)}),
        (FUNCTIONS["softmax"], inputs()),
    ],
    ids=["scores", "query_shift", "sliced_potentials", "predict", "softmax_attention"],
)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_not_positive_is_refused(function, arguments, scale):
    refused(functools.partial(function, scale=scale), arguments, ValueError, "scale", str(scale))


@pytest.mark.parametrize(
    ("function", "dual"),
    [(aj.key_ctransform, "f"), (aj.query_ctransform, "g"), (aj.attention_weights, None)],
    ids=["key_ctransform", "query_ctransform", "attention_weights"],
)
@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan")])
def test_an_epsilon_that_is_not_positive_is_refused(function, dual, epsilon):
    duals = {"f": array(2, 7), "g": array(2, 5)}
    duals = duals if dual is None else {dual: duals[dual]}
    refused(
        functools.partial(function, epsilon=epsilon),
        {"scores": array(2, 7, 5)} | duals,
        ValueError,
        "epsilon",
        str(epsilon),
    )


@pytest.mark.parametrize(
    ("q", "k"), [((2, 7, 4), (2, 5, 3)), ((2, 7, 4), (3, 5, 4)), ((2, 7, 4), (5, 4)), ((4,), (4,))]
)
@pytest.mark.parametrize(
    "function",
    [
        aj.scores,
        functools.partial(aj.sliced_potentials, directions=jnp.eye(4)),
        functools.partial(aj.predict, PREDICTOR),
    ],
    ids=["scores", "sliced_potentials", "predict"],
)
def test_queries_and_keys_that_do_not_fit_are_refused(function, q, k):
    refused(function, {"q": array(*q), "k": array(*k)}, ValueError, str(q), str(k))


@pytest.mark.parametrize("shape", [(3, 5), (3,), (2, 3, 4)])
def test_directions_of_another_width_are_refused(shape):
    refused(
        aj.sliced_potentials,
        {"q": array(2, 7, 4), "k": array(2, 5, 4), "directions": array(*shape)},
        ValueError,
        "directions",
        str(shape),
        "(2, 7, 4)",
    )
    if len(shape) == 2:
        predictor = aj.Predictor(directions=jnp.ones(shape), coefficients=jnp.ones(3))
        refused(
            functools.partial(FUNCTIONS["compiled"], predictor=predictor),
            inputs(),
            ValueError,
            "directions",
            str(shape),
        )


@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0, 0.0], [1.0, np.nan, 0.0, 0.0]])
def test_an_empty_bank_of_directions_is_refused(row):
    with pytest.raises(ValueError, match="directions"):
        aj.sliced_potentials(jnp.ones((7, 4)), jnp.ones((5, 4)), jnp.asarray([row]))


@pytest.mark.parametrize("name", ["query_valid", "key_valid"])
@pytest.mark.parametrize("shape", [(6,), (3, 1), (2, 2, 1)])
def test_validities_that_do_not_broadcast_are_refused(name, shape):
    arguments = {"q": array(2, 7, 4), "k": array(2, 5, 4), name: array(*shape, dtype="bool")}
    refused(
        functools.partial(aj.sliced_potentials, directions=jnp.eye(4)),
        arguments,
        ValueError,
        name,
        str(shape),
    )


@pytest.mark.parametrize(("option", "value"), [("outside", "ignore"), ("outside", None)])
def test_unknown_options_of_potentials_are_refused(option, value):
    function = functools.partial(aj.sliced_potentials, directions=jnp.eye(4), **{option: value})
    refused(function, {"q": array(7, 4), "k": array(5, 4)}, ValueError, option, repr(value))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [((0, 0, 4), "num_slices"), ((0, 3, 0), "head_dim"), ((0, -1, 4), "num_slices")],
)
def test_empty_direction_banks_are_refused(arguments, part):
    with pytest.raises(ValueError, match=part):
        aj.slice_directions(*arguments)


def test_an_unknown_kind_of_directions_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="sobol.*gaussian.*orthogonal"):
        aj.slice_directions(0, 3, 4, kind="sobol")


@pytest.mark.parametrize(
    ("dual", "shape"), [("f", (5,)), ("f", (2, 5)), ("f", (7,)), ("g", (2, 7)), ("g", (5,))]
)
def test_duals_of_another_length_are_refused(dual, shape):
    function = aj.key_ctransform if dual == "f" else aj.query_ctransform
    refused(
        function,
        {"scores": array(2, 7, 5), dual: array(*shape)},
        ValueError,
        dual,
        str(shape),
        "(2, 7, 5)",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda scores: aj.sinkhorn_duals(scores, spec=SPEC),
        lambda scores: aj.key_ctransform(scores, jnp.zeros((2, 7))),
        lambda scores: aj.attention_weights(scores, jnp.zeros((2, 7)), jnp.zeros((2, 5))),
    ],
    ids=["sinkhorn_duals", "key_ctransform", "attention_weights"],
)
@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_scores_of_another_dtype_are_refused(function, dtype):
    refused(function, {"scores": array(2, 7, 5, dtype=dtype)}, TypeError, "scores", dtype)


@pytest.mark.parametrize("shape", [(5,), ()])
def test_scores_that_are_not_a_matrix_are_refused(shape):
    refused(
        lambda scores: aj.sinkhorn_duals(scores, spec=SPEC),
        {"scores": array(*shape)},
        ValueError,
        "scores",
        str(shape),
    )


@pytest.mark.parametrize("shape", [(5,), (7, 5), (1, 1, 7, 5), (2, 7, 4)])
def test_functions_of_scores_refuse_masks_of_another_rank(shape):
    mask = array(*shape, dtype="bool")
    refused(
        lambda scores, mask: aj.sinkhorn_duals(scores, spec=SPEC, mask=mask),
        {"scores": array(2, 7, 5), "mask": mask},
        ValueError,
        "mask",
        str(shape),
        "(2, 7, 5)",
    )
    refused(
        aj.key_ctransform,
        {"scores": array(2, 7, 5), "f": array(2, 7), "mask": mask},
        ValueError,
        "mask",
        str(shape),
        "(2, 7, 5)",
    )


@pytest.mark.parametrize("ridge", [-1.0, -1e-9, float("nan"), float("inf")])
def test_a_negative_ridge_is_refused(ridge):
    refused(
        functools.partial(aj.fit_ls, ridge=ridge),
        {"features": array(7, 3), "targets": array(7)},
        ValueError,
        "ridge",
        str(ridge),
    )


@pytest.mark.parametrize(
    ("features", "targets"), [((7, 3), (6,)), ((2, 7, 3), (7,)), ((7,), ()), ((2, 7, 3), (2, 7, 1))]
)
def test_regression_rows_that_do_not_fit_are_refused(features, targets):
    refused(
        aj.fit_ls,
        {"features": array(*features), "targets": array(*targets)},
        ValueError,
        "features",
        str(features),
        "targets",
        str(targets),
    )


def test_regression_rows_of_another_dtype_are_refused():
    refused(
        aj.fit_ls,
        {"features": array(7, 3, dtype="int32"), "targets": array(7)},
        TypeError,
        "features",
        "int32",
    )
    refused(
        aj.fit_ls,
        {"features": array(7, 3), "targets": array(7, dtype="complex64")},
        TypeError,
        "targets",
        "complex64",
    )


def test_running_sums_refuse_rows_of_another_width():
    sums = aj.NormalEquations.zero(4)
    refused(sums.add, {"features": array(7, 3), "targets": array(7)}, ValueError, "(7, 3)", "4")
    sums = aj.NormalEquations.zero(3, num_heads=2)
    refused(
        sums.add,
        {"features": array(5, 7, 3), "targets": array(5, 7)},
        ValueError,
        "(5, 7, 3)",
        "2 heads",
    )


@pytest.mark.parametrize(
    ("coefficients", "parts"),
    [
        ((4,), ["(4,)", "coefficients"]),
        ((2, 3), ["(2, 3)", "heads"]),
        ((3, 4), ["(3, 4)"]),
        ((1, 3, 3), ["(1, 3, 3)"]),
    ],
)
def test_coefficients_that_do_not_fit_are_refused(coefficients, parts):
    predictor = aj.Predictor(directions=jnp.eye(4)[:3], coefficients=jnp.ones(coefficients))
    refused(
        functools.partial(FUNCTIONS["compiled"], predictor=predictor), inputs(), ValueError, *parts
    )


@pytest.mark.parametrize("predictor", [None, {"coefficients": 1.0}, SPEC])
def test_a_predictor_of_another_type_is_refused(predictor):
    refused(
        functools.partial(FUNCTIONS["compiled"], predictor=predictor),
        inputs(),
        TypeError,
        "predictor",
    )


@pytest.mark.parametrize(("option", "value"), [("side", "both"), ("baseline", "last_step")])
def test_unknown_options_of_a_predictor_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        aj.Predictor(directions=jnp.eye(4), coefficients=jnp.ones(4), **{option: value})


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_dropout_rate_out_of_range_is_refused(rate):
    function = functools.partial(
        FUNCTIONS["sinkhorn"], dropout_rate=rate, deterministic=False, dropout_rng=jax.random.key(0)
    )
    refused(function, inputs(), ValueError, "dropout_rate")


@pytest.mark.parametrize("option", ["return_weights", "is_causal", "deterministic"])
def test_traced_switches_are_refused_with_a_remedy(option):
    extra = {"dropout_rate": 0.5} if option == "deterministic" else {}
    function = functools.partial(FUNCTIONS["sinkhorn"], **extra)
    refused(
        lambda switch, **arrays: function(**arrays, **{option: switch}),
        inputs(switch=array(dtype="bool")),
        TypeError,
        option,
        "static",
    )


# ------------------------------------------------- things of another type altogether, by argument


LINEN = nn.MultiHeadDotProductAttention(2, attention_fn=aj.linen.SinkhornAttention(SPEC))
TOKENS, SCORES, DUAL = np.ones((3, 5, 4), "f"), np.ones((3, 5, 5), "f"), np.ones((3, 5), "f")
NO_ARRAYS = ("text", None, object(), [[1.0], [1.0, 2.0]])


def nnx_model():
    attend = aj.nnx.SinkhornAttention(SPEC)
    return nnx.MultiHeadAttention(2, 4, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))


def call(name, **changes):
    arrays = {key: jnp.ones((2, 4, 2, 4)) for key in ("query", "key", "value")}
    return {**FUNCTIONS, "diff": aj.diff_attention, "esp": aj.esp_attention}[name](
        **{**arrays, **changes}
    )


@pytest.mark.parametrize("value", NO_ARRAYS, ids=["text", "None", "object", "ragged"])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("name", [*FUNCTIONS, "diff", "esp"])
def test_attention_refuses_inputs_that_are_not_arrays(name, which, value):
    with pytest.raises(TypeError, match=f"^{which} must be an array, got"):
        call(name, **{which: value})


@pytest.mark.parametrize("name", [*FUNCTIONS, "diff", "esp"])
@pytest.mark.parametrize(
    ("option", "value", "given"),
    [
        ("mask", "causal", "causal"),
        ("bias", "causal", "causal"),
        ("dtype", "zz", "zz"),
        ("dtype", 3, "int 3"),
        ("module", 3, "int 3"),
        ("implementation", 3, "3"),
    ],
)
def test_attention_refuses_options_of_another_type(name, option, value, given):
    with pytest.raises((TypeError, ValueError), match=f"^{option}.*{given}"):
        call(name, **{option: value})


@pytest.mark.parametrize("rng", [3, "a", jnp.ones(2)], ids=str)
def test_dropout_with_an_invalid_random_key_is_refused(rng):
    with pytest.raises(TypeError, match="dropout_rng must be one JAX random key, got"):
        call("sinkhorn", dropout_rate=0.5, deterministic=False, dropout_rng=rng)


PARTS = {
    "q": [
        lambda x: aj.scores(x, TOKENS),
        aj.query_shift,
        lambda x: aj.sliced_potentials(x, TOKENS, np.eye(4, dtype="f")),
        lambda x: aj.predict(PREDICTOR, x, TOKENS),
        lambda x: aj.Moments()(x, TOKENS),
    ],
    "directions": [
        lambda x: aj.sliced_potentials(TOKENS, TOKENS, x),
        lambda x: aj.SlicedPotentials(x)(TOKENS, TOKENS),
        lambda x: aj.RankDisplacement(x)(TOKENS, TOKENS),
    ],
    "coefficients": [
        lambda x: aj.LinearHead(x)(jnp.ones((3, 5, 2))),
        lambda x: aj.kl_objective(x, np.ones((3, 5, 2), "f"), DUAL, SCORES, DUAL),
    ],
    "query": [lambda x: aj.squared_euclidean_inputs(x, jnp.ones((2, 4, 2, 4)))],
    "scores": [
        lambda x: aj.sinkhorn_duals(x, spec=SPEC),
        lambda x: aj.fit_kl(np.ones((3, 5, 2), "f"), DUAL, x, DUAL),
    ],
    "f": [lambda x: aj.key_ctransform(SCORES, x), lambda x: aj.attention_weights(SCORES, x, DUAL)],
    "g": [lambda x: aj.query_ctransform(SCORES, x)],
    "log_target": [lambda x: aj.key_ctransform(SCORES, DUAL, log_target=x)],
    "features": [lambda x: aj.fit_ls(x, DUAL), lambda x: aj.fit_kl(x, DUAL, SCORES, DUAL)],
    "targets": [
        lambda x: aj.fit_ls(np.ones((3, 5, 2), "f"), x),
        lambda x: aj.NormalEquations.zero(2).add(np.ones((3, 5, 2), "f"), x),
    ],
    "own centres": [lambda x: aj.Codebook(x, np.ones((2, 4), "f"), PREDICTOR)(TOKENS, TOKENS)],
    "weights": [aj.metrics.row_error, lambda x: aj.metrics.plan_kl(x, SCORES)],
    "reference": [lambda x: aj.metrics.attention_rel_l2(SCORES, x)],
    "target": [lambda x: aj.metrics.column_error(SCORES, target=x)],
}


@pytest.mark.parametrize("value", NO_ARRAYS, ids=["text", "None", "object", "ragged"])
@pytest.mark.parametrize(
    ("name", "function"), [(n, f) for n, fs in PARTS.items() for f in fs], ids=lambda x: str(x)[:9]
)
def test_other_functions_refuse_inputs_that_are_not_arrays(name, function, value):
    with pytest.raises(TypeError, match=f"^{name} must be an array, got"):
        function(value)


@pytest.mark.parametrize("rng", [None, "a", 1.5, True, jnp.ones(2)], ids=str)
def test_directions_from_an_invalid_random_key_are_refused(rng):
    with pytest.raises(TypeError, match="^rng must be one JAX random key, got"):
        aj.slice_directions(rng, 3, 4)


@pytest.mark.parametrize(
    ("option", "value", "given"),
    [
        ("features", 3, "int 3"),
        ("features", None, "None"),
        ("features", ("moments", 3), "int 3"),
        ("features", aj.Moments(), "Moments"),
        ("features", (aj.Moments,), "Moments"),
        ("ladder", 3, "int 3"),
        ("ladder", "123", "123"),
        ("ladder", ("a",), "'a'"),
        ("candidates", 3, "int 3"),
        ("candidates", ("moments",), "str 'moments'"),
        ("candidates", aj.Candidate("moments"), "Candidate"),
        ("candidates", np.ones(2), "float64"),
        ("layers", 3, "int 3"),
        ("fit", np.ones(2), "array"),
        ("closures", np.ones(2), "array"),
        ("time_limit", "a", "str"),
    ],
)
def test_compile_refuses_settings_of_another_type(option, value, given):
    kind = {"features": aj.PaperFit, "layers": aj.Options, "fit": aj.Options}.get(
        option, aj.AutoFit
    )
    kind = aj.Options if option == "closures" else kind
    with pytest.raises((TypeError, ValueError), match=f"^{option}.*{given}"):
        kind(**{option: value})


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"features": "moments"}, "features.*str 'moments'"),
        ({"features": "moments", "directions": jnp.eye(4)}, "features.*str 'moments'"),
        ({"features": aj.Moments()}, "features.*Moments"),
        ({"features": (3,)}, "features.*int 3"),
        ({"features": 3}, "features.*int 3"),
        ({"features": (aj.Moments,)}, "features.*Moments"),
        ({"features": (aj.Moments(),), "corrections": (3,)}, "corrections.*int 3"),
        ({"features": (aj.Moments(),), "corrections": 3}, "corrections.*int 3"),
        ({"features": (aj.Moments(),), "corrections": (object(),)}, "corrections.*object"),
        (
            {"features": (aj.Moments(),), "corrections": aj.Correction((), None)},
            "corrections.*Correction",
        ),
        ({"features": (aj.Moments(),), "token_bias": "a"}, "token_bias.*str 'a'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_predictor_refuses_parts_of_another_type(parts, named):
    with pytest.raises(TypeError, match=f"^{named}"):
        call("compiled", predictor=aj.Predictor(coefficients=jnp.ones(12), **parts))


def test_a_head_of_another_type_is_refused():
    with pytest.raises(TypeError, match="^head must be callable on features, got int 3"):
        call("compiled", predictor=PREDICTOR.replace(head=3))
    with pytest.raises(ValueError, match=r"hidden of shape \(3, 4\).*shape \(2,\)"):
        aj.MLPHead(jnp.ones(2), jnp.ones((3, 4)), jnp.ones(4), jnp.ones(4))(jnp.ones((5, 2)))


@pytest.mark.parametrize(
    ("batches", "given"),
    [
        (None, "^batches.*None"),
        (3, "^batches.*int 3"),
        (["a"], "^calibration batch 0.*str 'a'"),
        ([None], "^calibration batch 0.*None"),
        ([{"x": object()}], "^calibration batch 0.*object"),
        ([np.array(["a"])], "^calibration batch 0.*ndarray"),
    ],
    ids=["None", "int", "text inside", "None inside", "object inside", "text array inside"],
)
def test_batches_of_another_type_are_refused(batches, given):
    with pytest.raises(TypeError, match=given):
        aj.linen.compile(LINEN, {}, batches)
    with pytest.raises(TypeError, match=given):
        aj.nnx.compile(nnx_model(), batches)


def test_a_model_of_the_other_framework_raises_and_names_the_right_compile():
    with pytest.raises(TypeError, match=r"model.*got MultiHeadAttention; call asap_jax\.nnx\.comp"):
        aj.linen.compile(nnx_model(), {}, [TOKENS])
    with pytest.raises(TypeError, match=r"model.*DotProductAttention; call asap_jax\.linen\.comp"):
        aj.nnx.compile(LINEN, [TOKENS])


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda: aj.linen.compile(3, {}, [TOKENS]), "model.*int 3"),
        (lambda: aj.nnx.compile(3, [TOKENS]), "model.*int 3"),
        (lambda: aj.linen.compile(LINEN, [TOKENS], [TOKENS]), "variables.*list"),
        (lambda: aj.linen.compile(LINEN, {}, [TOKENS], apply_kwargs=3), "apply_kwargs.*int 3"),
        (lambda: aj.nnx.compile(nnx_model(), [TOKENS], forward=3), "forward.*int 3"),
        (lambda: aj.nnx.Calibration({}), "options.*dict"),
        (lambda: aj.nnx.Calibration().finish(nnx_model(), TOKENS), "report_batches.*ndarray"),
        (lambda: aj.nnx.Calibration().add(nnx_model(), "a"), "calibration batch 0.*str 'a'"),
        (lambda: aj.nnx.SinkhornAttention(3), "spec.*int 3"),
        (lambda: aj.nnx.DiffAttention(4, depth=0, rngs=None), "rngs.*None"),
        (
            lambda: aj.nnx.DiffAttention(4, depth=0, rngs=nnx.Rngs(0), param_dtype="zz"),
            "param_dtype.*zz",
        ),
        (lambda: aj.nnx.EspAttention(directions="a"), "directions.*str 'a'"),
        (lambda: aj.nnx.set_esp_temperature(3, 0.1), "model.*int 3"),
        (lambda: aj.nnx.set_esp_temperature(nnx_model(), "a"), "temperature.*str"),
        (lambda: aj.sinkhorn_duals(SCORES, spec=3), "spec.*int 3"),
        (lambda: aj.predict(3, TOKENS, TOKENS), "predictor.*int 3"),
        (lambda: aj.NormalEquations.zero(2, num_heads="a"), "num_heads.*'a'"),
        (lambda: aj.NormalEquations.zero(2, dtype="zz"), "dtype.*zz"),
        (lambda: aj.NormalEquations.zero(2) + 3, ".*NormalEquations.*int"),
        (lambda: aj.metrics.attention_rel_l2(SCORES, SCORES, pooled="a"), "pooled.*str"),
        (lambda: aj.Candidate(3), "name.*int 3"),
        (lambda: aj.load(3, like={}), "path.*int 3"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_of_another_type_are_refused(function, named):
    with pytest.raises(TypeError, match=f"^{named}"):
        function()

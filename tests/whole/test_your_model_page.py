"""The blocks of docs/your-model.md run in order, and every compiled model is near its teacher."""

import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your-model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """The names that the blocks define."""
    names = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


LINEN = {
    "encoder": ("variables", "encoded", 2),
    "stack": ("stack_variables", "stacked", 3),
    "set_model": ("set_variables", "gathered", 2),
}


def outputs(names, model):
    """The teacher and the compiled model as functions of a batch, and the compile's result."""
    if model == "transformer":
        result = names["transformed"]
        return nnx.jit(names[model]), nnx.jit(result.model), result
    teacher, compiled, _ = LINEN[model]
    apply, result = jax.jit(names[model].apply), names[compiled]
    return (
        lambda *batch: apply(names[teacher], *batch),
        lambda *batch: apply(result.variables, *batch),
        result,
    )


@pytest.mark.parametrize("model", [*LINEN, "transformer"])
def test_a_compiled_stock_model_is_near_its_teacher_and_ignores_padding(names, model):
    teacher, compiled, result = outputs(names, model)
    num_layers = LINEN[model][2] if model in LINEN else 2
    assert len(result.report.layers) == num_layers
    x, valid = names["xs"][-1], names["valids"][-1]
    expected, y = np.asarray(teacher(x, valid)), np.asarray(compiled(x, valid))
    error = np.linalg.norm((y - expected)[valid]) / np.linalg.norm(expected[valid])
    assert 1e-7 < error < 0.02
    noisy = np.where(valid[..., None], x, 1e3)
    np.testing.assert_allclose(np.asarray(compiled(noisy, valid))[valid], y[valid], atol=1e-5)


def test_a_bare_attention_layer_is_compiled_through_a_forward(names):
    by_forward = names["compiled"]
    assert list(by_forward.states) == ["attention_fn"]
    plain = names["aj"].linen.compile(names["layer"], names["layer_variables"], names["xs"])
    jax.tree.map(np.testing.assert_array_equal, by_forward.states, plain.states)

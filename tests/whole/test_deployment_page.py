"""The blocks of docs/deployment.md run in order, and what they wrote is served by JAX alone."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import asap_jax as aj

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "deployment.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SERVE = """
import sys
import numpy as np
{block}
assert not {{"flax", "asap_jax"}} & set(sys.modules)
np.save("served.npy", y)
"""


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The names that the blocks define, run in a folder of their own."""
    pytest.importorskip("flatbuffers", reason="flatbuffers comes with the export extra")
    folder, names = tmp_path_factory.mktemp("deployment"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), names)
    return names | {"folder": folder}


def test_the_program_gives_what_the_model_gives_at_other_sizes(names):
    expected = names["run"](jnp.ones((2, 7, 64)))
    np.testing.assert_allclose(names["y"], expected, atol=1e-6)
    assert names["loaded"].keys() == names["compiled"].variables.keys()


def test_the_program_of_an_nnx_model_gives_what_the_model_gives(names):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 64)), jnp.float32)
    called = jax.jit(names["nnx_program"].call)(x)
    np.testing.assert_allclose(called, names["nnx_compiled"](x), atol=1e-6)


def test_a_process_without_flax_and_the_library_serves_the_program(names):
    (block,) = (block for block in BLOCKS if "deserialize" in block)
    code = SERVE.format(block=block)
    subprocess.run([sys.executable, "-I", "-c", code], cwd=names["folder"], check=True)
    served = np.load(names["folder"] / "served.npy")
    np.testing.assert_allclose(served, names["y"], atol=1e-5)


def test_the_program_of_a_layer_gives_what_the_layer_gives_under_a_mask(names):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 7, 4, 16)).astype(np.float32)
    mask = jnp.arange(7)[None, None, None] < jnp.array([5, 7])[:, None, None, None]
    called = jax.jit(names["program"].call)(q, k, v, mask)
    np.testing.assert_allclose(called, names["layer"](q, k, v, mask), atol=1e-6)
    assert names["program"].platforms == ("cpu", "cuda", "tpu")


def test_a_token_bias_refuses_a_symbolic_length():
    bias = aj.Predictor(
        directions=jnp.eye(4), coefficients=jnp.ones(4), token_bias=jnp.ones(9)
    ).replace(features=(aj.RawProjections(jnp.eye(4)),))
    attend = lambda x: aj.asap_attention(x, x, x, predictor=bias, spec=aj.SinkhornSpec(4))
    (length,) = jax.export.symbolic_shape("length")
    with pytest.raises(ValueError, match=r"token_bias of shape \(9,\) does not fit length tokens"):
        jax.export.export(jax.jit(attend))(jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32))

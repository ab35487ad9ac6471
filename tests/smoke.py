"""What an installed wheel must do; ``make dist`` runs this file outside the checkout."""

import pathlib
import subprocess
import sys
import tempfile

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

import asap_jax as aj

spec = aj.SinkhornSpec(num_steps=4)
rng = np.random.default_rng(0)
batches = [rng.normal(size=(4, 6, 8)).astype(np.float32) for _ in range(4)]

model = nn.MultiHeadDotProductAttention(2, attention_fn=aj.linen.SinkhornAttention(spec))
variables = model.init(jax.random.key(0), batches[0])
compiled = aj.linen.compile(model, variables, batches)
assert "rel-l2" in str(compiled.report)
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "model.asap"
    aj.save(path, compiled, weights=True)
    loaded = aj.load(path)
    again = jax.jit(model.apply)(loaded, batches[0])
np.testing.assert_array_equal(again, jax.jit(model.apply)(compiled.variables, batches[0]))

attention_fn = aj.nnx.SinkhornAttention(spec)
layer = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
y = nnx.jit(aj.nnx.compile(layer, batches, ending="row").model)(batches[0])
assert np.isfinite(y).all()

place = pathlib.Path(aj.__file__).parent
assert "site-packages" in place.parts, f"not the installed package: {place}"
assert (place / "py.typed").exists()
done = subprocess.run(
    [sys.executable, "-I", "-m", "asap_jax"], capture_output=True, text=True, check=True
)
assert "python -m train" in done.stdout
print(f"asap_jax {aj.__version__} works with JAX {jax.__version__} and Python {sys.version[:7]}")

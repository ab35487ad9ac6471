"""Cases of files: damaged ones are refused with ValueError, or load as they were saved."""

import functools
import json
import pathlib
import tempfile

import jax
import numpy as np

import asap_jax as aj
from asap_jax.artifact import archive

PATH = "layer/SinkhornAttention_0"


@functools.cache
def _saved():
    """The bytes of a file, its variables, and the leaves that it holds."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("f")
    inner = aj.Predictor((aj.Moments(),), coefficients=draw(2, 12))
    families = (
        aj.SlicedPotentials(draw(3, 4)),
        aj.Moments(),
        aj.Codebook(draw(3, 4), draw(3, 4), inner),
    )
    predictor = aj.Predictor(families, aj.LinearHead(draw(2, 3 + 12 + 11)))
    state = aj.CompiledState(predictor, aj.SinkhornSpec(4), mark=np.zeros((), "f"))
    teacher = {"params": {"layer": {"kernel": draw(2, 3)}}}
    variables = {**teacher, "asap": aj.linen.state_tree({PATH: state})}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.asap"
        aj.save(path, aj.CompileResult({PATH: state}, None, variables=variables))
        return path.read_bytes(), teacher, _leaves(aj.load(path, like=teacher))


def _leaves(loaded):
    return [np.asarray(x) for x in jax.tree.leaves(loaded)], jax.tree.structure(loaded)


def check(rng, _):
    """One case: one kind of damage or edit."""
    data, teacher, (leaves, structure) = _saved()
    kind = rng.integers(5)
    if kind == 0:
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == 1:
        changed = data[: rng.integers(len(data))]
    elif kind == 2:
        start, size = rng.integers(len(data)), rng.integers(1, 200)
        changed = data[:start] + data[start + size :]
    elif kind == 3:
        start, noise = rng.integers(len(data)), rng.bytes(int(rng.integers(1, 64)))
        changed = data[:start] + noise + data[start + len(noise) :]
    else:
        changed = _edited(rng, data)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.asap"
        path.write_bytes(bytes(changed))
        try:
            loaded, again = _leaves(aj.load(path, like=teacher))
        except ValueError:
            return
    if kind == 4:
        return  # an edit with a new digest may be another valid file
    assert again == structure, "loads with another structure"
    for x, y in zip(loaded, leaves, strict=True):
        np.testing.assert_array_equal(x, y)


def _edited(rng, data):
    """The file with one value of its header replaced, and a digest that fits."""
    header = json.loads(archive.header(archive.entries(data)))
    places = list(_places(header))
    holder, key = places[rng.integers(len(places))]
    values = (None, -1, 0, 3, 1e300, "x", [], {}, True, [None], "key")
    if rng.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = values[rng.integers(len(values))]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "arrays"
        path.write_bytes(data)
        with np.load(path) as file:
            skip = (archive.HEADER, archive.DIGEST)
            arrays = {name: file[name] for name in file.files if name not in skip}
    return archive.pack(json.dumps(header).encode(), arrays)


def _places(tree):
    """Every (container, key) of a JSON value."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(pairs):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _places(value)

"""Exports a run's model with ``jax.export``, and loads and times an exported program."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from train.evaluation.operators import Operator
from train.recipes.schema import Recipe
from train.runtime import timing
from train.runtime.errors import UserError, need

PLATFORMS = ("cpu", "cuda", "tpu")
SIZE = 32  # of an axis without a size in the file, such as the batch


def write(
    operator: Operator, recipe: Recipe, path: pathlib.Path, platforms: Sequence[str] = PLATFORMS
) -> jax.export.Exported:
    """Writes a model and its variables as one StableHLO program with a batch of any size.

    Args:
      operator: the model with the variables to export.
      recipe: gives the shape and dtype of the inputs.
      path: the file to write.
      platforms: those that the program is lowered for; none of them needs to be present.
    """
    need("flatbuffers")
    (batch,) = jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((batch, *recipe.inputs.shape), jnp.dtype(recipe.inputs.dtype))
    apply = jax.jit(lambda inputs: operator.model.apply(operator.variables, inputs))
    program = jax.export.export(apply, platforms=platforms)(inputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(program.serialize())
    return program


def read(path: str | os.PathLike) -> jax.export.Exported:
    """The program in a file.

    Raises:
      UserError: the file is missing or is no exported program.
    """
    need("flatbuffers")
    try:
        return jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
    except OSError as fault:
        raise UserError(f"cannot read {path}: {fault.strerror}") from fault
    except Exception as fault:  # flatbuffers and JAX raise different errors
        raise UserError(f"{path} is not a program that `jax.export` wrote ({fault})") from fault


def inputs(program: jax.export.Exported, sizes: Mapping[str, int]) -> tuple[tuple, dict]:
    """Arguments for a program: normal numbers, ones for integers and bools.

    Args:
      program: an exported program.
      sizes: the sizes of symbolic axes by name; ``SIZE`` for the others.

    Returns:
      Positional and keyword arguments.

    Raises:
      UserError: a size of an axis that the program does not have, or an axis whose size is an
        expression.
    """
    rng = np.random.default_rng(0)
    names = symbols(program)
    if unknown := sorted(set(sizes) - set(names)):
        known = ", ".join(names) or "none"
        raise UserError(f"the program has no size {unknown[0]!r}: its symbolic sizes are {known}")
    values = []
    for like in program.in_avals:
        shape = [n if isinstance(n, int) else sizes.get(str(n), SIZE) for n in like.shape]
        floating = jnp.issubdtype(like.dtype, jnp.floating)
        value = rng.normal(size=shape) if floating else np.ones(shape)
        values.append(jnp.asarray(value, like.dtype))
    return jax.tree.unflatten(program.in_tree, values)


def symbols(program: jax.export.Exported) -> list[str]:
    """The names of the symbolic sizes of a program's inputs, in order.

    Raises:
      UserError: a size is an expression of them, such as ``2*batch``.
    """
    sizes = [str(n) for like in program.in_avals for n in like.shape if not isinstance(n, int)]
    for size in sizes:
        if not size.isidentifier():
            raise UserError(f"the program has an input of size {size}: only plain names are timed")
    return list(dict.fromkeys(sizes))


def measure(
    program: jax.export.Exported, sizes: Mapping[str, int], rounds: int
) -> tuple[float, float]:
    """Seconds to compile a program, and milliseconds of a call (median over ``rounds``).

    Raises:
      UserError: this machine's platform is not one of the program's, or as ``inputs``.
    """
    platform = jax.default_backend()
    names = {"gpu": ("cuda", "rocm")}.get(platform, (platform,))
    if not set(names) & set(program.platforms):
        raise UserError(
            f"the program is for {', '.join(program.platforms)}, this machine has {platform}"
        )
    args, kwargs = inputs(program, sizes)
    call = lambda args, kwargs: program.call(*args, **kwargs)
    seconds, compiled = timing.compiled(call, args, kwargs)
    times = timing.interleaved({"call": lambda: compiled(args, kwargs)}, rounds=rounds)
    return seconds, times["call"]


def described(program: jax.export.Exported) -> str:
    """The shapes of the inputs and outputs and the platforms, in one line."""
    line = lambda avals: ", ".join(f"{x.dtype}[{', '.join(map(str, x.shape))}]" for x in avals)
    return (
        f"inputs {line(program.in_avals)}; outputs {line(program.out_avals)}; "
        f"platforms {', '.join(program.platforms)}"
    )

"""Compares the Sinkhorn teacher with OTT-JAX and a PyTorch loop, at equal half-steps.

It times the forward pass of one layer, and value with gradient. All rows of one length run
interleaved in one process. The facts below the table name peers that are not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

import asap_jax as aj
from train.bench.measure import SHAPE_FACT, Row, measure, report, sweep_shape
from train.runtime import machine

LENGTHS = (512, 2000)
STEPS = 20


def ott_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, num_steps: int
) -> jax.Array:
    """Attention by ``ott``'s log-domain Sinkhorn; one of its iterations is two half-steps.

    It updates the second marginal first, hence the transposed problem.
    """
    from ott.geometry import geometry
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    solver = sinkhorn.Sinkhorn(
        threshold=-1.0,
        min_iterations=num_steps // 2,
        max_iterations=num_steps // 2,
        inner_iterations=1,
        implicit_diff=None,
    )

    def attend(scores, value):
        problem = linear_problem.LinearProblem(
            geometry.Geometry(cost_matrix=-scores.T, epsilon=1.0)
        )
        return scores.shape[0] * solver(problem).matrix.T @ value

    scores = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    mixed = jax.vmap(jax.vmap(attend))(scores, jnp.swapaxes(value, 1, 2))
    return jnp.swapaxes(mixed, 1, 2)


def torch_calls(shape: tuple[int, ...], num_steps: int, *, gradient: bool) -> Callable[[], object]:
    """A call of the log-domain loop in PyTorch on the CPU, ready to be timed.

    OpenMP's threads are set to sleep after the call. By default they spin, and then took half of
    the cores from the next row.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    torch.set_num_threads(machine.cores())
    arrays = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]
    q, k, v = (
        torch.from_numpy(np.array(x)).permute(0, 2, 1, 3).contiguous().requires_grad_(gradient)
        for x in arrays
    )

    def forward():
        s = q @ k.transpose(-1, -2) / math.sqrt(shape[-1])
        for step in range(num_steps):
            s = s - torch.logsumexp(s, dim=-1 if step % 2 == 0 else -2, keepdim=True)
        return torch.exp(s) @ v

    def call():
        if not gradient:
            with torch.no_grad():
                return forward().numpy()
        for x in (q, k, v):
            x.grad = None
        torch.sin(forward()).sum().backward()
        return q.grad.numpy()

    return call


def rows_of(num_steps: int = STEPS) -> dict[str, Callable]:
    """Row names to JAX attention functions."""
    spec = aj.SinkhornSpec(num_steps=num_steps)
    sinkhorn = lambda how: functools.partial(aj.sinkhorn_attention, spec=spec, implementation=how)
    rows = {
        f"Sinkhorn S={num_steps}": sinkhorn("auto"),
        f"Sinkhorn S={num_steps}, log domain": sinkhorn("log"),
    }
    if importlib.util.find_spec("ott"):
        rows["OTT-JAX, equal half-steps"] = functools.partial(ott_attention, num_steps=num_steps)
    return rows


def run(
    lengths: Iterable[int] = LENGTHS,
    *,
    rounds: int = 9,
    num_steps: int = STEPS,
    out: pathlib.Path | None = None,
) -> list[Row]:
    """Prints the table and writes ``teacher.json`` and ``teacher.md`` into ``out``."""
    rows = []
    for length in lengths:
        for gradient in (False, True):
            shape = sweep_shape(length)
            peers = {}
            if importlib.util.find_spec("torch"):
                peers["PyTorch loop"] = torch_calls(shape, num_steps, gradient=gradient)
            what = "forward and gradient" if gradient else "forward"
            rows += measure(
                f"N={length}, {what}",
                shape,
                rows_of(num_steps),
                rounds=rounds,
                gradient=gradient,
                foreign=peers,
            )
    time = (
        f"median of {rounds} interleaved calls; ratio to the fastest row; PyTorch under "
        f"OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY')}"
    )
    facts = {**SHAPE_FACT, "time": time}
    for name, package in (("ott", "ott-jax"), ("torch", "torch")):
        if not importlib.util.find_spec(name):
            facts[f"{name} row"] = f"not run, not installed: pip install {package}"
    title = "The Sinkhorn teacher and its peers"
    report(title, rows, facts).print_and_write(out, "teacher")
    return rows

"""The teacher's plan without a gradient through its key dual.

The released code of Sinkformers for text computes this gradient: after every column step it
detaches the key dual from the graph. The plan is the teacher's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from asap_jax.problem import Problem
from asap_jax.solvers import ctransform, log_domain
from asap_jax.solvers.closures import Closures
from asap_jax.solvers.plan import DensePlan
from asap_jax.spec import SinkhornSpec

IMPLEMENTATIONS = ("auto", "log")


def check(spec: SinkhornSpec, implementation: str, axis_name: str | None) -> None:
    """Raises ValueError where detaching the key dual is not possible or has no meaning."""
    if axis_name is not None:
        raise ValueError(f"detach_key_dual=True stores the weights, got axis_name={axis_name!r}")
    if spec.num_steps == 1:
        raise ValueError("detach_key_dual=True needs num_steps >= 2: row softmax has no key dual")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"detach_key_dual=True is computed in the log domain: implementation must be one of "
            f"{IMPLEMENTATIONS}, got {implementation!r}"
        )


def plan(p: Problem, spec: SinkhornSpec) -> DensePlan:
    """The plan of the teacher; its gradient treats the key dual as a constant.

    The last row step is the only one that passes a gradient: every earlier row dual reaches the
    plan through a key dual. Weights ``(..., N, M)`` are stored.
    """
    kernel = p.log_kernel(spec.epsilon)
    constant = jax.lax.stop_gradient(kernel)
    target = jax.lax.stop_gradient(p.log_key_target(spec.key_mass))
    ends_on_rows = spec.last_step == "row"
    before = Closures("key", spec.num_steps - (1 if ends_on_rows else 2), spec.epsilon)
    zero = jnp.zeros_like(constant[..., 0, :])
    _, column = log_domain.alternate(constant, zero, before, target)
    if ends_on_rows:
        return DensePlan(ctransform.closure_weights(kernel, column, -1, 0.0))
    row = ctransform.closure_step(kernel, column, -1, 0.0)
    column = ctransform.closure_step(constant, jax.lax.stop_gradient(row), -2, target)
    exponent = kernel + row[..., :, None] + column[..., None, :]
    return DensePlan(jnp.exp(jnp.where(kernel == -jnp.inf, -jnp.inf, exponent)))

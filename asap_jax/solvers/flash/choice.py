"""Which fused kernel computes a call: by name, or by platform and number of attention calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asap_jax.problem import Problem
from asap_jax.solvers.flash import cudnn, platform, splash
from asap_jax.solvers.flash.facts import Facts, Refusal, unfoldable
from asap_jax.solvers.flash.kernel import Kernel

FUSED = "fused"
"""Means the kernel of the platform."""


class Backend(NamedTuple):
    """How to make a kernel, and the reason why it cannot compute a call."""

    kernel: Callable[[], Kernel]
    refusal: Refusal


BACKENDS = {
    "cudnn": Backend(cudnn.kernel, cudnn.refusal),
    "splash": Backend(splash.kernel, splash.refusal),
}
BY_PLATFORM = {"gpu": "cudnn", "tpu": "splash"}


def choose(name: str, p: Problem, calls: int) -> str:
    """The kernel that ``name``, ``"fused"`` or a key of ``BACKENDS``, means for these problems.

    ``calls`` is the number of attention calls.

    Raises:
      ValueError: the kernel cannot compute them; the message says why.
    """
    facts = Facts.of(p, calls)
    reason = unfoldable(p)
    if name == FUSED and reason is None and platform.name() not in BY_PLATFORM:
        reason = f"there is no fused kernel for the platform {platform.name()!r}"
    chosen = BY_PLATFORM.get(platform.name(), "") if name == FUSED else name
    if reason is None:
        reason = BACKENDS[chosen].refusal(facts)
    if reason is not None:
        raise ValueError(
            f"implementation={name!r}: {reason}. implementation='streaming' is also linear in "
            f"memory, and computes every call on every platform"
        )
    return chosen

"""Which fused kernel computes a call: by name, or by platform and number of attention calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asap_jax.problem import Problem
from asap_jax.solvers.flash import cudnn, mosaic, platform, splash
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
    "tokamax": Backend(mosaic.kernel, mosaic.refusal),
}
BY_PLATFORM = {"gpu": ("cudnn", "tokamax"), "tpu": ("splash", "splash")}
"""The kernels of a platform: for layers of one attention call, and of more."""


def choose(name: str, p: Problem, calls: int) -> str:
    """The kernel that ``name``, ``"fused"`` or a key of ``BACKENDS``, means for these problems.

    ``calls`` is the number of attention calls.

    Raises:
      ValueError: the kernel cannot compute them; the message says why.
    """
    if p.axis_name is not None:
        # Partial results are merged by their log-sum-exps, which kernels for one call do not give.
        calls = max(calls, 2)
    chosen = _of_platform(calls) if name == FUSED else name
    reason = unfoldable(p) or _refusal(chosen, Facts.of(p, calls))
    if chosen is None or reason is not None:
        raise ValueError(
            f"implementation={name!r}: {reason}. implementation='streaming' is also linear in "
            f"memory, and computes every call on every platform"
        )
    return chosen


def _of_platform(calls: int) -> str | None:
    one, more = BY_PLATFORM.get(platform.name(), (None, None))
    return one if calls == 1 else more


def _refusal(name: str | None, facts: Facts) -> str | None:
    if name is None:
        return f"there is no fused kernel for the platform {platform.name()!r}"
    return BACKENDS[name].refusal(facts)

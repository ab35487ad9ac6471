"""Memory and time of programs, in turn; one that does not fit is a mark, not a failure."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from train.bench.measure import GIB, LIMIT_GIB
from train.runtime import machine, timing
from train.study.paper.presets import ROUNDS, WARMUPS

OOM = "OOM"
AT_MOST = 20.0  # seconds for one row; a slower row is called less often


@dataclasses.dataclass(frozen=True)
class Profile:
    """Memory and time of one program.

    Attributes:
      gib: memory of the compiled program with arguments and results, None if it did not compile.
      device_gib: the device's peak of memory in use, if it counts it and this program raised it.
      milliseconds, std: mean and sample deviation of the timed calls, None if it did not run.
      calls: number of timed calls.
      reason: why it did not run.
    """

    gib: float | None
    device_gib: float | None = None
    milliseconds: float | None = None
    std: float = 0.0
    calls: int = 0
    reason: str = ""

    def time(self, form: str = "{:.2f}", share: int = 1) -> str:
        """Its time as text, divided by ``share``, or why it did not run."""
        if self.milliseconds is None:
            return self.reason
        mean = form.format(self.milliseconds / share)
        return mean if self.calls < 2 else f"{mean} ± {form.format(self.std / share)}"

    def memory(self) -> str:
        """Its memory in GiB as text; the device's own count in brackets."""
        if self.gib is None:
            return OOM
        counted = "" if self.device_gib is None else f" ({self.device_gib:.3f})"
        return f"{self.gib:.3f}{counted}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and its arguments.

    Attributes:
      function: a pure function.
      arguments: what it is called with.
      carries: its first argument is a state that it replaces, whose memory is reused; the result
        begins with the new state.
    """

    function: Callable
    arguments: tuple[Any, ...]
    carries: bool = False


def profile(
    programs: Mapping[str, Program], *, limit_gib: float | None = None, at_most: float = AT_MOST
) -> dict[str, Profile]:
    """Compiles all programs, then runs them in turn.

    Args:
      programs: by name.
      limit_gib: programs that need more memory are not run. By default ``LIMIT_GIB`` on a CPU,
        where the system would swap, and no limit on an accelerator, which refuses.
      at_most: seconds for one program, see ``timing.samples``.
    """
    if limit_gib is None and jax.devices()[0].platform == "cpu":
        limit_gib = LIMIT_GIB
    found, calls = {}, {}
    for name, program in programs.items():
        found[name], compiled = _compiled(program, limit_gib)
        if compiled is not None:
            call = (
                _carrying(compiled, program)
                if program.carries
                else functools.partial(compiled, *program.arguments)
            )
            before = _device_peak()
            seconds, failed = _first_call(call)
            after = _device_peak()
            raised = after / GIB if after > before else None
            found[name] = dataclasses.replace(found[name], device_gib=raised, reason=failed)
            if seconds >= at_most:  # so slow that its first call is its measurement
                found[name] = dataclasses.replace(found[name], milliseconds=1e3 * seconds, calls=1)
            elif not failed:
                calls[name] = call
    settings = dict(rounds=ROUNDS, warmups=WARMUPS, at_most=at_most)
    for name, times in (timing.samples(calls, **settings) if calls else {}).items():
        std = statistics.stdev(times) if len(times) > 1 else 0.0
        found[name] = dataclasses.replace(
            found[name], milliseconds=statistics.mean(times), std=std, calls=len(times)
        )
    return found


def _compiled(program: Program, limit_gib: float | None) -> tuple[Profile, Callable | None]:
    donated = (0,) if program.carries else ()
    try:
        jitted = jax.jit(program.function, donate_argnums=donated)
        compiled = jitted.lower(*program.arguments).compile()
    except jax.errors.JaxRuntimeError as fault:
        return Profile(None, reason=_exhausted(fault)), None
    memory = compiled.memory_analysis()
    used = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    gib = used / GIB
    if limit_gib is not None and gib > limit_gib:
        return Profile(gib, reason=f"{OOM} (over {limit_gib:g} GiB)"), None
    return Profile(gib), compiled


def _carrying(compiled: Callable, program: Program) -> Callable[[], Any]:
    """A call that passes the state of the call before it."""
    state, *rest = program.arguments
    held = [jax.tree.map(jax.numpy.copy, state)]  # the caller's own state is not given away

    def call():
        result = compiled(held[0], *rest)
        held[0] = result[0]
        return result

    return call


def _first_call(call: Callable[[], Any]) -> tuple[float, str]:
    """The seconds of one call; 0 and the reason if the device had too little memory for it."""
    began = time.perf_counter()
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as fault:
        return 0.0, _exhausted(fault)
    return time.perf_counter() - began, ""


def _device_peak() -> int:
    """The most bytes that the first device has ever had in use; 0 if it does not count them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _exhausted(fault: Exception) -> str:
    """``OOM`` for an error of memory; other errors are raised again."""
    if "RESOURCE_EXHAUSTED" not in str(fault) and "out of memory" not in str(fault).lower():
        raise fault
    return OOM


def facts(at_most: float = AT_MOST) -> dict[str, str]:
    """What holds for all profiles."""
    return {
        "time": f"mean ± deviation of {ROUNDS} calls after {WARMUPS} warm-ups, rows in turn; a row "
        f"is called less often if that takes more than {at_most:g} s",
        "memory": "of the compiled program: arguments, results and temporaries, in GiB; in "
        "brackets the device's own peak, where it counts one and this row raised it",
        "OOM": "does not fit; on a CPU the limit is "
        f"{LIMIT_GIB:g} GiB ({machine.cores()} cores here)",
    }

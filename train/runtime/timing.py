"""Times several functions in turn, after a warm-up, so that their times can be compared."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import jax


def compiled(function: Callable, *arguments) -> tuple[float, Callable]:
    """Seconds to trace and compile ``function`` for ``arguments``, and the compiled program."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    return time.perf_counter() - start, program


def interleaved(calls: Mapping[str, Callable[[], object]], **settings) -> dict[str, float]:
    """Median milliseconds per call of each candidate; the arguments are those of ``samples``."""
    return {name: statistics.median(times) for name, times in samples(calls, **settings).items()}


def samples(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmups: int = 1,
    at_most: float | None = None,
    window: float = 0.0,
    after_round: Callable[[int], None] = lambda index: None,
) -> dict[str, list[float]]:
    """Milliseconds of every timed call of each candidate.

    Every round calls every candidate once, and every round starts with another candidate.  If the
    machine is slow for a while, all candidates suffer alike.  The first rounds, for compilation,
    are not timed.

    Args:
      calls: from a name to a function that returns JAX arrays. The time includes waiting for them.
      rounds: timed calls of each candidate.
      warmups: calls of each candidate before them, at least one.
      at_most: seconds to spend on one candidate. A slow candidate is called in fewer rounds. If its
        warm-up call already takes this long, that call is its only measurement, so the candidates
        must be compiled beforehand.
      window: milliseconds that a sample lasts at least, for accelerators, whose calls return before
        their work is done. Of a shorter candidate several calls are queued, and their mean is the
        sample, so that it does not hold the time to start a call.
      after_round: called with the number of rounds done, including the warm-up.

    Returns:
      From the names to milliseconds, one for each call.
    """
    warm = {name: _milliseconds(call) for name, call in calls.items()}
    for _ in range(warmups - 1):
        quick = [name for name, ms in warm.items() if at_most is None or ms < 1e3 * at_most]
        warm |= {name: _milliseconds(calls[name]) for name in quick}
    after_round(1)
    num_rounds = dict.fromkeys(calls, rounds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    if at_most is not None:
        for name, milliseconds in warm.items():
            if milliseconds >= 1e3 * at_most:
                num_rounds[name], times[name] = 0, [milliseconds]
            else:
                most = int(1e3 * at_most / max(milliseconds, 1.0))
                num_rounds[name] = max(1, min(rounds, most))
    short = {name for name in calls if num_rounds[name] and warm[name] < window}
    again = {name: _milliseconds(calls[name]) for name in short}  # the first call also loads code
    queued = dict.fromkeys(calls, 1) | {n: _queue_length(window, ms) for n, ms in again.items()}
    names = list(calls)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            if index < num_rounds[name]:
                times[name].append(_milliseconds(calls[name], queued[name]))
        after_round(index + 2)
    return times


LONGEST_QUEUE = 200  # calls


def _queue_length(window: float, milliseconds: float) -> int:
    """How many calls of this length fill the window."""
    return max(1, min(LONGEST_QUEUE, math.ceil(window / max(milliseconds, 1e-3))))


def _milliseconds(call: Callable[[], object], queued: int = 1) -> float:
    """Mean time of ``queued`` calls, of which only the last one is waited for."""
    start = time.perf_counter()
    for _ in range(queued):
        result = call()
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - start) / queued

"""Time per call, measured so that the candidates can be compared: interleaved, after warm-up."""

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
    """Median milliseconds per call of each candidate; arguments as of ``samples``."""
    return {name: statistics.median(taken) for name, taken in samples(calls, **settings).items()}


def samples(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    at_most: float | None = None,
    after_round: Callable[[int], None] = lambda index: None,
) -> dict[str, list[float]]:
    """Milliseconds of every timed call of each candidate.

    Every round calls every candidate once, in turn, each round starting one further on, so that a
    slow spell of the machine falls on all alike.  Compilation happens in a round that is not timed.

    Args:
      calls: from a name to a function that returns JAX arrays; it is waited for.
      rounds: timed calls of each candidate.
      at_most: seconds to spend on a candidate: a slow one is called in fewer rounds, and the
        warm-up of one slower than this, compiled already, is its measurement.
      after_round: called with the number of rounds done, warm-up included.

    Returns:
      From the names to milliseconds, one for each call.
    """
    warm = {name: _milliseconds(call) for name, call in calls.items()}
    after_round(1)
    left = dict.fromkeys(calls, rounds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    if at_most is not None:
        for name, taken in warm.items():
            if taken >= 1e3 * at_most:
                left[name], times[name] = 0, [taken]
            else:
                left[name] = max(1, min(rounds, int(1e3 * at_most / max(taken, 1.0))))
    names = list(calls)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            if index < left[name]:
                times[name].append(_milliseconds(calls[name]))
        after_round(index + 2)
    return times


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - start)

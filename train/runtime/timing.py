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
    return {name: statistics.median(some) for name, some in samples(calls, **settings).items()}


def samples(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    after_round: Callable[[int], None] = lambda index: None,
) -> dict[str, list[float]]:
    """Milliseconds of every timed call of each candidate.

    Every round calls every candidate once, in turn, each round starting one further on, so that a
    slow spell of the machine falls on all alike.  Compilation happens in a round that is not timed.

    Args:
      calls: from a name to a function that returns JAX arrays; it is waited for.
      rounds: timed calls of each candidate.
      after_round: called with the number of rounds done, warm-up included.

    Returns:
      From the names to milliseconds, one for each round.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    after_round(1)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append(1e3 * (time.perf_counter() - start))
        after_round(index + 2)
    return times

"""Makes batches one step ahead in a thread, and measures how long the loop waits for them."""

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Any


class Prefetch:
    """Iterates over ``make(index)`` for ``start <= index < stop``, computed one value ahead.

    Attributes:
      waited: seconds that the consumer has waited so far.
    """

    def __init__(self, make: Callable[[int], Any], start: int, stop: int):
        self._make, self._range = make, range(start, stop)
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        if not self._range:
            return
        with concurrent.futures.ThreadPoolExecutor(1, "prefetch") as pool:
            next_value = pool.submit(self._make, self._range[0])
            for index in self._range:
                began = time.perf_counter()
                value = next_value.result()
                self.waited += time.perf_counter() - began
                if index + 1 in self._range:
                    next_value = pool.submit(self._make, index + 1)
                yield value

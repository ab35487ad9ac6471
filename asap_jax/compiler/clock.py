"""The time that a person waits for a compile, and the part of it that JAX spends on compiling."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_F = TypeVar("_F", bound=Callable[..., Any])


class Clock:
    """Adds up the time inside its ``with`` blocks, which may be nested.

    Attributes:
      compile_seconds: time in which XLA compiled programs for this thread inside the blocks.
    """

    def __init__(self) -> None:
        self.compile_seconds = 0.0
        self._before, self._began, self._depth, self._thread = 0.0, 0.0, 0, 0

    @property
    def seconds(self) -> float:
        """Wall clock up to now."""
        return self._before + (time.perf_counter() - self._began if self._depth else 0.0)

    def __enter__(self) -> Clock:
        if self._depth == 0:
            self._began, self._thread = time.perf_counter(), threading.get_ident()
            jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        if self._depth == 1:
            jax.monitoring.unregister_event_duration_listener(self._listen)
            self._before = self.seconds
        self._depth -= 1

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _EVENT and threading.get_ident() == self._thread:
            self.compile_seconds += duration_secs


def timed(method: _F) -> _F:
    """A method whose calls count on the ``clock`` of its object."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.clock:
            return method(self, *args, **kwargs)

    result: Any = functools.wraps(method)(wrapped)
    return result

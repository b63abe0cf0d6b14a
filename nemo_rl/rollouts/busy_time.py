"""How long the engines had something to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GenerationUse:
    """Use of the engines over a time."""

    busy_s: float  # at least one request was in flight
    window_s: float
    num_tokens: int  # that came back


class BusyTime:
    """Counts seconds in which at least one request is in flight. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight = 0
        self._busy_s = 0.0
        self._num_tokens = 0
        self._window_began = self._counted_to = clock()

    def _count(self) -> None:
        now = self._clock()
        if self._in_flight:
            self._busy_s += now - self._counted_to
        self._counted_to = now

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is in flight while the body runs."""
        self._count()
        self._in_flight += 1
        try:
            yield
        finally:
            self._count()
            self._in_flight -= 1

    def add_tokens(self, num: int) -> None:
        self._num_tokens += num

    def take(self) -> GenerationUse:
        """Since the last call, or since this object was made."""
        self._count()
        use = GenerationUse(
            busy_s=self._busy_s, window_s=self._counted_to - self._window_began, num_tokens=self._num_tokens
        )
        self._busy_s, self._num_tokens, self._window_began = 0.0, 0, self._counted_to
        return use

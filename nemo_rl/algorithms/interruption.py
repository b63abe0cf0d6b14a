"""A process that is told to end: SIGTERM (Slurm, Kubernetes, `docker stop`, `timeout`) or SIGINT (Ctrl-C)."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

LAST_WORDS_S = 2.0  # of the grace, for the report
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def command_line() -> str:
    """The command of this process, as a shell takes it."""
    return shlex.join([sys.executable, *sys.argv])


class Interruption:
    """The first SIGTERM or SIGINT to this process; a second one ends it at once.

    The first raises KeyboardInterrupt, outside `steps` at once. Inside, the loop sees it in `signal` and has most of
    `grace_s` to finish its step and to save; then KeyboardInterrupt is raised there. `clock` returns seconds and never
    decreases.
    """

    def __init__(self, grace_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None
        self._grace_s = grace_s
        self._clock = clock
        self._until = math.inf
        self._in_steps = self._is_spent = False
        self._timer: threading.Timer | None = None

    @property
    def status(self) -> int:
        """The exit status that tells a shell which signal it was."""
        return 128 + (self.signal or signal.SIGINT)

    @property
    def name(self) -> str:
        """The name of the signal."""
        return (self.signal or signal.SIGINT).name

    def left_s(self, *, keep_s: float = 0.0) -> float:
        """Seconds of the grace that are left, less `keep_s`; infinite without a signal."""
        return max(0.0, self._until - self._clock() - keep_s)

    @contextmanager
    def listening(self) -> Generator[None]:
        """Take both signals while the body runs. In the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def steps(self) -> Generator[None]:
        """The body looks at `signal` itself, between steps."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def exit_after(self, limit_s: float) -> Generator[None]:
        """End this process if the body takes longer than `limit_s` seconds: what it waits for may have ended, too."""
        timer = threading.Timer(limit_s, os._exit, (self.status,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._is_spent:
            self._is_spent = False
            raise KeyboardInterrupt
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        self._until = self._clock() + self._grace_s
        if not self._in_steps or self._grace_s == 0:
            raise KeyboardInterrupt
        self._timer = threading.Timer(self._grace_s - min(LAST_WORDS_S, self._grace_s / 4), self._spend)
        self._timer.daemon = True
        self._timer.start()

    def _spend(self) -> None:
        self._is_spent = True
        os.kill(os.getpid(), signal.SIGINT)  # a signal ends the main thread's wait in a system call, too

"""Wall-clock time by label, and the time limit of a job."""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Seconds spent under each label. A label may be timed several times, and labels may nest ("a/b" inside "a").

        with timer.time("generation"):
            ...
        timer.get_timing_metrics()   # {"generation": 1.25}

    `clock` returns seconds and never decreases.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._elapsed_s: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self._elapsed_s[label].append(self._clock() - started)

    def get_latest_elapsed(self, label: str) -> float:
        """The latest measurement of `label`."""
        return self._elapsed_s[label][-1]

    def get_timing_metrics(self) -> dict[str, float]:
        """The sum of the measurements of each label."""
        return {label: sum(elapsed_s) for label, elapsed_s in self._elapsed_s.items()}

    def reset(self) -> None:
        """Drop all measurements."""
        self._elapsed_s.clear()


class TimeoutChecker:
    """Decides when a job with a time limit must write its last checkpoint.

    `timeout` is "DD:HH:MM:SS" from construction, or None for no limit. `check_save` returns True once: as soon as one
    more iteration of mean length and a checkpoint of the longest duration so far would exceed the limit.
    """

    def __init__(self, timeout: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = math.inf if timeout is None else parse_duration_s(timeout)
        self._clock = clock
        self._born = clock()
        self._iteration_started: float | None = None
        self._iterations_s: list[float] = []  # of finished iterations
        self._longest_save_s = 0.0
        self._has_fired = False

    def start_iterations(self) -> None:
        """Start the first iteration. Time before this call (setup) belongs to no iteration."""
        self._iteration_started = self._clock()

    def mark_iteration(self) -> None:
        """End an iteration, including its checkpoint, and start the next."""
        assert self._iteration_started is not None, "start_iterations() comes first"
        now = self._clock()
        self._iterations_s.append(now - self._iteration_started)
        self._iteration_started = now

    def note_save(self, seconds: float) -> None:
        """Report the duration of a checkpoint, from the first byte to the last."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def check_save(self) -> bool:
        if self._has_fired:
            return False
        mean_s = sum(self._iterations_s) / len(self._iterations_s) if self._iterations_s else 0.0
        self._has_fired = self._clock() - self._born + mean_s + self._longest_save_s >= self._limit_s
        return self._has_fired


def parse_duration_s(text: str) -> float:
    """Seconds of "DD:HH:MM:SS". Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})", text)
    days, hours, minutes, seconds = (int(part) for part in match.groups()) if match else (0, 24, 0, 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(f'"{text}" is no duration; write "DD:HH:MM:SS", e.g. "00:03:45:00" for 3 hours 45 minutes')
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

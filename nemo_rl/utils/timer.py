"""Wall-clock time by label, the time in which engines are busy, and the time limit of a job."""

import math
import re
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "std": statistics.pstdev,
    "sum": sum,
    "count": lambda values: float(len(values)),
}


class Timer:
    """Seconds spent under each label. A label may be timed several times, and labels may nest ("a/b" inside "a").

        with timer.time("generation"):
            ...
        timer.get_timing_metrics("sum")   # {"generation": 1.25}

    `clock` returns seconds and never decreases.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: dict[str, float] = {}
        self._elapsed_s: dict[str, list[float]] = {}

    def start(self, label: str) -> None:
        """Raises ValueError if `label` is already running."""
        if label in self._started:
            raise ValueError(f"timer {label!r} is running already; stop it before it is started again")
        self._started[label] = self._clock()

    def stop(self, label: str) -> float:
        """Seconds since `start(label)`. Raises ValueError if `label` is not running."""
        if label not in self._started:
            raise ValueError(f"timer {label!r} is not running; start it before it is stopped")
        elapsed_s = self._clock() - self._started.pop(label)
        self._elapsed_s.setdefault(label, []).append(elapsed_s)
        return elapsed_s

    @contextmanager
    def time(self, label: str) -> Generator[None]:
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def get_elapsed(self, label: str) -> list[float]:
        """The measurements of `label`, oldest first. Raises KeyError if there are none."""
        if label not in self._elapsed_s:
            raise KeyError(f"timer {label!r} has no measurement; there are: {', '.join(self._elapsed_s) or 'none'}")
        return list(self._elapsed_s[label])

    def reduce(self, label: str, op: str = "mean") -> float:
        """One number for `label`; `op` is a key of `REDUCTIONS`."""
        if op not in REDUCTIONS:
            raise ValueError(f"unknown reduction {op!r}; there are: {', '.join(REDUCTIONS)}")
        return REDUCTIONS[op](self.get_elapsed(label))

    def get_timing_metrics(self, reduction_op: str | Mapping[str, str] = "mean") -> dict[str, float]:
        """The reduced value of each label. A mapping gives the reduction of each label; the default is the mean."""
        ops = dict.fromkeys(self._elapsed_s, reduction_op) if isinstance(reduction_op, str) else reduction_op
        return {label: self.reduce(label, ops.get(label, "mean")) for label in self._elapsed_s}

    def reset(self, label: str | None = None) -> None:
        """Drop the measurements of `label`, or of all labels, including those that are running."""
        for name in [*self._started, *self._elapsed_s] if label is None else [label]:
            self._started.pop(name, None)
            self._elapsed_s.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class GenerationUse:
    """Use of the engines in a time window."""

    busy_s: float  # with at least one request in flight
    window_s: float
    num_tokens: int  # generated


class BusyTime:
    """Counts the seconds with at least one request in flight. `clock` returns seconds and never decreases."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = 0
        self._clock = clock
        self._in_flight = 0
        self._busy_s = 0.0
        self._window_began = self._counted_to = clock()

    def _count(self) -> None:
        now = self._clock()
        if self._in_flight:
            self._busy_s += now - self._counted_to
        self._counted_to = now

    @contextmanager
    def request(self) -> Generator[None]:
        """A request is in flight while the body runs."""
        self._count()
        self._in_flight += 1
        try:
            yield
        finally:
            self._count()
            self._in_flight -= 1

    def take(self) -> GenerationUse:
        """The use since the last call, or since construction."""
        self._count()
        window_s = self._counted_to - self._window_began
        use = GenerationUse(busy_s=self._busy_s, window_s=window_s, num_tokens=self.num_tokens)
        self._busy_s, self.num_tokens, self._window_began = 0.0, 0, self._counted_to
        return use


class TimeoutChecker:
    """Decides when a job with a time limit must write its last checkpoint.

    `timeout` is "DD:HH:MM:SS" from construction, or None for no limit. `check_save` returns True as soon as one more
    iteration of mean length and, with `fit_last_save_time`, a checkpoint of the longest duration so far would exceed
    the limit.
    """

    def __init__(
        self,
        timeout: str | None = "00:03:45:00",
        fit_last_save_time: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = math.inf if timeout is None else parse_duration_s(timeout)
        self._clock = clock
        self._born = clock()
        self._iteration_started: float | None = None
        self._iterations_s: list[float] = []  # of finished iterations
        self._fit_last_save_time = fit_last_save_time
        self.longest_save_s = 0.0

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
        if self._fit_last_save_time:
            self.longest_save_s = max(self.longest_save_s, seconds)

    def check_save(self) -> bool:
        mean_s = sum(self._iterations_s) / len(self._iterations_s) if self._iterations_s else 0.0
        return self._clock() - self._born + mean_s + self.longest_save_s >= self._limit_s


def parse_duration_s(text: str) -> float:
    """Seconds of "DD:HH:MM:SS", each number of any size ("00:36:00:00" is 36 hours). Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", text)
    if match is None:
        raise ValueError(f'must be DD:HH:MM:SS, e.g. "00:03:45:00" for 3 hours 45 minutes (got {text!r})')
    days, hours, minutes, seconds = map(int, match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

"""Wall-clock time by label."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "sum": sum,
    "count": lambda values: float(len(values)),
}


class Timer:
    """Seconds spent under each label; a label may be timed several times, and labels may nest ("a/b" inside "a").

        with timer.time("generation"):
            ...
        timer.get_timing_metrics("sum")   # {"generation": 1.25}

    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: dict[str, float] = {}
        self._elapsed_s: dict[str, list[float]] = {}

    def start(self, label: str) -> None:
        """Raises ValueError when `label` is running already."""
        if label in self._started:
            raise ValueError(f"timer {label!r} is running already; stop it before it is started again")
        self._started[label] = self._clock()

    def stop(self, label: str) -> float:
        """Seconds since `start(label)`. Raises ValueError when `label` is not running."""
        if label not in self._started:
            raise ValueError(f"timer {label!r} is not running; start it before it is stopped")
        elapsed_s = self._clock() - self._started.pop(label)
        self._elapsed_s.setdefault(label, []).append(elapsed_s)
        return elapsed_s

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def get_elapsed(self, label: str) -> list[float]:
        """Every measurement of `label`, oldest first. Raises KeyError when there is none."""
        if label not in self._elapsed_s:
            raise KeyError(f"timer {label!r} has no measurement; there are: {', '.join(self._elapsed_s) or 'none'}")
        return list(self._elapsed_s[label])

    def get_latest_elapsed(self, label: str) -> float:
        return self.get_elapsed(label)[-1]

    def reduce(self, label: str, op: str = "mean") -> float:
        """One number for `label`; `op` is a key of `REDUCTIONS`."""
        if op not in REDUCTIONS:
            raise ValueError(f"unknown reduction {op!r}; there are: {', '.join(REDUCTIONS)}")
        return REDUCTIONS[op](self.get_elapsed(label))

    def get_timing_metrics(self, reduction_op: str | Mapping[str, str] = "mean") -> dict[str, float]:
        """Every finished label, reduced. A mapping gives the reduction by label; a label it leaves out is averaged."""
        if isinstance(reduction_op, str):
            return {label: self.reduce(label, reduction_op) for label in self._elapsed_s}
        return {label: self.reduce(label, reduction_op.get(label, "mean")) for label in self._elapsed_s}

    def reset(self, label: str | None = None) -> None:
        """Forgets the measurements of `label`, or of every label; what is running is dropped as well."""
        if label is None:
            self._started.clear()
            self._elapsed_s.clear()
        else:
            self._started.pop(label, None)
            self._elapsed_s.pop(label, None)

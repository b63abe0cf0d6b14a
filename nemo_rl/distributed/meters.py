"""Measurements of the workers of all groups: profiles of chosen steps, memory and load."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import ray
from ray.exceptions import RayError

from nemo_rl.distributed.actor_host import group_memory_gb
from nemo_rl.distributed.worker_groups import LIVE, RayWorkerGroup
from nemo_rl.utils.config import ProfileConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.5


@contextmanager
def profiled_step(cfg: ProfileConfig, folder: Path, step: int) -> Generator[None]:
    """Profile the workers that `cfg` names during the block, if it names the step.

    Each writes `<folder>/step_<step>_<worker>.json.gz`, so every node has to see `folder`. Raises ValueError if no
    worker has a name that `cfg.workers` asks for.
    """
    if step not in cfg.steps:
        yield
        return
    groups = list(LIVE)
    names = [worker.name for group in groups for worker in group.members]
    chosen = {name for name in names if any(fnmatch(name, pattern) for pattern in cfg.workers)}
    if not chosen:
        raise ValueError(f"performance.profile.workers={cfg.workers} names none of the workers: {', '.join(names)}")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for group in groups:
        group.profile(chosen)
    yield
    for group in groups:
        group.profile(chosen, str(folder / f"step_{step}"))
    logger.info("the profile of step %d is in %s: %s", step, folder, ", ".join(sorted(chosen)))


class UsageMonitor:
    """Asks every worker for its `usage` about every `interval_s` seconds, in a thread.

    A worker that cannot answer is left out. `gpus`: GPUs are asked for too. The thread runs inside `with`.
    """

    def __init__(self, interval_s: float, *, gpus: bool) -> None:
        """Raises ValueError if NVML's package is needed and not installed."""
        if gpus and importlib.util.find_spec("pynvml") is None:
            raise ValueError("logger.monitor_gpus=true: install nvidia-ml-py, or set logger.monitor_gpus=false")
        self._interval_s = interval_s
        self._gpus = gpus
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = {}  # since the last `metrics`
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="usage", daemon=True)

    def __enter__(self) -> UsageMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Since the last call, for each group of workers: the largest `<group>/memory_gb` and `<group>/gpu_memory_gb`
        of a worker, and the mean of `<group>/gpu_utilization`; and the largest `controller/memory_gb`.
        """
        with self._lock:
            seen, self._seen = self._seen, {}
        return {
            name: sum(values) / len(values) if name.endswith("utilization") else max(values)
            for name, values in seen.items()
        }

    def _watch(self) -> None:
        while True:
            self._note("controller", {"memory_gb": group_memory_gb()})
            for group in list(LIVE):
                for usage in self._answers(group):
                    self._note(group.name_prefix, usage)
            if self._stop.wait(self._interval_s):
                return

    def _answers(self, group: RayWorkerGroup) -> list[dict[str, float]]:
        refs = [
            worker.handle.usage.remote([b.gpu_id for b in worker.bundles if b.gpu_id is not None and self._gpus])
            for worker in group.members
        ]
        deadline, answers = time.monotonic() + self._interval_s, []
        ready: list[ray.ObjectRef] = []
        while len(ready) < len(refs) and time.monotonic() < deadline and not self._stop.is_set():
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
        for ref in ready:
            try:
                answers.append(ray.get(ref))
            except RayError as error:
                logger.debug("%s: no usage: %s", group.name_prefix, error)
        return answers

    def _note(self, owner: str, usage: dict[str, float]) -> None:
        with self._lock:
            for name, value in usage.items():
                self._seen.setdefault(f"{owner}/{name}", []).append(value)

"""Profiles of chosen workers in chosen steps, memory and load of all workers, and ranges for Nsight Systems.

A worker measures itself (`ThreadProfiler`, `usage`, `traced`); the controller asks for it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from nemo_rl.utils.config import ProfileConfig

if TYPE_CHECKING:
    from nemo_rl.distributed.worker_groups import RayWorkerGroup

_POLL_S = 0.5

logger = logging.getLogger(__name__)


# -- in the worker


class ThreadProfiler:
    """torch's profiler. Both methods run on the thread that it records."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        """Begin to record; a profile that was never stopped is dropped."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self._profiler is not None:
            self._profiler.stop()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def stop(self, path: str) -> None:
        """Write the trace to `path`, which ends in `.json.gz`. It opens in https://ui.perfetto.dev."""
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(path)


@contextmanager
def traced(name: str) -> Iterator[None]:
    """A range on the timeline of Nsight Systems, if it records this process."""
    if "NSYS_PROFILING_SESSION_ID" not in os.environ:  # nsys sets it for all that it starts
        yield
        return
    import torch

    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def usage(gpu_ids: Sequence[str]) -> dict[str, float]:
    """`memory_gb`: resident memory of the process group; with GPUs also `gpu_memory_gb` (of the fullest one, with
    what others keep there) and `gpu_utilization` (mean over the GPUs, 0 to 100).
    """
    found = {"memory_gb": group_memory_gb()}
    if gpu_ids:
        import pynvml

        pynvml.nvmlInit()
        by_uuid = pynvml.nvmlDeviceGetHandleByUUID
        handles = [pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else by_uuid(gpu) for gpu in gpu_ids]
        found["gpu_memory_gb"] = max(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / 2**30
        loads = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
        found["gpu_utilization"] = sum(loads) / len(loads)
    return found


def group_memory_gb() -> float:
    """Resident memory of this process and of the processes of its group; a page that they share counts for each."""
    group, pages = os.getpgrp(), 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(pid)) == group:
                with open(f"/proc/{pid}/statm") as file:
                    pages += int(file.read().split()[1])
        except (ProcessLookupError, FileNotFoundError):
            continue  # it ended meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


# -- in the controller


@contextmanager
def profiled_step(cfg: ProfileConfig, folder: Path, step: int, groups: Sequence[RayWorkerGroup]) -> Iterator[None]:
    """Profile the workers of `groups` that `cfg` names during the block, if it names the step.

    Each writes `<folder>/step_<step>_<worker>.json.gz`, so every node has to see `folder`.

    Raises:
        ValueError: no worker has a name that `cfg.workers` asks for.
    """
    if step not in cfg.steps:
        yield
        return
    groups = list(groups)
    names = [worker.name for group in groups for worker in group.members]
    chosen = {name for name in names if any(fnmatch(name, pattern) for pattern in cfg.workers)}
    if not chosen:
        raise ValueError(f"performance.profile.workers={cfg.workers} names none of the workers: {', '.join(names)}")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for group in groups:
        group.start_profile(chosen)
    yield
    for group in groups:
        group.stop_profile(chosen, str(folder / f"step_{step}"))
    logger.info("the profile of step %d is in %s: %s", step, folder, ", ".join(sorted(chosen)))


class UsageMonitor:
    """Asks every worker of `groups`, which may change, for its `usage` about every `interval_s` seconds, in a thread.

    A worker that cannot answer is left out. `gpus`: GPUs are asked for too. The thread runs inside `with`.
    """

    def __init__(self, groups: Sequence[RayWorkerGroup], interval_s: float, *, gpus: bool) -> None:
        """Raises ValueError if NVML's package is needed and not installed."""
        if gpus and importlib.util.find_spec("pynvml") is None:
            raise ValueError("logger.monitor_gpus=true: install nvidia-ml-py, or set logger.monitor_gpus=false")
        self._groups = groups
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
            for group in list(self._groups):
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

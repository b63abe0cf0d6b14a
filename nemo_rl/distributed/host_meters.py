"""What a process measures of itself: a profile of its thread, its memory, its GPUs, and ranges for Nsight Systems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


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

"""The Ray actor around a worker, and its measurements of itself. No other module applies Ray to a worker."""

import asyncio
import gc
import inspect
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate

import ray
from ray.actor import ActorClass

from nemo_rl.config.terminal import VisibleFormatter
from nemo_rl.distributed import collectives
from nemo_rl.distributed.errors import UserCodeError, WorkerCallError
from nemo_rl.utils.guards import end_group_after_me
from nemo_rl.utils.registry import import_object

_WORKER_THREAD = "worker"
_MAX_CONCURRENT_CALLS = 4096  # of async methods; sync methods run one after another

type Method[**P, R] = Callable[Concatenate[Any, P], R | Awaitable[R]]
"""A method of a worker, as the class or its interface names it: `PolicyWorkerInterface.train`. It may be async."""


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    """The machine and the process of a worker."""

    pid: int
    node_id: str
    node_ip: str
    log_path: str | None  # file its stderr goes to, on its node


class BusyTimes:
    """The times at which this process was busy, by name: an interval lasts while at least one call of the name runs.

    `clock` returns seconds since 1970, which processes of several nodes share.
    """

    MAX_KEPT, JOINED_S = 512, 0.005  # the oldest go first; calls that follow each other at once are one interval

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running: dict[str, tuple[int, float]] = {}  # calls that run, and since when
        self._done: deque[list[Any]] = deque(maxlen=self.MAX_KEPT)
        self._last: dict[str, list[Any]] = {}  # of each name the latest of them
        self._lock = threading.RLock()

    @contextmanager
    def track(self, name: str) -> Generator[None]:
        """A call of `name` runs while the body does."""
        with self._lock:
            count, since = self._running.get(name, (0, self._clock()))
            self._running[name] = count + 1, since
        try:
            yield
        finally:
            with self._lock:
                count, since = self._running.pop(name)
                if count > 1:
                    self._running[name] = count - 1, since
                else:
                    self.note(name, since, self._clock())

    def note(self, name: str, since: float, end: float) -> None:
        """Add an interval that has ended."""
        with self._lock:
            last = self._last.get(name)
            if last is not None and since - last[2] < self.JOINED_S:
                last[2] = end
            else:
                self._last[name] = interval = [name, since, end]
                self._done.append(interval)

    def running(self) -> list[tuple[str, float]]:
        """(name, seconds) of the calls that run."""
        with self._lock:
            now = self._clock()
            return [(name, now - since) for name, (_, since) in self._running.items()]

    def take(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of the intervals that ended since the last call, and so far of those that go on."""
        with self._lock:
            now = self._clock()
            for name, (count, since) in self._running.items():
                self.note(name, since, now)
                self._running[name] = count, now
            found = [(name, since, end) for name, since, end in self._done]
            self._done.clear()
            self._last.clear()
        return found


BUSY = BusyTimes()
"""The busy times of this process."""


@contextmanager
def traced(name: str) -> Generator[None]:
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


class ActorHost:
    """Imports the worker's class in the worker's environment, constructs the worker, and calls its methods.

    Sync methods and the constructor run one at a time, always on the same thread, so that the current CUDA device and
    torch's thread-local modes persist between calls. Async methods run concurrently on the actor's event loop.
    `stack()` and `phase()` answer from another concurrency group while a method blocks.

    Exceptions of the worker arrive as WorkerCallError.
    """

    def __init__(self, fqn: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # Nothing here may block: until a constructor returns, Ray runs no method, not even `stack`.
        self._fqn = fqn
        self._args = args
        self._kwargs = kwargs
        self._worker: Any = None
        self._profiler: Any = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=_WORKER_THREAD)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[int, tuple[str, float]] = {}
        self._call_ids = itertools.count()

    @ray.method(concurrency_group="inspect")
    async def identity(self) -> HostIdentity:
        node_id, node_ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        log_path = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else None
        return HostIdentity(pid=os.getpid(), node_id=node_id, node_ip=node_ip, log_path=log_path)

    @ray.method(concurrency_group="inspect")
    async def reserve_port(self, address: str) -> int:
        """Rank 0 only: bind the rendezvous port of the group on `address`."""
        return collectives.reserve_port(address)

    async def start(self, env_vars: Mapping[str, str]) -> None:
        """Set `env_vars`, import the class and construct the worker. ObjectRefs among its arguments are resolved."""
        self._loop = asyncio.get_running_loop()
        os.environ.update(env_vars)
        if os.getpgrp() != os.getpid():
            os.setpgrp()
        end_group_after_me()  # children that join another process group escape
        assert logging.lastResort is not None
        logging.lastResort.setFormatter(VisibleFormatter())  # Ray prints the warnings of workers as they are
        await self._on_thread("__init__", self._construct)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` of the worker. Top-level ObjectRefs among the arguments arrive as their values."""
        if not hasattr(self._worker, method):
            raise _as_text(AttributeError(f"{self._fqn} has no method {method!r}"))
        function = getattr(self._worker, method)
        if inspect.iscoroutinefunction(function):
            # A named task, so that `stack` can show its frames.
            return await self._tracked(method, asyncio.create_task(function(*args, **kwargs), name=method))

        def run() -> Any:
            with traced(method):
                return function(*args, **kwargs)

        return await self._on_thread(method, run)

    async def profile(self, path: str | None) -> None:
        """Begin to record the thread of the sync methods with torch's profiler, or end it and write `path`.

        `path` ends in `.json.gz` and opens in https://ui.perfetto.dev. A new beginning drops a profile without an end.
        """

        def switch() -> None:
            import torch
            from torch.profiler import ProfilerActivity, profile

            profiler, self._profiler = self._profiler, None
            if profiler is not None:
                profiler.stop()
            if path is not None:
                assert profiler is not None, "a profile begins before it ends"
                profiler.export_chrome_trace(path)
                return
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()

        await self._on_thread("profile", switch)

    @ray.method(concurrency_group="inspect")
    async def usage(self, gpu_ids: Sequence[str]) -> dict[str, float]:
        """`memory_gb`: resident memory of the process group; with GPUs also `gpu_memory_gb` (of the fullest one, with
        the memory of other processes) and `gpu_utilization` (mean over the GPUs, 0 to 100).
        """
        found = {"memory_gb": group_memory_gb()}
        if gpu_ids:
            import pynvml

            nvml: Any = pynvml  # its functions return structures of C
            nvml.nvmlInit()
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            handles = [by_index(int(gpu)) if gpu.isdigit() else by_uuid(gpu) for gpu in gpu_ids]
            found["gpu_memory_gb"] = max(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / 2**30
            loads = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
            found["gpu_utilization"] = sum(loads) / len(loads)
        return found

    @ray.method(concurrency_group="inspect")
    async def busy_times(self) -> list[tuple[str, float, float]]:
        """`BusyTimes.take` of this process."""
        return BUSY.take()

    @ray.method(concurrency_group="inspect")
    async def phase(self) -> str:
        """The methods that run, the calls that they wait for, and for how long."""
        now = time.monotonic()
        methods = {method for method, _ in self._running.values()}
        calls = [(method, now - since) for method, since in sorted(self._running.values(), key=lambda c: c[1])]
        calls += [(name, seconds) for name, seconds in BUSY.running() if name not in methods]
        calls = [f"{name} for {seconds:.0f} s" for name, seconds in calls]
        if len(calls) > 8:
            calls[8:] = [f"and {len(calls) - 8} more calls"]
        return ", ".join(calls) or "idle"

    @ray.method(concurrency_group="inspect")
    async def stack(self) -> str:
        """Python stacks of all threads and of all asyncio tasks of this process."""
        frames = sys._current_frames()
        threads = [thread for thread in threading.enumerate() if thread.ident in frames]
        # The worker's own thread first: the others mostly belong to Ray.
        threads.sort(key=lambda thread: not thread.name.startswith(_WORKER_THREAD))
        parts = [
            f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in threads
            if thread.ident is not None and thread.ident != threading.get_ident()
        ]
        tasks = asyncio.all_tasks(self._loop) if self._loop is not None else set()
        parts += [
            f"Task {task.get_name()}:\n{_coroutine_stack(task.get_coro())}"
            for task in tasks
            if inspect.iscoroutine(task.get_coro())  # Ray's own are compiled and show nothing
        ]
        return "\n".join(parts)

    def _construct(self) -> None:
        def resolved(value: Any) -> Any:
            return ray.get(value) if isinstance(value, ray.ObjectRef) else value

        # ObjectRefs are resolved here, because Ray would delay the creation of the actor until they are available.
        args = [resolved(value) for value in self._args]
        kwargs = {name: resolved(value) for name, value in self._kwargs.items()}
        worker_class = import_object(self._fqn, "worker class")
        if isinstance(worker_class, ActorClass):  # decorated with @ray.remote; this actor is its process
            worker_class = vars(worker_class)["__ray_metadata__"].modified_class
        self._worker = worker_class(*args, **kwargs)
        self._args, self._kwargs = (), {}
        gc.freeze()  # the modules and the worker stay: without this every collection would look at all of them

    async def _on_thread(self, method: str, function: Callable[[], Any]) -> Any:
        assert self._loop is not None
        return await self._tracked(method, self._loop.run_in_executor(self._thread, function))

    async def _tracked(self, method: str, awaitable: Any) -> Any:
        call_id = next(self._call_ids)
        self._running[call_id] = (method, time.monotonic())
        try:
            with BUSY.track(method):
                return await awaitable
        except Exception as error:  # all failures of the worker leave the process in one form
            raise _as_text(error) from None
        finally:
            del self._running[call_id]


def _as_text(error: Exception) -> WorkerCallError:
    trace = "" if isinstance(error, UserCodeError) else "".join(traceback.format_exception(error))
    return WorkerCallError(type(error).__name__, str(error), trace)


def call_worker[**P, R](handle: Any, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> ray.ObjectRef[R]:
    """Call `method` of the worker in the `ActorHost` that `handle` is for. Any process may call it."""
    return handle.call.remote(method.__name__, *args, **kwargs)


def actor_class() -> Any:
    """ActorHost as a Ray actor class; set its resources with `.options(...)`."""
    remote: Any = ray.remote  # its stubs know none of these options
    return remote(concurrency_groups={"inspect": 4}, max_concurrency=_MAX_CONCURRENT_CALLS)(ActorHost)


def _coroutine_stack(coroutine: Any) -> str:
    """The frames of a suspended coroutine, down to the object that it waits for."""
    lines: list[str] = []
    while coroutine is not None:
        frame, following = None, None
        if inspect.iscoroutine(coroutine):
            frame, following = coroutine.cr_frame, coroutine.cr_await
        elif inspect.isgenerator(coroutine):
            frame, following = coroutine.gi_frame, coroutine.gi_yieldfrom
        if frame is None:
            return "".join([*lines, f"  waits for {coroutine!r}\n"])
        lines += traceback.format_stack(frame, limit=1)
        coroutine = following
    return "".join(lines)

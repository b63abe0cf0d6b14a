"""vLLM's engine core in a thread of the worker, for an engine of one rank on a CPU.

vLLM's `AsyncLLM` starts the core as a process. That process imports vLLM again, and every request and answer is a
message, which takes longer than a step of a tiny model. In one process both are Python objects in a queue. The
operators of torch release Python's lock while they compute, so the event loop goes on meanwhile.

The core is built, runs and ends in the same thread: torch keeps the number of its threads, for one, per thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

_SHUTDOWN_S = 5.0


class EngineStartError(Exception):
    """The core did not start; the cause is its own exception."""


class ThreadedCore(EngineCoreProc):
    """vLLM's core with its loop, without the sockets."""

    def __init__(
        self,
        config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        deliver: Callable[[EngineCoreOutputs], None],
    ) -> None:
        self.input_queue: Any = SimpleQueue()
        # In place of the queue from which a thread of vLLM sends messages. An output has the number of its client.
        self.output_queue: Any = SimpleNamespace(put_nowait=lambda output: deliver(output[1]))
        self.engine_index = 0
        self.engines_running = self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        EngineCore.__init__(self, config, executor_class, log_stats)

    def shutdown(self) -> None:
        """Free nothing: the process ends next. vLLM's own looks at all objects twice, for a second."""


class ThreadClient(AsyncMPClient):
    """The client of `AsyncLLM`: starts the core, hands it requests and calls, and takes its outputs.

    Raises EngineStartError if the core does not start.
    """

    core_class: ClassVar[type[ThreadedCore]] = ThreadedCore

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: Any) -> None:
        self.vllm_config = vllm_config
        self.resources: Any = SimpleNamespace(engine_dead=False)  # `AsyncLLM` reads it
        self.engine_ranks_managed = [0]
        self.core_engine, self.core_engines = b"", [b""]
        self.utility_results: dict[int, Any] = {}
        self.outputs_queue = asyncio.Queue[EngineCoreOutputs | Exception]()
        self._call_ids = itertools.count()
        self._new: list[Any] = []  # requests of this turn of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        started = Future[ThreadedCore]()
        deliver = partial(self._in_loop, self._receive)
        make = partial(self.core_class, vllm_config, executor_class, log_stats, deliver)
        # Named as the threads that `ActorHost.stack` shows first.
        self._thread = threading.Thread(target=self._run, args=(make, started), name="worker: vLLM engine", daemon=True)
        self._thread.start()
        try:
            self._core = started.result()
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise EngineStartError(f"{type(error).__name__}: {reason}") from error

    def _run(self, make: Callable[[], ThreadedCore], started: Future[ThreadedCore]) -> None:
        """The engine's thread. An exception that ends it is written to the log."""
        torch.set_num_threads(1)  # of this thread; see `engine_patches`
        try:
            core = make()
        except BaseException as error:
            started.set_exception(error)
            raise
        started.set_result(core)
        try:
            with suppress(SystemExit):  # which is how the loop ends when it is told to
                core.run_busy_loop()
        finally:
            if core.shutdown_state is EngineShutdownState.RUNNING:  # nobody has told it to end
                self.resources.engine_dead = True
                self._in_loop(self._fail)
            core.shutdown()

    def _in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Call the function in the event loop, if there is one: nothing is asked and answered before."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _receive(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output:
            _process_utility_output(outputs.utility_output, self.utility_results)
        elif outputs.outputs or outputs.scheduler_stats:
            self.outputs_queue.put_nowait(outputs)

    def _fail(self) -> None:
        """Fail everything that waits for the core."""
        self.outputs_queue.put_nowait(EngineDeadError())
        for result in self.utility_results.values():
            if not result.done():
                result.set_exception(EngineDeadError())

    def _send(self, kind: EngineCoreRequestType, request: Any) -> None:
        self._ensure_output_queue_task()
        self.ensure_alive()
        self._send_new()
        self._core.input_queue.put_nowait((kind, request))

    def _ensure_output_queue_task(self) -> None:
        """vLLM calls this in the event loop before it waits for outputs."""
        self._loop = asyncio.get_running_loop()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand it over with all requests of this turn of the event loop, so that one step begins them together."""
        self._ensure_output_queue_task()
        self.ensure_alive()
        if not self._new:
            asyncio.get_running_loop().call_soon(self._send_new)
        self._new.append(self._core.preprocess_add_request(request))

    def _send_new(self) -> None:
        new, self._new = self._new, []
        for request in new:
            self._core.input_queue.put_nowait((EngineCoreRequestType.ADD, request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            self._core.aborts_queue.put_nowait(request_ids)  # read in the middle of a step
            self._send(EngineCoreRequestType.ABORT, request_ids)

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        call_id = next(self._call_ids)
        future = self.utility_results[call_id] = asyncio.get_running_loop().create_future()
        self._send(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        return await future

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core and its thread. A step that takes longer than `timeout` seconds goes on."""
        self.resources.engine_dead = True
        self._core.shutdown_state = EngineShutdownState.REQUESTED
        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self._thread.join(_SHUTDOWN_S if timeout is None else timeout)

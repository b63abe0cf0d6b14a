"""The client of a core in a thread, with a core that computes nothing."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import UtilityResult

from nemo_rl.models.generation.vllm.in_process import EngineStartError, ThreadClient
from tests.unit.rollouts.engines import in_loop

# The error that ends a thread belongs in the log.
SHOWN = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Core:
    """Answers a request with its name's length. Calls return their argument; `fail` is one that fails."""

    def __init__(self, config: str, executor_class: Any, log_stats: bool, deliver: Callable[..., None]) -> None:
        if config == "broken":
            raise ValueError("no weights in /models/empty\nsee above")
        self.deliver = deliver
        self.input_queue, self.aborts_queue = SimpleQueue[Any](), SimpleQueue[Any]()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.begun: list[str] = []
        self.aborted: list[str] = []
        self.ended_in = ""

    def preprocess_add_request(self, request: str) -> tuple[str, int]:
        return request, 0

    def run_busy_loop(self) -> None:
        while self.shutdown_state is EngineShutdownState.RUNNING:
            kind, request = self.input_queue.get()
            if kind is EngineCoreRequestType.ADD:
                if request[0] == "broken":
                    raise ArithmeticError("a step that fails")
                self.begun.append(request[0])
                answer = EngineCoreOutput(request[0], [len(request[0])], finish_reason=FinishReason.STOP)
                self.deliver(EngineCoreOutputs(outputs=[answer]))
            elif kind is EngineCoreRequestType.ABORT:
                self.aborted += request
            elif kind is EngineCoreRequestType.UTILITY and request[2] != "hang":
                _, number, method, args = request
                result = UtilityOutput(number, failure_message="too small" if method == "fail" else None)
                result.result = UtilityResult(args)
                self.deliver(EngineCoreOutputs(utility_output=result))
        raise SystemExit

    def shutdown(self) -> None:
        self.ended_in = threading.current_thread().name


class Client(ThreadClient):
    core_class: Any = Core
    _core: Any


@contextmanager
def client() -> Iterator[Client]:
    config: Any = "sound"
    started = Client(config, Executor, False)
    yield started
    started.shutdown()
    assert not started._thread.is_alive()
    assert started._core.ended_in == started._thread.name, "where torch has its settings"


@in_loop
async def test_requests_calls_and_aborts_reach_the_core() -> None:
    with client() as found:
        for name in ("a", "bcd"):
            request: Any = name
            await found.add_request_async(request)
            time.sleep(0.05)
            assert not found._core.begun, "requests of one turn of the event loop begin in one step"
        answers = [(await asyncio.wait_for(found.get_output_async(), 60)).outputs[0] for _ in range(2)]
        assert [(answer.request_id, answer.new_token_ids) for answer in answers] == [("a", [1]), ("bcd", [3])]
        assert await asyncio.wait_for(found.call_utility_async("echo", 1, {"b": 2}), 60) == (1, {"b": 2})
        with pytest.raises(Exception, match="too small"):
            await asyncio.wait_for(found.call_utility_async("fail"), 60)
        await found.abort_requests_async(["a"])
        await asyncio.wait_for(found.call_utility_async("echo"), 60)
        assert found._core.aborted == ["a"] and found._core.aborts_queue.get(timeout=60) == ["a"]


@SHOWN
@in_loop
async def test_an_error_of_the_loop_ends_what_waits_for_it() -> None:
    with client() as found:
        waiting = asyncio.create_task(found.call_utility_async("hang"))
        await asyncio.sleep(0)
        broken: Any = "broken"
        await found.add_request_async(broken)
        for waits in (found.get_output_async(), waiting):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(waits, 60)
        assert found.resources.engine_dead, "what `AsyncLLM.errored` reads"
        with pytest.raises(EngineDeadError):
            await found.add_request_async(broken)
        await found.abort_requests_async(["a"])


@SHOWN
def test_a_core_that_does_not_start_says_why() -> None:
    config: Any = "broken"
    with pytest.raises(EngineStartError, match=r"^ValueError: no weights in /models/empty$"):
        Client(config, Executor, False)

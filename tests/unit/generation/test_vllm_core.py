"""What of vLLM's core is ours: a scheduler whose tokens leave together, records of experts, products, a thread."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import UtilityResult
from vllm.v1.structured_output import StructuredOutputManager

from nemo_rl.models.generation.vllm.engine_patches import (
    ExpertRecorder,
    RowInvariantLinear,
    StepNames,
    keep_states,
    padded_rows,
    split_rows,
)
from nemo_rl.models.generation.vllm.executors import WholeAnswerScheduler
from nemo_rl.models.generation.vllm.in_process import EngineStartError, ThreadClient
from nemo_rl.models.generation.vllm.startup import engine_args
from nemo_rl.models.generation.vllm.worker import VllmWorker
from tests.unit.generation.configs import engine_settings, generation_config
from tests.unit.rollouts.engines import in_loop


def sampled(tokens: dict[str, int]) -> ModelRunnerOutput:
    ids = np.array(list(tokens.values()))[:, None]
    rows = {name: row for row, name in enumerate(tokens)}
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.ones(len(tokens), np.int64))
    return ModelRunnerOutput(list(tokens), rows, sampled_token_ids=ids.tolist(), logprobs=logprobs)


def schedule_all(scheduler: Scheduler) -> tuple[list[Any], dict[str, list[int]], dict[str, list[float]]]:
    """Every step with the tokens in flight after it; of each request its tokens, and logprobs message by message.

    Requests end by a token or at their limit; one comes late and one is aborted.
    """

    def add(number: int) -> None:
        params = SamplingParams(max_tokens=20, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        params._eos_token_id = 1
        prompt = list(range(2, 5 + number))
        scheduler.add_request(Request(f"r{number}", prompt, sampling_params=params, pooling_params=None))

    for number in range(6):
        add(number)
    steps, tokens, logprobs = [], defaultdict(list), defaultdict(list)
    draw = np.random.default_rng(0)
    while scheduler.has_unfinished_requests():
        if len(steps) == 9:
            add(6)
        if len(steps) == 12:
            scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)
        step = scheduler.schedule()
        drawn = {name: int(draw.integers(1, 90)) for name in step.num_scheduled_tokens}
        for message in scheduler.update_from_output(step, sampled(drawn)).values():
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
                logprobs[output.request_id].append(output.new_logprobs.logprobs[:, 0].tolist())
        steps.append((step, [request.num_in_flight_tokens for request in scheduler.running]))
    return steps, tokens, logprobs


def test_every_step_and_answer_is_that_of_vllm(tiny_model_dir) -> None:
    settings = engine_settings(tiny_model_dir, generation_config(64), device="cpu")
    config = engine_args(settings, {}).create_engine_config(UsageContext.LLM_CLASS)
    config.cache_config.num_gpu_blocks = 64
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
    common = config, KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)]), StructuredOutputManager(config), 4
    scheduler = WholeAnswerScheduler(*common)
    theirs, their_tokens, _ = schedule_all(Scheduler(*common))
    with patch.object(scheduler, "_next_tokens", wraps=scheduler._next_tokens) as own_steps:
        ours, tokens, logprobs = schedule_all(scheduler)
    del their_tokens["r1"]  # it was aborted
    assert ours == theirs and tokens == their_tokens
    assert logprobs == {name: [[-float(token) for token in own]] for name, own in tokens.items()}, "in one message each"
    assert not scheduler._completions and len(ours) > 20
    assert own_steps.call_count == len(ours) - 2, "all but those in which requests begin"


def test_the_runner_does_no_work_for_requests_that_go_on_and_all_of_it_in_steps_that_do_not_follow() -> None:
    """That it must look at steps with new blocks shows in test_vllm_generation.py."""
    positions = np.array([5, 7, 9])  # of rows 0 and 1, and of a row that no request has
    batch = SimpleNamespace(num_reqs=2, num_computed_tokens_cpu=positions, refresh_metadata=lambda: None)
    runner, seen = SimpleNamespace(input_batch=batch, requests={name: SimpleNamespace() for name in "ab"}), []
    update = keep_states(lambda _, step: seen.append((step.scheduled_cached_reqs.req_ids, step.finished_req_ids)))
    names = ["b", "a"]  # in the scheduler's order, which is not the order of the rows
    left, others = StepNames(["b"], names), StepNames(["b"], ["b", "a"])
    for own, ended in ((names, ""), (names, ""), (left, "a"), ([], ""), (others, "")):
        cached = replace(CachedRequestData.make_empty(), req_ids=own)
        cached.new_block_ids, cached.num_computed_tokens = [None] * len(own), [8, 6][: len(own)]
        update(runner, replace(SchedulerOutput.make_empty(), scheduled_cached_reqs=cached, finished_req_ids=set(ended)))
    assert seen == [(names, set()), ([], {"a"}), ([], set()), (others, set())], "no work for those that go on"
    told = {name: request.num_computed_tokens for name, request in runner.requests.items()}
    assert told == {"a": 6, "b": 8} and positions.tolist() == [7, 9, 9]


# -- products that are the same in every batch; the engine as a whole is in test_vllm_generation.py

SHAPES = [(256, 128), (87, 128), (200, 72), (448, 1600), (1, 64), (640, 512)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    RowInvariantLinear._proven.clear()
    yield
    torch.set_num_threads(num_threads)
    RowInvariantLinear._proven.clear()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 64) | st.integers(1, 700), st.integers(0, 2**31), st.booleans())
@example((1, 64), 9, 0, False)  # with AVX-512 the product of one column has another order for 9 rows than for 8
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], num_rows: int, seed: int, with_bias: bool):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if with_bias else None
    x = torch.randn(num_rows, shape[1], generator=generator)
    linear = RowInvariantLinear(weight)
    together = linear(x, weight, bias)
    position = seed % num_rows
    assert torch.equal(linear(x[position : position + 1], weight, bias)[0], together[position])
    order = torch.randperm(num_rows, generator=generator)
    assert torch.equal(linear(x[order], weight, bias), together[order])
    assert linear(x[:0], weight, bias).shape == (0, shape[0])


def test_rows_are_added_or_split_until_sizes_agree() -> None:
    assert [padded_rows(rows, lambda size: True) for rows in (0, 1, 9, 64, 65)] == [8, 8, 9, 64, 72]
    assert [padded_rows(rows, lambda size: size % 4 == 0) for rows in (9, 12, 13)] == [12, 12, 16]
    assert [padded_rows(rows, lambda size: False) for rows in (9, 16)] == [16, 16]
    assert split_rows(40, lambda size: True) == [40] and split_rows(40, lambda size: size != 40) == [32, 8]
    assert split_rows(48, lambda size: size in (8, 16)) == [16, 16, 16]
    assert split_rows(1032, lambda size: True) == [512, 512, 8]
    assert split_rows(0, lambda size: True) == []
    with pytest.raises(RuntimeError, match="cannot be made reproducible"):
        split_rows(24, lambda size: size == 16)


def test_a_weight_of_zeros_proves_nothing() -> None:
    RowInvariantLinear._proven.clear()
    linear, x = RowInvariantLinear(torch.zeros(32, 16)), torch.ones(24, 16)
    assert linear(x, torch.zeros(32, 16)).sum() == 0 and RowInvariantLinear._proven == {}
    linear.pack(torch.ones(32, 16))
    assert torch.equal(linear(x, torch.ones(32, 16)), torch.full((24, 32), 16.0))
    assert RowInvariantLinear._proven == {(24, 32, 16): True}


# -- the client of a core in a thread, with a core that computes nothing

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
    core_class = Core


@contextmanager
def client() -> Iterator[Client]:
    started = Client("sound", Executor, False)
    yield started
    started.shutdown()
    assert not started._thread.is_alive()
    assert started._core.ended_in == started._thread.name, "where torch has its settings"


@in_loop
async def test_requests_calls_and_aborts_reach_the_core() -> None:
    with client() as found:
        for request in ("a", "bcd"):
            await found.add_request_async(request)
            time.sleep(0.05)
            assert not found._core.begun, "requests of one turn of the event loop begin in one step"
        answers = [(await found.get_output_async()).outputs[0] for _ in range(2)]
        assert [(answer.request_id, answer.new_token_ids) for answer in answers] == [("a", [1]), ("bcd", [3])]
        assert await found.call_utility_async("echo", 1, {"b": 2}) == (1, {"b": 2})
        with pytest.raises(Exception, match="too small"):
            await found.call_utility_async("fail")
        await found.abort_requests_async(["a"])
        await found.call_utility_async("echo")
        assert found._core.aborted == ["a"] and found._core.aborts_queue.get(timeout=60) == ["a"]


@SHOWN
@in_loop
async def test_an_error_of_the_loop_ends_what_waits_for_it() -> None:
    with client() as found:
        waiting = asyncio.create_task(found.call_utility_async("hang"))
        await asyncio.sleep(0)
        await found.add_request_async("broken")
        for waits in (found.get_output_async(), waiting):
            with pytest.raises(EngineDeadError):
                await waits
        assert found.resources.engine_dead, "what `AsyncLLM.errored` reads"
        with pytest.raises(EngineDeadError):
            await found.add_request_async("broken")
        await found.abort_requests_async(["a"])


@SHOWN
def test_a_core_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineStartError, match=r"^ValueError: no weights in /models/empty$"):
        Client("broken", Executor, False)


# -- the recorder of experts on a scripted model runner


class Runner:
    """Token number t of request r goes through expert 10 r + t, in layer 1 alone."""

    max_num_tokens = 16
    model_config = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 2,
        get_num_experts_per_tok=lambda: 1,
        get_num_experts=lambda: 300,
        max_model_len=8,
    )
    layer_id = 1  # it is its own layer and router
    input_batch: Any = None

    @property
    def router(self) -> Any:
        return self

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture

    def execute_model(self, scheduled: Any) -> str:
        batch, experts = self.input_batch, []
        for request, start in zip(batch.req_ids, batch.num_computed_tokens_cpu, strict=True):
            count = scheduled.num_scheduled_tokens[request]
            experts += [[10 * int(request[0]) + start + n] for n in range(count)]
        self.capture(torch.tensor(experts))
        return "done"


def step(runner: Runner, counts: dict[str, int], starts: list[int], ended: tuple[str, ...] = ()) -> None:
    runner.input_batch = SimpleNamespace(req_ids=list(counts), num_reqs=len(counts), num_computed_tokens_cpu=starts)
    scheduled = SimpleNamespace(
        num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), finished_req_ids=set(ended)
    )
    assert runner.execute_model(scheduled) == "done"


def unpack(record: tuple[list[int], str, bytes]) -> np.ndarray:
    shape, dtype, data = record
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def test_every_request_gets_the_experts_of_its_own_tokens():
    runner = Runner()
    recorder = ExpertRecorder(runner, [runner])
    step(runner, {"1-ab": 3}, [0])
    step(runner, {"1-ab": 1, "2-cd": 2}, [3, 0])
    step(runner, {"2-cd": 4}, [0], ended=("1-ab",))  # computed anew, as after an update of the weights
    experts = unpack(recorder.take("1", 4))
    assert (experts.dtype, experts.shape) == (np.int16, (4, 2, 1))
    assert experts[:, 1, 0].tolist() == [10, 11, 12, 13] and not experts[:, 0].any()
    assert unpack(recorder.take("2", 4))[:, 1, 0].tolist() == [20, 21, 22, 23]


def test_an_engine_on_gpus_returns_them_itself_signed_where_there_are_many(tiny_model_dir):
    settings = engine_settings(tiny_model_dir, generation_config(), device="cpu", return_routed_experts=True)
    assert not engine_args(settings, {}).enable_return_routed_experts
    assert engine_args(replace(settings, device="cuda"), {}).enable_return_routed_experts

    async def returned(dtype: Any) -> np.ndarray:
        worker = VllmWorker.__new__(VllmWorker)
        worker._records = False
        output = SimpleNamespace(routed_experts=np.full((2, 1, 1), 200, dtype=dtype))
        return await worker._experts("1", output, 2)

    many, few = asyncio.run(returned(np.uint16)), asyncio.run(returned(np.uint8))
    assert (many.dtype, many[0, 0, 0]) == (np.int16, 200) and (few.dtype, few[0, 0, 0]) == (np.uint8, 200)

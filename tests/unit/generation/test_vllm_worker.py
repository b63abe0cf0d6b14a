"""What a vLLM replica does about weight updates, sleep and answers, with a fake for the engine."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.distributed.actor_host import BUSY
from nemo_rl.models.generation.answers import AnswerQueue
from nemo_rl.models.generation.vllm.startup import start_failure
from nemo_rl.models.generation.vllm.worker import VllmWorker
from nemo_rl.types import GenerationAnswer, GenerationRequest
from tests.unit.rollouts.engines import in_loop, request_of


class Engine:
    """Notes the cache salt of each request, and its orders."""

    errored = False

    def __init__(self) -> None:
        self.salts: list[str] = []
        self.told: list[Any] = []
        self.logprob = -0.5

    async def pause_generation(self, **how: Any) -> None: ...

    async def start_weight_update(self) -> None: ...

    async def finish_weight_update(self, version: str) -> None:
        await asyncio.sleep(0.01)

    async def collective_rpc(self, method: str, kwargs: Any) -> list[bool]:
        return [True]

    async def resume_generation(self) -> None:
        self.told.append("resume")

    async def sleep(self, level: int) -> None:
        self.told.append(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.told += tags

    async def reset_prefix_cache(self) -> bool:
        return True

    async def generate(self, prompt: dict[str, Any], params: Any, request_id: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        answer = SimpleNamespace(token_ids=[1], finish_reason="stop", logprobs=SimpleNamespace(logprobs=[self.logprob]))
        yield SimpleNamespace(outputs=[answer])


class Worker(VllmWorker):
    """One without the attributes that the start of an engine sets."""

    def __init__(self, engine: Engine) -> None:
        self.weight_version = -1
        self._num_updates = self._num_syncs = 0
        self._turns = asyncio.Condition()
        self._engine: Any = engine
        self._request_ids = iter(range(100))
        self._admitted = asyncio.Semaphore(8)
        self._sampling_allowed = asyncio.Event()
        self._serving, self._answers, self._num_serving = {}, AnswerQueue(), Counter()
        self._sleep_mode, self._asleep, self._has_weights = True, set(), True
        self._records = self._returns_experts = False
        self._name = "generation-0"
        self._num_inside, self._sleep = 0, ExitStack()
        self._max_model_len = 8


def request(number: int) -> GenerationRequest:
    return request_of([1], number, str(number), max_new_tokens=1)


@in_loop
async def test_kv_of_a_version_that_comes_again_is_not_shared() -> None:
    engine = Engine()
    worker = Worker(engine)
    for version in (3, 4, 3):  # back to a checkpoint, whose next steps are others
        await worker.finish_weight_update(version)
        for _ in range(2):
            completion = await worker.generate(request(0))
            assert completion.weight_version == version
    first, second, again = engine.salts[0::2]
    assert engine.salts == [first, first, second, second, again, again]
    assert len({first, second, again}) == 3


@in_loop
async def test_a_sync_that_its_sender_gave_up_lets_no_request_into_the_next() -> None:
    engine = Engine()
    worker = Worker(engine)
    given_up = asyncio.create_task(worker.finish_weight_update(3))
    await asyncio.sleep(0)
    await worker.start_weight_update(clear_cache=True)
    with pytest.raises(RuntimeError, match="another sync has begun"):
        await given_up
    assert worker.weight_version == -1 and engine.told == []


@pytest.mark.parametrize("keep_weights", [True, False])
@in_loop
async def test_no_request_reaches_an_engine_whose_cache_sleeps(keep_weights: bool) -> None:
    """A sync wakes the weights alone. Another replica's episodes send requests meanwhile."""
    engine = Engine()
    worker = Worker(engine)
    await worker.finish_weight_update(6)
    await worker.offload(keep_weights=keep_weights)
    waiting = asyncio.create_task(worker.generate(request(0)))
    await asyncio.sleep(0.01)
    await worker.onload(["weights"])
    await worker.finish_weight_update(7)
    await asyncio.sleep(0.01)
    assert engine.salts == [] and engine.told == ["resume", 1 if keep_weights else 2, "weights"]
    await worker.onload(["kv_cache"])
    assert (await asyncio.wait_for(waiting, 60)).weight_version == 7
    assert engine.told[-2:] == ["kv_cache", "resume"]
    await worker.offload(keep_weights=keep_weights)
    await worker.onload()
    assert (engine.told[-1] == "resume") == keep_weights, "an engine without weights waits for a sync"


@in_loop
async def test_a_token_without_a_probability_is_no_answer() -> None:
    """Losses that see no logprobs of the engine, and evaluations, would take it for a sample."""
    engine = Engine()
    worker = Worker(engine)
    await worker.finish_weight_update(0)
    engine.logprob = math.nan
    with pytest.raises(RuntimeError, match="generation-0 sampled a token with the logprob nan or inf"):
        await worker.generate(request(0))


@in_loop
async def test_prefill_decode_and_sleep_are_noted() -> None:
    """A step in which a prompt gets its first token is prefill; no step begins before a request or a sync has ended."""
    engine: Any = Engine()
    steps: list[Any] = [[SimpleNamespace(prefill_stats=stats) for stats in step] for step in ([1, None], [None], [])]

    class Core:
        async def get_output_async(self) -> Any:
            await asyncio.sleep(0.01)
            return SimpleNamespace(outputs=steps.pop(0))

    async def generate(*request: Any) -> AsyncIterator[Any]:
        for _ in range(3):
            await engine.engine_core.get_output_async()
        async for output in Engine.generate(engine, *request):
            yield output

    engine.engine_core, engine.generate = Core(), generate
    worker = Worker(engine)
    worker._note_steps()
    BUSY.take()
    await worker.finish_weight_update(0)
    await asyncio.sleep(0.1)
    await worker.generate(request(0))
    await worker.offload(keep_weights=True)
    await asyncio.sleep(0.05)
    await worker.onload()
    (prefill, since, middle), (decode, begin, end), (asleep, *night) = BUSY.take()
    assert (prefill, decode, asleep) == ("prefill", "decode", "asleep")
    assert 0.01 <= middle - since < 0.1 and begin == middle < end <= night[0] < night[1] - 0.04


def test_the_reason_of_an_engine_that_did_not_start_is_its_own() -> None:
    logs = """
(Worker_TP1 pid=7) ERROR 11-22 17:00:00 [multiproc_executor.py:900] ValueError: no weights in /models/empty
(EngineCore pid=6) ERROR 11-22 17:00:01 [core.py:1163] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".replace("\\\n", "")
    assert start_failure(logs) == "ValueError: no weights in /models/empty"
    assert start_failure("nothing of use") is None


@in_loop
async def test_an_unexpected_failure_reaches_the_client() -> None:
    class Broken(Worker):
        async def generate(self, request: GenerationRequest, on_tokens: Any = None) -> Any:
            raise KeyError("logprobs")

    worker = Broken(Engine())
    await worker.submit([request(3)])
    [answer] = await asyncio.wait_for(worker.drain(), 60)
    assert (answer.request_id, answer.failure_type, answer.failure) == ("3", "KeyError", "KeyError('logprobs')")


def answer(request_id: str) -> GenerationAnswer:
    return GenerationAnswer(request_id=request_id, failure_type="ValueError", failure="no")


@in_loop
async def test_answers_wait_for_others_as_long_as_all_have_patience() -> None:
    queue, clock = AnswerQueue(), asyncio.get_running_loop().time
    taking = asyncio.create_task(queue.take())
    queue.put([answer("a")], patience_s=100.0)
    await asyncio.sleep(0.01)
    assert not taking.done()
    queue.put([answer("b")])  # the last one
    assert [found.request_id for found in await asyncio.wait_for(taking, 60)] == ["a", "b"]
    began = clock()
    queue.put([answer("c")], patience_s=0.05)
    assert [found.request_id for found in await asyncio.wait_for(queue.take(), 60)] == ["c"]
    assert clock() - began > 0.04
    queue.put([answer("d")], patience_s=100.0)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    again = asyncio.create_task(queue.take())  # the earlier caller may be dead
    assert await asyncio.wait_for(waiting, 60) == []
    queue.put([answer("e")])
    assert len(await asyncio.wait_for(again, 60)) == 2


@in_loop
async def test_only_the_last_answer_of_a_client_leaves_at_once() -> None:
    class Slow(Worker):
        async def generate(self, request: GenerationRequest, on_tokens: Any = None) -> Any:
            await asyncio.sleep(0.4 + 0.01 * (request.seed % 2))
            raise ValueError("no")

    worker = Slow(Engine())
    await worker.submit([request(number) for number in range(6)])
    assert len(await asyncio.wait_for(worker.drain(), 60)) == 6  # 10 ms apart, 400 ms after the start

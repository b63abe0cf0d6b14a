"""What replicas do about weight updates, sleep and answers, with fakes for the engine and for the ranks of a policy."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError

from nemo_rl.distributed.actor_host import BUSY
from nemo_rl.models.generation.answers import AnswerQueue, EngineWorker
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.hf import HfWorker
from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.models.generation.replicas import EngineGeneration, engines_of
from nemo_rl.models.generation.vllm.config import VllmConfig
from nemo_rl.models.generation.vllm.startup import num_admitted, preload_by_link, start_failure
from nemo_rl.models.generation.vllm.worker import VllmWorker
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, ImageSpan, StopReason
from tests.unit.config.run_configs import build
from tests.unit.generation.configs import engine_settings, generation_config
from tests.unit.rollouts.engines import in_loop, request_of


class Engine:
    """Notes the cache salt of each request, and its orders; all its ranks say yes to anything."""

    errored, logprob = False, -0.5

    def __init__(self) -> None:
        self.salts: list[str] = []
        self.told: list[Any] = []

    async def collective_rpc(self, *_: Any, **__: Any) -> list[bool]:
        return [True]

    pause_generation = start_weight_update = reset_prefix_cache = collective_rpc

    async def finish_weight_update(self, version: str) -> None:
        await asyncio.sleep(0.01)

    async def resume_generation(self) -> None:
        self.told.append("resume")

    async def sleep(self, level: int) -> None:
        self.told.append(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.told += tags

    async def generate(self, prompt: dict[str, Any], params: Any, request_id: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        answer = SimpleNamespace(token_ids=[1], finish_reason="stop", logprobs=SimpleNamespace(logprobs=[self.logprob]))
        yield SimpleNamespace(outputs=[answer])


class Worker(VllmWorker):
    """One without the attributes that the start of an engine sets."""

    def __init__(self, engine: Engine, config: GenerationConfig | None = None) -> None:
        EngineWorker.__init__(self, engine_settings("model", config or generation_config(8), device="cuda"))
        self._sampling_allowed.clear()
        self._engine: Any = engine
        self._num_inside, self._admitted = 0, asyncio.Semaphore(8)
        self._records = self._returns_experts = False
        self._images = None


def request(number: int) -> GenerationRequest:
    return request_of([1], number, str(number), max_new_tokens=1)


async def with_weights(version: int) -> tuple[Any, Engine]:
    """A worker with weights of this version, and its engine."""
    worker = Worker(engine := Engine())
    await worker.finish_weight_update(version)
    return worker, engine


@in_loop
async def test_kv_of_a_version_that_comes_again_is_not_shared() -> None:
    worker, engine = await with_weights(2)
    for version in (3, 4, 3):  # back to a checkpoint, whose next steps are others
        await worker.finish_weight_update(version)
        assert [(await worker.generate(request(0))).weight_version for _ in range(2)] == [version, version]
    first, second, again = engine.salts[0::2]
    assert engine.salts == [first, first, second, second, again, again] and len({first, second, again}) == 3


@in_loop
async def test_a_sync_that_its_sender_gave_up_lets_no_request_into_the_next() -> None:
    worker = Worker(engine := Engine())
    given_up = asyncio.create_task(worker.finish_weight_update(3))
    await asyncio.sleep(0)
    await worker.start_weight_update(clear_cache=True)
    with pytest.raises(RuntimeError, match="another sync has begun"):
        await given_up
    assert worker.weight_version == -1 and engine.told == []


@in_loop
async def test_a_request_whose_images_come_during_a_sync_waits_for_the_new_weights() -> None:
    arrived = asyncio.Event()

    async def items(request: GenerationRequest) -> list[bool]:
        return [await arrived.wait()]

    worker, engine = await with_weights(1)
    worker._images = SimpleNamespace(items=items, prompt=lambda request, items, salt: {"cache_salt": salt})
    with_image = replace(request(0), images=[ImageSpan(digest="a", start=0, length=1)])
    waiting = asyncio.create_task(worker.generate(with_image))
    await asyncio.sleep(0.01)
    await worker.start_weight_update(clear_cache=True)
    arrived.set()
    await asyncio.sleep(0.01)
    assert engine.salts == [], "the engine is paused"
    await worker.finish_weight_update(2)
    assert (await asyncio.wait_for(waiting, 60)).weight_version == 2 and engine.salts == ["update 2"]


@in_loop
async def test_on_a_cpu_only_requests_of_the_same_prompt_share_its_cache() -> None:
    worker, engine = await with_weights(1)
    worker._device = "cpu"
    prompts = [1, 2], [1, 2], [1, 2, 3]
    for prompt in prompts:
        await worker.generate(replace(request(0), prompt_token_ids=list(prompt)))
    one, same, longer = engine.salts
    assert one == same != longer
    await worker.start_weight_update(clear_cache=True)
    await worker.finish_weight_update(2)
    await worker.generate(replace(request(0), prompt_token_ids=[1, 2]))
    assert engine.salts[-1] not in (one, longer), "other weights"


@pytest.mark.parametrize("keep_weights", [True, False])
@in_loop
async def test_no_request_reaches_an_engine_whose_cache_sleeps(keep_weights: bool) -> None:
    """A sync wakes the weights alone. Another replica's episodes send requests meanwhile."""
    worker, engine = await with_weights(6)
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
    worker, engine = await with_weights(0)
    engine.logprob = math.nan
    with pytest.raises(RuntimeError, match="generation-0 sampled a token with the logprob nan or inf"):
        await worker.generate(request(0))


@in_loop
async def test_prefill_decode_and_sleep_are_noted() -> None:
    """A step in which a prompt gets its first token is prefill; no step begins before a request or a sync has ended."""
    steps: list[Any] = [[SimpleNamespace(prefill_stats=stats) for stats in step] for step in ([1, None], [None], [])]

    async def get_output_async() -> Any:
        await asyncio.sleep(0.01)
        return SimpleNamespace(outputs=steps.pop(0))

    class Stepping(Engine):
        engine_core = SimpleNamespace(get_output_async=get_output_async)

        async def generate(self, *request: Any) -> AsyncIterator[Any]:
            for _ in range(3):
                await self.engine_core.get_output_async()
            async for output in super().generate(*request):
                yield output

    worker = Worker(Stepping())
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


@pytest.mark.parametrize(("blocks", "of_groups", "number"), [(101, [10], 10), (100, [10], 9), (101, [10, 4], 7)])
def test_admitted_requests_fit_with_the_blocks_of_all_groups(blocks: int, of_groups: list[int], number: int) -> None:
    cache = SimpleNamespace(num_gpu_blocks=blocks, kv_cache_max_concurrency=blocks / sum(of_groups), block_size=16)
    model, scheduler = SimpleNamespace(max_model_len=160), SimpleNamespace(max_num_seqs=256)
    config = SimpleNamespace(cache_config=cache, model_config=model, scheduler_config=scheduler)
    engine, cfg = SimpleNamespace(vllm_config=config), VllmConfig(precision="float32", max_model_len=160)
    assert num_admitted(engine, cfg) == number
    cache.kv_cache_max_concurrency = 1.0
    with pytest.raises(ValueError, match=r"needs 10\d: raise policy.generation.vllm_cfg.cpu_kv_cache_space_gb"):
        num_admitted(engine, cfg)


def test_the_reason_of_an_engine_that_did_not_start_is_its_own(tmp_path: Path) -> None:
    """It is what the log has from the start on; a progress bar before it has more bytes than characters."""
    earlier, log = "ValueError: of an engine before " + 100 * "\u2588", tmp_path / "log"
    logs = """
(Worker_TP1 pid=7) ERROR 11-22 17:00:00 [multiproc_executor.py:900] ValueError: no weights in /models/empty
(EngineCore pid=6) ERROR 11-22 17:00:01 [core.py:1163] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    log.write_text(earlier + logs, encoding="utf-8")
    assert start_failure({log: len(earlier.encode())}) == "ValueError: no weights in /models/empty"
    assert start_failure({log: log.stat().st_size}) is None


def test_preloaded_libraries_in_a_folder_with_spaces_are_found_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "my [own]: packages"
    packages.mkdir()
    (packages / "libgomp.so.1").touch()
    monkeypatch.setenv("LD_PRELOAD", f"{packages}/libgomp.so.1:/usr/lib/libm.so")
    preload_by_link(str(packages))
    first, second = os.environ["LD_PRELOAD"].split(":")
    assert second == "/usr/lib/libm.so" and " " not in first
    assert Path(first).samefile(packages / "libgomp.so.1")
    monkeypatch.setenv("LD_PRELOAD", f"{packages}/libgomp.so.1:/usr/lib/libm.so")
    preload_by_link(str(packages))  # another engine of this process, whose vLLM adds them again
    assert os.environ["LD_PRELOAD"] == f"{first}:{second}"


@in_loop
async def test_answers_wait_for_others_as_long_as_all_have_patience() -> None:
    queue, clock = AnswerQueue(), asyncio.get_running_loop().time
    answers = [GenerationAnswer(request_id=name, failure_type="ValueError", failure="no") for name in "abcde"]
    taking = asyncio.create_task(queue.take())
    queue.put(answers[:1], patience_s=100.0)
    await asyncio.sleep(0.01)
    assert not taking.done()
    queue.put(answers[1:2])  # the last one
    assert await taking == answers[:2]
    began = clock()
    queue.put(answers[2:3], patience_s=0.05)
    assert await queue.take() == answers[2:3]
    assert clock() - began > 0.04
    queue.put(answers[3:4], patience_s=100.0)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    again = asyncio.create_task(queue.take())  # the earlier caller may be dead
    assert await waiting == []
    queue.put(answers[4:])
    assert await again == answers[3:]


@in_loop
async def test_only_the_last_answer_of_a_client_leaves_at_once_and_a_failure_reaches_it() -> None:
    class Slow(Worker):
        async def generate(self, request: GenerationRequest, on_tokens: Any = None) -> Any:
            await asyncio.sleep(0.4 + 0.01 * (request.seed % 2))
            raise KeyError("logprobs")

    worker = Slow(Engine())
    await worker.submit([request(number) for number in range(6)])
    answers = await asyncio.wait_for(worker.drain(), 60)  # 10 ms apart, 400 ms after the start
    assert sorted(answer.request_id for answer in answers) == list("012345")
    assert {(answer.failure_type, answer.failure) for answer in answers} == {("KeyError", "KeyError('logprobs')")}


# -- the desk between episodes and a policy that draws completions itself


@dataclass
class Rank:
    """A rank of a policy: `call.remote("generate", ...)` answers with the prompt's first token, once `gate` is open."""

    answers: bool = True
    failure: Exception | None = None
    shares: list[tuple[list[str], int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    alive: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.alive.set()
        self.call = self
        self.phase = SimpleNamespace(remote=self.alive.wait)

    async def remote(self, method: str, requests: Sequence[GenerationRequest], version: int) -> list[GenerationAnswer]:
        assert method == "generate"
        self.shares.append(([request.request_id for request in requests], version))
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        how: Any = {"logprobs": [-1.0], "stop_reason": StopReason.LENGTH, "weight_version": version}
        own = requests if self.answers else []
        answers = [(r.request_id, Completion(token_ids=r.prompt_token_ids[:1], **how)) for r in own]
        return [GenerationAnswer(request_id=key, completion=made) for key, made in answers]


def requests(*prompts: list[int]) -> list[GenerationRequest]:
    return [request_of(prompt, number, str(number), max_new_tokens=1) for number, prompt in enumerate(prompts)]


async def desk(*ranks: Rank, data_ranks: Sequence[int] = (0,)) -> HfWorker:
    worker = HfWorker(max_model_len=8, length_key="max_model_len", max_batch_size=4)
    await worker.use(ranks, data_ranks)
    await worker.finish_weight_update(3)
    return worker


async def busy_desk(*prompts: list[int]) -> tuple[HfWorker, Rank]:
    """With a rank that has begun to answer these prompts and waits for its gate."""
    rank = Rank()
    rank.gate.clear()
    worker = await desk(rank)
    await worker.submit(requests(*prompts))
    while not rank.shares:
        await asyncio.sleep(0.001)
    return worker, rank


async def answers_of(worker: Any, count: int) -> dict[str, GenerationAnswer]:
    found: dict[str, GenerationAnswer] = {}
    while len(found) < count:
        found |= {answer.request_id: answer for answer in await asyncio.wait_for(worker.drain(), 60)}
    return found


@in_loop
async def test_every_rank_is_called_once_per_batch_and_data_ranks_share_the_requests_but_no_equal_prompts() -> None:
    ranks = [Rank(), Rank(answers=False), Rank(), Rank(answers=False)]
    worker = await desk(*ranks, data_ranks=[0, 0, 1, 1])
    await worker.submit(requests([5], [6], [5]))
    await worker.submit([replace(*requests([6]), request_id="late")])
    found = await answers_of(worker, 4)
    tokens = {key: answer.completion.token_ids for key, answer in found.items() if answer.completion}
    assert tokens == {"0": [5], "1": [6], "2": [5], "late": [6]}
    assert ranks[0].shares == ranks[1].shares == [(["0", "2"], 3)]
    assert ranks[2].shares == ranks[3].shares == [(["1", "late"], 3)]


@in_loop
async def test_a_long_batch_is_drawn_and_answered_in_parts_as_long_as_all_ranks_answer() -> None:
    worker, rank = await busy_desk([1], [2], [3], [4], [5], [6])
    await worker.check_health()
    rank.alive.clear()
    with pytest.raises(TimeoutError):  # after which the client takes it for dead
        await asyncio.wait_for(worker.check_health(), 0.05)
    rank.gate.set()
    assert sorted(await answers_of(worker, 4)) == list("0123"), "the first part does not wait for the second"
    assert sorted(await answers_of(worker, 2)) == ["4", "5"]
    assert [ids for ids, _ in rank.shares] == [list("0123"), ["4", "5"]]


@in_loop
async def test_prompts_that_cannot_be_answered_are_refused_and_disturb_nobody() -> None:
    for worker in (await desk(Rank()), (await with_weights(3))[0]):
        await worker.submit(requests([], [1] * 8, [1] * 7))
        found = await answers_of(worker, 3)
        assert "no tokens" in found["0"].failure and "max_model_len is 8" in found["1"].failure
        assert found["2"].completion is not None


@in_loop
async def test_rest_forgets_requests_and_returns_when_the_policy_is_free() -> None:
    worker, rank = await busy_desk([1])
    resting = asyncio.create_task(worker.rest())
    await asyncio.sleep(0.02)
    assert not resting.done(), "the rank still draws"
    with pytest.raises(AssertionError, match="while completions were generated"):
        await worker.finish_weight_update(4)
    rank.gate.set()
    await asyncio.wait_for(resting, 60)
    await worker.finish_weight_update(4)
    await worker.submit([*requests([1], [2])[1:]])
    assert list(await answers_of(worker, 1)) == ["1"], "what was forgotten is not answered"
    assert rank.shares[-1] == (["1"], 4)


@in_loop
async def test_an_aborted_request_is_neither_drawn_nor_answered() -> None:
    worker, rank = await busy_desk([1], [2])
    third, fourth = requests([1], [2], [3], [4])[2:]
    await worker.submit([third, fourth])
    await worker.abort(["0", "2", "of nobody"])
    rank.gate.set()
    assert sorted(await answers_of(worker, 2)) == ["1", "3"]
    assert [ids for ids, _ in rank.shares] == [["0", "1"], ["3"]]


@in_loop
async def test_the_death_of_a_rank_is_told_as_that_of_an_engine_and_an_answer_that_ray_loses_fails_alone() -> None:
    worker = await desk(*(Rank(failure=ActorDiedError()) for _ in range(2)), data_ranks=[0, 1])
    await worker.submit(requests([1], [2]))
    assert {answer.failure_type for answer in (await answers_of(worker, 2)).values()} == {"EngineDied"}
    with pytest.raises(EngineDied):
        await worker.check_health()
    rank = Rank(failure=ObjectLostError("0" * 56, owner_address=None, call_site=""))
    await worker.use([rank], [0])
    await worker.check_health()
    await worker.submit(requests([1], [2]))
    assert all("ObjectLostError" in answer.failure for answer in (await answers_of(worker, 2)).values())
    await worker.check_health()
    rank.failure = None
    await worker.submit(requests([1]))
    assert (await answers_of(worker, 1))["0"].completion is not None


# -- an engine of a user's own


class OwnGeneration(EngineGeneration):
    """Engines that are in no registry."""


def test_an_engine_of_a_user_s_own_is_named_by_its_path() -> None:
    path = f"{__name__}:{OwnGeneration.__name__}"
    assert engines_of(path) is OwnGeneration
    own = ("policy.generation.engine_cfg.max_model_len=99", "+policy.generation.engine_kwargs.size=3")
    generation = build(f"policy.generation.backend='{path}'", *own, "data.max_input_seq_length=50").policy.generation
    assert (generation.length_path, generation.arguments) == ("engine_cfg.max_model_len", {"size": 3})
    assert (generation.engine.longest_sequence, generation.engine.wire_dtype) == (99, "bfloat16")
    worker = Worker(Engine(), generation)
    with pytest.raises(ValueError, match=r"policy\.generation\.engine_cfg\.max_model_len is 99"):
        worker._max_tokens(request_of([1] * 99, 0, "0", max_new_tokens=1))
    with pytest.raises(ValueError, match="must be a subclass of EngineGeneration"):
        engines_of(f"{__name__}:Engine")

"""The desk between episodes and a policy that draws completions itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError

from nemo_rl.models.generation.hf import HfWorker, split_requests
from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, StopReason
from tests.unit.rollouts.engines import in_loop, request_of


@dataclass
class Rank:
    """A rank of a policy: `call.remote("generate", ...)` answers with the prompt's first token, once `gate` is open."""

    answers: bool = True
    failure: Exception | None = None
    shares: list[tuple[list[str], int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.call = self

    async def remote(self, method: str, requests: Sequence[GenerationRequest], version: int) -> list[GenerationAnswer]:
        assert method == "generate"
        self.shares.append(([request.request_id for request in requests], version))
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        how: Any = {"logprobs": [-1.0], "stop_reason": StopReason.LENGTH, "weight_version": version}
        return [
            GenerationAnswer(
                request_id=request.request_id, completion=Completion(token_ids=request.prompt_token_ids[:1], **how)
            )
            for request in requests
            if self.answers
        ]


def ask(*prompts: list[int]) -> list[GenerationRequest]:
    return [request_of(prompt, number, str(number), max_new_tokens=1) for number, prompt in enumerate(prompts)]


async def desk(*ranks: Rank, data_ranks: Sequence[int] = (0,)) -> HfWorker:
    worker = HfWorker(max_model_len=8)
    await worker.use(ranks, data_ranks)
    await worker.finish_weight_update(3)
    return worker


async def busy_desk(*prompts: list[int]) -> tuple[HfWorker, Rank]:
    """With a rank that has begun to answer these prompts and waits for its gate."""
    rank = Rank()
    rank.gate.clear()
    worker = await desk(rank)
    await worker.submit(ask(*prompts))
    while not rank.shares:
        await asyncio.sleep(0.001)
    return worker, rank


async def answers_of(worker: HfWorker, count: int) -> dict[str, GenerationAnswer]:
    found: dict[str, GenerationAnswer] = {}
    while len(found) < count:
        found |= {answer.request_id: answer for answer in await asyncio.wait_for(worker.drain(), 60)}
    return found


@in_loop
async def test_every_rank_is_called_once_per_batch_and_data_ranks_share_the_requests() -> None:
    ranks = [Rank(), Rank(answers=False), Rank(), Rank(answers=False)]
    worker = await desk(*ranks, data_ranks=[0, 0, 1, 1])
    await worker.submit(ask([5], [6], [7]))
    await worker.submit([replace(*ask([8]), request_id="late")])
    found = await answers_of(worker, 4)
    tokens = {key: answer.completion.token_ids for key, answer in found.items() if answer.completion}
    assert tokens == {"0": [5], "1": [6], "2": [7], "late": [8]}
    assert ranks[0].shares == ranks[1].shares == [(["0", "1"], 3)]
    assert ranks[2].shares == ranks[3].shares == [(["2", "late"], 3)]


@in_loop
async def test_prompts_that_cannot_be_answered_are_refused_and_disturb_nobody() -> None:
    worker = await desk(Rank())
    await worker.submit(ask([], [1] * 8, [1] * 7))
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
    await worker.submit([*ask([1], [2])[1:]])
    assert list(await answers_of(worker, 1)) == ["1"], "what was forgotten is not answered"
    assert rank.shares[-1] == (["1"], 4)


@in_loop
async def test_an_aborted_request_is_neither_drawn_nor_answered() -> None:
    worker, rank = await busy_desk([1], [2])
    third, fourth = ask([1], [2], [3], [4])[2:]
    await worker.submit([third, fourth])
    await worker.abort(["0", "2", "of nobody"])
    rank.gate.set()
    assert sorted(await answers_of(worker, 2)) == ["1", "3"]
    assert [ids for ids, _ in rank.shares] == [["0", "1"], ["3"]]


@in_loop
async def test_the_death_of_a_rank_is_told_as_that_of_an_engine_until_there_is_a_new_one() -> None:
    worker = await desk(*(Rank(failure=ActorDiedError()) for _ in range(2)), data_ranks=[0, 1])
    await worker.submit(ask([1], [2]))
    assert {answer.failure_type for answer in (await answers_of(worker, 2)).values()} == {"EngineDied"}
    with pytest.raises(EngineDied):
        await worker.check_health()
    await worker.use([Rank()], [0])
    await worker.check_health()
    await worker.submit(ask([1]))
    assert (await answers_of(worker, 1))["0"].completion is not None


@in_loop
async def test_an_answer_that_ray_loses_fails_its_requests_alone() -> None:
    rank = Rank(failure=ObjectLostError("0" * 56, owner_address=None, call_site=""))
    worker = await desk(rank)
    await worker.submit(ask([1], [2]))
    found = await answers_of(worker, 2)
    assert all("ObjectLostError" in answer.failure for answer in found.values())
    await worker.check_health()
    rank.failure = None
    await worker.submit(ask([1]))
    assert (await answers_of(worker, 1))["0"].completion is not None


def test_shares_keep_equal_prompts_together() -> None:
    requests = ask([1, 2], [9], [1, 2], [9], [3, 4, 5], [3, 4, 5])
    shares = [[request.prompt_token_ids for request in share] for share in split_requests(requests, 3)]
    assert shares == [[[9], [9]], [[1, 2], [1, 2]], [[3, 4, 5], [3, 4, 5]]]
    assert [len(share) for share in split_requests(requests[:2], 4)] == [0, 1, 0, 1]

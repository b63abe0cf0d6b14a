"""Requests of many episodes to replicas that answer, die, stop or are replaced."""

import asyncio
from typing import Any

import pytest

from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.types import GenerationAnswer, GenerationRequest
from tests.unit.rollouts.engines import FakeReplica, in_loop, numbers, request_of


def engines_of(*replicas: FakeReplica, timeout_s: float = 60.0) -> Engines:
    engines = Engines(timeout_s)
    engines.replace(replicas)
    return engines


def ask(engines: Engines, prompt: list[int], seed: int = 0) -> asyncio.Task[Any]:
    return asyncio.create_task(engines.generate(request_of(prompt, seed)))


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def never(request: GenerationRequest) -> None:
    return None


@in_loop
async def test_the_least_loaded_replica_answers_and_the_tokens_do_not_depend_on_which():
    many, one = [FakeReplica() for _ in range(3)], FakeReplica()
    spread, alone = engines_of(*many), engines_of(one)
    answers = await asyncio.gather(*(ask(spread, [n, 2], n) for n in range(9)))
    assert answers == await asyncio.gather(*(ask(alone, [n, 2], n) for n in range(9)))
    assert [len(replica.asked) for replica in many] == [3, 3, 3]


@pytest.mark.parametrize("wait", [False, True])  # before it is sent, and while it is sampled
@in_loop
async def test_a_request_that_nobody_waits_for_takes_no_slot_of_the_engine(wait):
    replica = FakeReplica(lambda request: None if request.seed == 1 else numbers(request))
    engines = engines_of(replica)
    waiting = [ask(engines, [1], 1) for _ in range(3)]
    if wait:
        await settle()
    waiting[0].cancel()
    waiting[1].cancel()
    await settle()
    assert (await ask(engines, [5])).token_ids == [15, 3]
    assert len(replica.under_way) == 1 and replica.under_way.isdisjoint(replica.aborted)
    assert len(replica.aborted) == (2 if wait else 0)
    waiting[2].cancel()
    await settle()
    assert not replica.under_way


@in_loop
async def test_what_a_living_engine_refuses_is_a_failure_of_the_request():
    class Refuses(FakeReplica):
        async def drain(self, asker: str = "") -> list[GenerationAnswer]:
            why = {"failure_type": "ValueError", "failure": "too long"}
            return [GenerationAnswer(request_id=request.request_id, **why) for request in self.asked]

    with pytest.raises(RequestFailed, match="generation-0: too long"):
        await ask(engines_of(Refuses()), [1])


@in_loop
async def test_a_death_is_told_at_once_and_requests_are_asked_the_same_again_of_the_living_or_of_new_ones():
    dying, living = FakeReplica(never), FakeReplica(lambda request: None if request.seed == 7 else numbers(request))
    engines = engines_of(dying, living)
    first, second = ask(engines, [1]), ask(engines, [2])
    await settle()
    assert second.done() and not first.done()
    dying.die()
    assert "generation-0" in str(await engines.died())
    assert (await first).token_ids == [11, 3]
    asked = ask(engines, [1, 2, 3], seed=7)
    await settle()
    living.die()
    late = ask(engines, [4])
    await settle()
    assert not asked.done() and not late.done()
    new = FakeReplica(lambda request: None if request.seed == 8 else numbers(request))
    engines.replace([new])
    assert (await asked).token_ids == [23, 3] and (await late).token_ids == [14, 3]
    died, _ = asyncio.create_task(engines.died()), ask(engines, [5], seed=8)
    await settle()
    assert not died.done(), "the new one lives"
    new.die()
    assert "generation-0" in str(await died)


@pytest.mark.parametrize("method", ["submit", "drain"])
@in_loop
async def test_a_replica_that_says_nothing_counts_as_dead_within_the_time(method):
    replica = FakeReplica(never)
    replica.is_silent = method == "submit"
    engines = engines_of(replica, timeout_s=0.1)
    asked = ask(engines, [1])
    await settle()
    replica.is_silent = True
    death = await asyncio.wait_for(engines.died(), 60)
    assert f"generation-0 ({method}) gave no sign of life within 0.1 s" in str(death)
    assert isinstance(death, EngineDied)
    engines.replace([FakeReplica()])
    assert (await asked).token_ids == [11, 3]


@in_loop
async def test_time_stands_still_while_an_engine_is_replaced():
    old = FakeReplica(never)
    engines = engines_of(old)

    async def limited() -> None:
        async with engines.time_limit(0.1):
            await ask(engines, [1])

    first = asyncio.create_task(limited())
    await settle()
    old.die()
    await engines.died()
    second = asyncio.create_task(limited())
    await asyncio.sleep(0.2)
    assert not first.done() and not second.done()
    slow = FakeReplica(never)
    engines.replace([slow])
    for late in (first, second):  # afterwards it goes on
        with pytest.raises(TimeoutError):
            await late
    await settle()
    assert not slow.under_way

"""Items that are handed in at the same time travel in one call."""

import asyncio

import pytest

from nemo_rl.distributed.batched_calls import BatchedCalls
from tests.unit.rollouts.engines import in_loop


@pytest.mark.parametrize("one_at_a_time", [False, True])
@in_loop
async def test_what_is_ready_goes_in_one_call_and_what_comes_during_a_call_in_the_next(one_at_a_time: bool) -> None:
    sent: list[list[int]] = []
    end = asyncio.Event()

    async def call(items: list[int]) -> int:
        sent.append(items)
        await end.wait()
        return sum(items)

    calls = BatchedCalls(call, one_at_a_time=one_at_a_time)
    first = [calls.add(1), calls.add(2)]
    while not sent:
        await asyncio.sleep(0)
    second = [calls.add(3), calls.add(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sent == ([[1, 2]] if one_at_a_time else [[1, 2], [3, 4]])
    second.append(calls.add(5))
    end.set()
    assert await asyncio.gather(*first) == [3, 3]
    assert await asyncio.gather(*second) == ([12] * 3 if one_at_a_time else [7, 7, 5])
    assert sent[1:] == ([[3, 4, 5]] if one_at_a_time else [[3, 4], [5]])


@in_loop
async def test_a_call_that_fails_fails_its_own_items_alone() -> None:
    async def call(items: list[int]) -> None:
        if 1 in items:
            raise ValueError("one")

    calls = BatchedCalls(call, one_at_a_time=True)
    failing = calls.add(1)
    with pytest.raises(ValueError, match="one"):
        await failing
    assert await calls.add(2) is None

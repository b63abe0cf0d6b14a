"""No failure of a rank in a world goes unseen or takes longer than its time limit."""

import os
import time

import pytest

from tests.worlds import RankDied, run_world


def test_an_exception_or_the_end_of_one_rank_ends_the_world() -> None:
    def one_raises(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("boo")
        time.sleep(60)

    def one_exits(rank: int, world_size: int) -> None:
        if rank == 1:
            time.sleep(0.5)  # rank 0 has left the set-up of the world by then
            os._exit(3)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(ValueError, match="boo") as caught:
        run_world(one_raises, 2)
    assert time.monotonic() - start < 50
    assert "raised in rank 1" in caught.value.__notes__[0] and "in one_raises" in caught.value.__notes__[0]
    with pytest.raises(RankDied, match="rank 1 ended with exit code 3"):
        run_world(one_exits, 2)


def test_time_limit_shows_where_each_rank_was() -> None:
    def one_sleeps(rank: int, world_size: int) -> None:
        if rank == 1:
            time.sleep(60)

    with pytest.raises(TimeoutError, match=r"(?s)ranks \[0, 1\] still ran after 2 s.*in barrier.*in one_sleeps"):
        run_world(one_sleeps, 2, timeout=2)

"""When a process was busy with what."""

from __future__ import annotations

from nemo_rl.distributed.actor_host import BusyTimes


def test_calls_that_overlap_or_follow_at_once_are_one_interval():
    now = [0.0]
    busy = BusyTimes(clock=lambda: now[0])
    first, second = busy.track("generate"), busy.track("generate")
    first.__enter__()
    now[0] = 1.0
    second.__enter__()
    now[0] = 2.0
    first.__exit__(None, None, None)
    now[0] = 3.0
    second.__exit__(None, None, None)
    now[0] = 3.001
    with busy.track("generate"):
        now[0] = 4.0
    now[0] = 5.0
    with busy.track("train"):
        now[0] = 6.0
    assert busy.take() == [("generate", 0.0, 4.0), ("train", 5.0, 6.0)]
    assert busy.take() == []


def test_a_call_that_goes_on_is_told_in_parts():
    now = [0.0]
    busy = BusyTimes(clock=lambda: now[0])
    with busy.track("train"):
        now[0] = 2.0
        assert busy.take() == [("train", 0.0, 2.0)]
        now[0] = 5.0
    assert busy.take() == [("train", 2.0, 5.0)]


def test_only_the_latest_intervals_are_kept():
    now = [0.0]
    busy = BusyTimes(clock=lambda: now[0])
    for number in range(2 * BusyTimes.MAX_KEPT):
        now[0] = float(number)
        with busy.track("a" if number % 2 else "b"):
            now[0] += 0.5
    found = busy.take()
    assert len(found) == BusyTimes.MAX_KEPT and found[-1][2] == 2 * BusyTimes.MAX_KEPT - 0.5

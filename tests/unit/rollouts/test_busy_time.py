"""Seconds in which at least one request is in flight."""

from __future__ import annotations

import pytest

from nemo_rl.rollouts.rollout_worker import BusyTime, GenerationUse


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_requests_that_overlap_count_once_and_pauses_not():
    clock = Clock()
    busy = BusyTime(clock)
    clock.now = 11.0
    with busy.request():
        clock.now = 13.0
        with busy.request():
            clock.now = 14.0
        clock.now = 15.0
    busy.num_tokens += 7
    clock.now = 20.0
    assert busy.take() == GenerationUse(busy_s=4.0, window_s=10.0, num_tokens=7)
    assert busy.take() == GenerationUse(busy_s=0.0, window_s=0.0, num_tokens=0)


def test_a_request_belongs_to_both_windows_it_lies_in_also_when_it_fails():
    clock = Clock()
    busy = BusyTime(clock)
    with pytest.raises(RuntimeError), busy.request():
        clock.now = 12.0
        assert busy.take() == GenerationUse(busy_s=2.0, window_s=2.0, num_tokens=0)
        clock.now = 15.0
        raise RuntimeError
    clock.now = 18.0
    assert busy.take() == GenerationUse(busy_s=3.0, window_s=6.0, num_tokens=0)

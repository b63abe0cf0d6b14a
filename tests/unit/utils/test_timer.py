import pytest

from nemo_rl.utils.timer import Timer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_measurements_add_up_by_label():
    clock = FakeClock()
    timer = Timer(clock)
    for seconds in (1.0, 3.0):
        with timer.time("train"), timer.time("train/forward"):
            clock.now += seconds
    with timer.time("refit"):
        clock.now += 0.5
    assert timer.get_latest_elapsed("train") == 3.0
    assert timer.get_timing_metrics() == {"train/forward": 4.0, "train": 4.0, "refit": 0.5}


def test_a_body_that_raises_is_measured():
    timer = Timer()
    with pytest.raises(RuntimeError), timer.time("a"):
        raise RuntimeError
    assert list(timer.get_timing_metrics()) == ["a"]


def test_reset():
    timer = Timer()
    for label in ("a", "b"):
        with timer.time(label):
            pass
    timer.reset()
    assert timer.get_timing_metrics() == {}

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
    timer.start("refit")
    clock.now += 0.5
    assert timer.stop("refit") == 0.5
    assert timer.get_elapsed("train") == [1.0, 3.0]
    assert timer.get_timing_metrics("sum") == {"train/forward": 4.0, "train": 4.0, "refit": 0.5}
    assert timer.get_timing_metrics({"train": "max"}) == {"train/forward": 2.0, "train": 3.0, "refit": 0.5}


def test_misuse_is_an_error():
    timer = Timer()
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is running already"):
        timer.start("a")
    timer.stop("a")
    with pytest.raises(ValueError, match="'a' is not running"):
        timer.stop("a")
    with pytest.raises(KeyError, match="no measurement"):
        timer.get_elapsed("b")

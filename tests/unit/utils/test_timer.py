import pytest

from nemo_rl.utils.timer import TimeoutChecker, Timer, parse_duration_s
from tests.tables import named


def test_measurements_add_up_by_label_and_misuse_is_an_error():
    now = 100.0
    timer = Timer(lambda: now)
    for seconds in (1.0, 3.0):
        with timer.time("train"), timer.time("train/forward"):
            now += seconds
    timer.start("refit")
    now += 0.5
    assert timer.stop("refit") == 0.5
    assert timer.get_elapsed("train") == [1.0, 3.0]
    assert timer.get_timing_metrics("sum") == {"train/forward": 4.0, "train": 4.0, "refit": 0.5}
    assert (timer.reduce("train", "std"), timer.reduce("refit", "std")) == (1.0, 0.0)  # of all, not of a sample
    assert timer.get_timing_metrics({"train": "max"}) == {"train/forward": 2.0, "train": 3.0, "refit": 0.5}
    timer.reset()
    assert timer.get_timing_metrics() == {}
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is running already"):
        timer.start("a")
    timer.stop("a")
    with pytest.raises(ValueError, match="'a' is not running"):
        timer.stop("a")
    with pytest.raises(KeyError, match="no measurement"):
        timer.get_elapsed("b")


def test_durations():
    assert parse_duration_s("00:03:45:00") == 3 * 3600 + 45 * 60
    assert parse_duration_s("01:00:00:01") == parse_duration_s("1:0:0:1") == 86401
    assert parse_duration_s("00:36:00:90") == 36 * 3600 + 90


@named(
    "text",
    {
        "three parts": "3:45:00",
        "nothing": "",
        "no numbers": "a:b:c:d",
        "negative": "0:0:0:-1",
    },
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration_s(text)


def test_timeout_tells_before_one_more_iteration_would_be_too_late():
    now = 0.0
    checker = TimeoutChecker("00:00:01:40", fit_last_save_time=True, clock=lambda: now)
    now = 20.0
    checker.start_iterations()
    for told in (False, False, True, True):  # of 100 s, an iteration taking 25 s
        now += 25.0
        checker.mark_iteration()
        assert checker.check_save() == told
    now = 0.0
    checker = TimeoutChecker("00:00:01:40", fit_last_save_time=True, clock=lambda: now)
    checker.start_iterations()
    now = 25.0
    checker.mark_iteration()
    now = 45.0
    assert not checker.check_save()
    checker.note_save(30.0)
    checker.note_save(2.0)
    assert checker.check_save(), "one more iteration of 25 s and a checkpoint of 30 s would just fit"
    assert not TimeoutChecker(None, clock=lambda: 1e12).check_save()

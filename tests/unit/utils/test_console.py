import io
import json
import logging
import shutil

import pytest

from nemo_rl.utils.console import RunConsole, alarms, summary_line
from tests.conversations import answered
from tests.tables import named

TRAIN = {"reward": 0.5, "loss": -0.0125, "grad_norm": 1.5, "token_mult_prob_error": 1.0000012}
TIMES = {"total_step_time": 4.0, "refit": 0.25, "rollout": 3.0, "rollout/env": 1.0, "valid_tokens_per_sec_per_gpu": 9e4}
METRICS = {f"train/{name}": value for name, value in TRAIN.items()} | {"performance/tokens_per_sec": 12345.6}
METRICS |= {f"timing/train/{name}": value for name, value in TIMES.items()}


def test_without_a_terminal_a_step_is_one_plain_line():
    file, now = io.StringIO(), 0.0
    with RunConsole(num_steps=10, file=file, clock=lambda: now) as console:
        now = 60.0
        with console.phase("rollout"):
            pass
        console.finish_step(5, METRICS)
        console.info("saved [bold]step_5[/bold]")
    assert file.getvalue().splitlines() == [
        "step 5/10  reward 0.5000  loss -0.01250  grad norm 1.5000  token_mult_prob_error 1.0000012  12,346 tok/s  "
        "4.0 s (rollout 3.0, refit 0.2)  5:00 left",
        "saved [bold]step_5[/bold]",
    ]


def test_on_a_terminal_the_live_line_shows_phase_step_speed_and_time_left():
    file, now = io.StringIO(), 0.0
    with RunConsole(num_steps=10, file=file, force_terminal=True, clock=lambda: now) as console:
        now = 7.0
        console.finish_step(1, METRICS)
        with console.phase("train"), console.phase("backward"):
            console._progress.refresh()
    shown = file.getvalue()
    assert all(text in shown for text in ("step 1/10", "train > backward", "12,346 tok/s", "1:03 left", "\x1b["))


def test_the_seconds_of_a_step_are_those_of_its_phases():
    times = {"total_step_time": 0.7, "generation": 0.4, "policy_training": 0.3, "validation": 0.2, "checkpointing": 1.0}
    line = summary_line({f"timing/train/{name}": seconds for name, seconds in times.items()})
    assert line == "0.7 s (generation 0.4, policy_training 0.3), then validation 0.2, checkpointing 1.0"
    assert summary_line({"timing/train/validation": 0.2}) == "seconds (validation 0.2)"


STALE = {"train/token_mult_prob_error": 1.2, "train/weight_version_lag/max": 2.0}


def test_samples_of_older_weights_raise_no_alarm():
    assert alarms(STALE, 1.05) == [], "samples of older weights disagree by design"
    assert alarms({"train/token_mult_prob_error": 1.06}, None) == [], "logger.alarms.disagreement is null"
    assert summary_line(STALE) == "token_mult_prob_error 1.2000000 (weights up to 2 updates old)"


@named(
    "metrics, text",
    {
        "disagreement of this version": (
            {"train/token_mult_prob_error": 1.06},
            "token_mult_prob_error is 1.0600, above 1.05",
        ),
        "disagreement without lag": (
            {**STALE, "train/weight_version_lag/max": 0.0},
            "token_mult_prob_error is 1.2000, above 1.05",
        ),
        "disagreement is inf": ({**STALE, "train/token_mult_prob_error": float("inf")}, "token_mult_prob_error is inf"),
        "disagreement is nan": ({"train/token_mult_prob_error": float("nan")}, "token_mult_prob_error is nan"),
        "loss is nan": ({"train/loss": float("nan")}, "train/loss is nan"),
        "no mixed group": ({"train/baseline_reward/pct_mixed": 0.0}, "no gradient"),
        "failed episodes": ({"train/num_failed_samples": 2.0}, "2 episodes failed"),
        "skipped steps": ({"train/num_skipped_steps": 1}, "1 optimizer steps were skipped"),
    },
)
def test_an_alarm_is_a_line_of_the_console(metrics, text):
    (alarm,) = alarms(metrics, 1.05)
    assert text in alarm
    file = io.StringIO()
    RunConsole(num_steps=2, file=file).finish_step(1, metrics, 1.05)
    assert file.getvalue().splitlines()[1] == f"WARNING {alarm}"


def test_samples_show_roles_and_reward_and_cannot_drive_the_terminal():
    logs = [answered("[red]4\x1b[2J\x07", "2+2?"), answered("6", "3+3?")]
    plain, live = io.StringIO(), io.StringIO()
    for file in (plain, live):
        console = RunConsole(num_steps=1, file=file, force_terminal=file is live)
        console.show_samples(logs, [1.0, 0.0], title="validation at step 5")
    assert "validation at step 5, sample 1, reward 1.0000" in plain.getvalue()
    assert "user: 2+2?\nassistant: [red]4\\x1b[2J\\x07" in plain.getvalue()
    assert "\x1b[2J" not in live.getvalue() and "3+3" in live.getvalue()


def test_log_records_go_to_the_console(monkeypatch):
    file, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    RunConsole(num_steps=1, file=file).configure_logging()
    logging.getLogger("nemo_rl.x").warning("step_%d is refused: %s", 3, "\x1b[2J")
    assert file.getvalue().endswith("WARNING nemo_rl.x: step_3 is refused: \\x1b[2J\n")


def test_events_are_kept_in_the_folder_of_the_run(tmp_path):
    console = RunConsole(num_steps=3, file=io.StringIO(), force_terminal=False)
    console.info("before there is a folder")
    console.keep_events(tmp_path)
    console.info("resumed")
    console.finish_step(1, {"train/num_failed_samples": 2.0})
    logging.getLogger("a.module").warning("the engine is %s", "restarted")
    broken = logging.LogRecord("a.module", logging.WARNING, "", 1, "%d of %d", ("one",), None)
    logging.getLogger().handlers[-1].handle(broken)  # alone: pytest's handler raises the error of the library
    console.error("the disk is full\nfree some space")
    assert console.end(1) == 1
    console.info("after the end")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["kind"], event["text"]) for event in events] == [
        (1, "info", "resumed"),
        (1, "warning", "2 episodes failed and are left out of the baseline and the loss"),
        (2, "log", "a.module: the engine is restarted"),
        (2, "log", "a.module: %d of %d"),
        (2, "error", "the disk is full\nfree some space"),
        (2, "end", ""),
    ]
    assert events[-1]["status"] == 1 and events[0]["time"] <= events[-1]["time"]


def test_events_go_on_in_a_folder_that_was_deleted_and_made_again(tmp_path):
    console = RunConsole(num_steps=3, file=io.StringIO(), force_terminal=False)
    folder = tmp_path / "run"
    for text in ("first", "lost", "last"):
        if text == "lost":
            shutil.rmtree(folder)
        else:
            folder.mkdir()
        console.keep_events(folder) if text == "first" else None
        console.info(text)
    console.end(0)
    assert [json.loads(line)["text"] for line in (folder / "events.jsonl").read_text().splitlines()] == ["last", ""]


def test_an_error_is_told_with_its_step_and_phase():
    console = RunConsole(num_steps=4, file=io.StringIO())
    early, late, other = ValueError("a"), ValueError("b"), ValueError("c")
    assert console.where(early) == "start"
    with console:
        console.resume(2)
        assert console.where(early) == "step 3"
        for error in (early, late):
            with pytest.raises(ValueError), console.phase("validation"), console.phase("generation"):
                raise error
        assert console.where(late) == "step 3, validation > generation"
        assert console.where(other) == "step 3, after validation"
        console.finish_step(4, {})
        assert console.where(other) == "step 4, after validation", "of 4"

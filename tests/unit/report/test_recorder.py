"""The files that a run writes for its report."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.report.page import write_data
from nemo_rl.report.recorder import RunRecorder, chosen_rows, machine
from nemo_rl.report.run_files import Run, status_of
from nemo_rl.types import BatchPlan, PlannedSample, RankPlan, SampleStatus
from nemo_rl.utils.config import ReportConfig
from nemo_rl.utils.console import RunConsole
from tests.fakes import handle, sample_meta
from tests.unit.report.runs import append, write_run


def planned(group: int, index: int, *, num_rows: int = 1, advantage: float = 0.0, mask: float = 1.0) -> PlannedSample:
    return PlannedSample(group=group, index=index, lengths=(10,) * num_rows, advantage=advantage, mask=mask)


def recorder(folder: Path) -> tuple[Any, io.StringIO]:
    text = io.StringIO()
    return RunRecorder(ReportConfig(), folder, RunConsole(num_steps=3, file=text, force_terminal=False)), text


class FullDisk:
    """A policy whose workers cannot write samples."""

    num_writes = 0

    def keep_samples(self, folder: Path, max_tokens: int) -> None:
        pass

    def write_samples(self, step: int) -> None:
        self.num_writes += 1

    def samples_written(self) -> list[str]:
        return ["no space left"] * self.num_writes


def test_the_outcome_of_every_group_and_the_times_of_the_phases_are_written(tmp_path):
    samples = [sample_meta("g/0", 1.0), sample_meta("g/1", 0.0, status=SampleStatus.FAILED), sample_meta("g/2", 0.25)]
    group, dropped = handle(*samples), handle(sample_meta("h/0", 1.0), name="h", prompt="p:2")
    # Then a branch of a sample, and a copy of a row that fills up the step.
    batch = [planned(0, 2, advantage=-0.5), planned(0, 0, advantage=1.5), planned(0, 3), planned(0, -4, mask=0.0)]
    own, _ = recorder(tmp_path)
    own.groups(4, [dropped, group], [group], BatchPlan(groups=[None], ranks=[RankPlan(train=[[batch]], logprobs=[])]))
    line = json.loads((tmp_path / "groups.jsonl").read_text())
    assert line["step"] == 4 and line["groups"][0]["advantages"] == []
    numbers = {"rewards": [1.0, None, 0.25], "lengths": [6, 0, 6], "turns": [1, 0, 1], "advantages": [1.5, 0.0, -0.5]}
    assert line["groups"][1] == {"id": "g", "prompt": "p:1", "task": "math", "status": "cfc", **numbers}
    with own.phase("generation"), own.phase("inner"):
        pass
    own.finish(1, FullDisk())
    inner, outer = json.loads((tmp_path / "timeline.jsonl").read_text().splitlines()[0])["phases"]
    assert (inner[0], outer[0]) == ("inner", "generation")
    assert outer[1] <= inner[1] <= inner[2] <= outer[2]


@pytest.mark.parametrize("limit, num_keys", [(0, 0), (1, 2), (3, 2), (4, 4)])
def test_a_pair_is_reported_whole(limit, num_keys):
    assert len(chosen_rows([planned(0, 0, num_rows=2), planned(1, 0, num_rows=2)], None, limit)) == num_keys


def test_the_best_and_the_worst_come_first_and_a_higher_limit_keeps_all():
    rewards = ([0.0, 1.0, 0.5, 0.25], [1.0, 0.0, 0.75, 0.5], [0.5, 0.5, 0.5, 0.5], [0.0, 0.25, 0.5, 1.0])
    groups = [
        handle(*(sample_meta(f"{g}/{i}", reward) for i, reward in enumerate(of_group)))
        for g, of_group in enumerate(rewards)
    ]
    rows = [planned(g, i) for g in range(4) for i in range(4)]
    assert chosen_rows(rows, groups, 4) == [(0, 1), (0, 0), (2, 0), (2, 3)]
    assert chosen_rows(rows, groups, 10)[8:] == [(0, 2), (0, 3)]
    assert len(set(chosen_rows(rows, groups, 64))) == 16


@pytest.mark.parametrize("later", [["finish"], ["write_samples"] * 2])
def test_samples_are_written_behind_the_step_and_a_problem_is_said_once(tmp_path, later):
    own, text = recorder(tmp_path)
    policy = FullDisk()
    own.write_samples(1, policy)
    assert policy.num_writes == 1 and text.getvalue() == ""
    for step, name in enumerate(later, 2):
        getattr(own, name)(step, policy)
    assert policy.num_writes == 1
    assert text.getvalue().count("no space left") == 1


def test_a_file_that_cannot_be_written_is_given_up_with_one_warning(tmp_path):
    own, text = recorder(tmp_path)
    (tmp_path / "groups.jsonl").mkdir()
    for _ in range(3):
        own.groups(1, [], [], BatchPlan(groups=[], ranks=[]))
    assert text.getvalue().count("the report goes without groups.jsonl") == 1


def test_a_page_is_made_before_the_first_step_and_after_it(tmp_path):
    """A run that is killed in its first minute has a report."""
    own, text = recorder(tmp_path)
    own.open({"grpo": {"max_num_steps": 3}})
    for step, said in ((0, "starting for"), (1, "running, last line")):
        if step:
            own.start(3, FullDisk())
            append(tmp_path / "metrics.jsonl", step=step, loss=1.0)
            own.finish_step(step)
        assert own._page.wait(60) == 0 and said in (tmp_path / "report.html").read_text()
    assert Run(tmp_path).facts["pid"] == os.getpid() and Run(tmp_path).num_steps == 3 and text.getvalue() == ""


def test_the_last_page_is_made_and_a_page_that_fails_is_said(tmp_path):
    run = write_run(tmp_path / "exp_000")
    own, text = recorder(run)
    own.close()
    assert "report" in (run / "report.html").read_text() and text.getvalue() == ""
    assert 0.0 < float((run / "report.log").read_text()) < 60.0, "the processor's seconds, which keep pages rare"
    (run / "config.yaml").write_text("a: [")  # cannot be read
    own, text = recorder(run)
    own.close()
    assert "the report goes without report.html" in text.getvalue()


def test_groups_are_summed_by_task_and_of_a_step_that_ran_twice_the_later_counts(tmp_path):
    group = {"id": "g", "prompt": "p", "task": "a", "lengths": [2, 4], "status": "tf"}
    for step, rewards in ((1, [9.0, 9.0]), (2, [1.0, None]), (1, [-1.0, -3.0])):
        append(tmp_path / "groups.jsonl", step=step, groups=[{**group, "rewards": rewards}])
    found = write_data(tmp_path, tmp_path, "")
    (row,) = found["tasks"]
    shares = {"dead": 0.5, "truncated": 0.5, "failed": 0.5, "tokens": 3.0}
    assert row == {"task": "a", "groups": 2, "samples": 4, "first": -2.0, "last": 1.0, **shares}
    assert found["prompts"] == [{"prompt": "p", "groups": 2, "dead": 1, "reward": -0.5}]


@pytest.mark.parametrize(
    ("facts", "end", "age", "expected", "before_a_step"),
    [
        ({}, None, 5.0, "unknown", "starting"),
        ({}, None, 5000.0, "unknown", "unknown"),
        ({"host": "elsewhere"}, None, 5.0, "running", "starting"),
        ({"host": "elsewhere"}, None, 5000.0, "unknown", "unknown"),
        (machine(), None, 5000.0, "running", "starting"),
        ({**machine(), "pid_started": "1"}, None, 5.0, "dead", "dead"),
        ({**machine(), "pid_started": "1"}, 0, 5.0, "finished", "finished"),
        ({"host": "elsewhere"}, 1, 5.0, "failed", "failed"),
        ({"host": "elsewhere"}, 130, 5.0, "interrupted", "interrupted"),
        ({"host": "elsewhere"}, 143, 5.0, "interrupted", "interrupted"),
    ],
)
def test_whether_a_run_goes_on(tmp_path, facts, end, age, expected, before_a_step):
    folder = write_run(tmp_path / "exp_000")
    if facts:
        (folder / "run.json").write_text(json.dumps(facts))
    if end is not None:
        append(folder / "events.jsonl", time=1.0, step=3, kind="end", text="", status=end)
    run = Run(folder)
    assert status_of(run, now=run.written_at + age).kind == expected
    assert status_of(replace(run, rows={}), now=run.written_at + age).kind == before_a_step

"""What people see of recorded rollouts."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from examples.show_rollouts import main
from nemo_rl.rollouts.show_records import token_text
from tests.unit.rollouts.recorded import record, sample


def shown(folder: Path, *arguments: str, status: int = 0) -> str:
    file = io.StringIO()
    assert main([str(folder), *arguments], Console(file=file, width=200)) == status
    return file.getvalue()


def test_the_table_has_a_line_per_group(tmp_path):
    record(tmp_path, 1, 2)
    lines = [line for line in shown(tmp_path, "--list").splitlines() if "/d:" in line]
    assert len(lines) == 4
    cells = re.split(r"\s{2,}", lines[1].strip())
    assert cells == ["1", "1/1/d:1 (not trained)", "chat", "3", "0.000", "0.000", "2", "3", "1.0", "1 failed"]
    assert "(not trained)" not in lines[0]


def test_conditions_leave_groups_out(tmp_path):
    record(tmp_path, 1, 2)
    failed = shown(tmp_path, "--list", "--filter", "status=failed")
    assert "1/1/d:1" in failed and "2/1/d:1" in failed and "d:0" not in failed
    both = shown(tmp_path, "--list", "--filter", "task=math", "--step", "2")
    assert "2/0/d:0" in both and "1/0/d:0" not in both and "d:1" not in both


def test_a_group_shows_what_was_said_and_what_came_of_it(tmp_path):
    record(tmp_path, 1)
    text = shown(tmp_path, "--group", "1/0/d:0")
    for part in (
        "step 1, group 1/0/d:0, task math",
        "mean reward 0.5000 of 2 samples",
        "sample 0: completed, reward 1.0000, advantage +0.5000, 1 of 3 tokens sampled, weights 0",
        "user: 2+2?",
        "assistant: answer of 1/0/d:0/1",
        "2 tokens, stopped by stop, reward 0.0000, 1.00 s sampling, 0.25 s environment, weights 0",
    ):
        assert part in text, part
    one = shown(tmp_path, "--group", "1/0/d:0", "--sample", "1")
    assert "answer of 1/0/d:0/1" in one and "answer of 1/0/d:0/0" not in one


def test_the_worst_group_has_the_smallest_mean_reward_and_failures_are_no_zeros(tmp_path):
    record(tmp_path, 1)
    text = shown(tmp_path, "--worst")
    assert "group 1/1/d:1" in text and "of 2 samples" in text
    assert "sample 1: failed, no reward" in text and "the environment was out" in text and "advantage" not in text


@pytest.mark.parametrize(
    "arguments",
    [("--group", "nobody"), ("--filter", "weather=bad"), ("--sample", "9"), ("--filter", "status=truncated")],
)
def test_what_is_not_there_is_said(tmp_path, arguments, capsys):
    record(tmp_path, 1)
    assert shown(tmp_path, *arguments, status=2) == ""
    assert "error: " in capsys.readouterr().err
    shown(tmp_path / "elsewhere", status=2)


def test_model_output_does_not_drive_the_terminal(tmp_path):
    noisy = sample("s", 1.0)
    assert "\x1b" not in token_text(noisy, lambda ids: "\x1b[31m").plain

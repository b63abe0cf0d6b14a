"""Recorded steps on disk: whole or not there, read back as they were written, and shown to people."""

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.show_rollouts import main
from nemo_rl.rollouts import records
from nemo_rl.rollouts.show_records import token_text
from nemo_rl.types import RolloutGroup, Sample, SampleStatus, StopReason, TurnMeta
from tests import fakes
from tests.conversations import answered


def sample(sample_id: str, reward: float | None, *, generated: int = 3) -> Sample:
    """Two prompt tokens, then sampled ones that get less likely. Without a reward it failed."""
    status = SampleStatus.FAILED if reward is None else SampleStatus.COMPLETED
    meta = fakes.sample(reward or 0.0, status, prompt=2, generated=generated, sample_id=sample_id)
    meta.failure = "the environment was out" if reward is None else None
    of_turn = {"num_generated_tokens": generated, "num_env_tokens": 0, "reward": meta.reward, "weight_version": 0}
    meta.turns = [TurnMeta(**of_turn, stop_reason=StopReason.STOP, generation_s=1.0, env_s=0.25)]
    return Sample(
        meta=meta,
        token_ids=np.arange(meta.length, dtype=np.int64) + 65,
        token_mask=np.array([False, False] + [True] * generated),
        generation_logprobs=np.array([0.0, 0.0] + [0.0 - 2.0 * n for n in range(generated)], dtype=np.float32),
        messages=answered(f"answer of {sample_id}", asked="2+2?"),
        metrics={} if reward is None else {"score": reward},
    )


def group(group_id: str, *rewards: float | None) -> RolloutGroup:
    samples = [sample(f"{group_id}/{i}", reward, generated=i + 1) for i, reward in enumerate(rewards)]
    return RolloutGroup(group_id=group_id, prompt_id=group_id.rpartition("/")[2], samples=samples)


def index(step: int, groups: list[RolloutGroup]) -> records.StepIndex:
    return records.StepIndex(
        step=step, weight_version=step - 1, seed=42, config_digest="digest", groups_per_batch=2,
        identity={"policy.model": {"name": "tiny"}},
        group_ids=[group.group_id for group in groups],
        trained={group.group_id: [0.5] * len(group.samples) for group in groups[:1]},
        environment_metrics={"math/correct": 0.5, "math/of_nothing": float("nan")},
    )  # fmt: skip


def record(root: Path, *steps: int) -> None:
    """Each step has two groups; the first one was trained."""
    for step in steps:
        groups = [group(f"{step}/0/d:0", 1.0, 0.0), group(f"{step}/1/d:1", 0.0, None, 0.0)]
        records.write_step(root, index(step, groups), groups, ["math", "chat"], None)


def assert_same(wanted: list[RolloutGroup], found: list[RolloutGroup]) -> None:
    for want, got in zip(wanted, found, strict=True):
        for a, b in zip(want.rows, got.rows, strict=True):
            assert a.meta == b.meta and a.messages == b.messages and a.metrics == b.metrics
            for name in ("token_ids", "token_mask", "generation_logprobs", "routed_experts"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


def test_what_was_written_comes_back(tmp_path):
    groups = [group("0/1/d:7", 1.0, None), group("0/0/d:3", 0.25)]
    first, branch = groups[0].samples[0], sample("0/1/d:7/0", 1.0, generated=4)
    branch.meta.own_reward, branch.metrics = 0.25, {}
    first.branches, first.meta.branches = [branch], [branch.meta]
    num_bytes = records.write_step(tmp_path, index(3, groups), groups, ["math", "chat"])
    files = [path for path in records.step_folder(tmp_path, 3).iterdir() if "mani" not in path.name]
    assert num_bytes == sum(path.stat().st_size for path in files)
    got, tasks = records.read_groups(records.step_folder(tmp_path, 3))
    assert tasks == ["math", "chat"] and [g.group_id for g in got] == ["0/1/d:7", "0/0/d:3"]
    assert_same(groups, got)
    assert repr(records.read_index(tmp_path, 3)) == repr(index(3, groups)), "as text, because a metric is nan"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_come_back_for_the_tokens_they_are_of(tmp_path, dtype):
    groups = [group("0/1/d:7", 1.0, None, 0.5), group("0/0/d:3", 0.25)]
    for n, made in enumerate((groups[0].samples[0], groups[0].samples[2], groups[1].samples[0])):
        shape = (made.meta.length - 1 - n % 2, 3, 2)  # the last turn of one has none
        made.routed_experts = np.random.default_rng(n).integers(0, 200, shape).astype(dtype)
        made.meta.routed_experts_bytes = made.routed_experts.nbytes
    records.write_groups(tmp_path, groups, ["math", "chat"])
    assert_same(groups, records.read_groups(tmp_path)[0])
    lines = (tmp_path / "groups.jsonl").read_text()
    (tmp_path / "groups.jsonl").write_text(re.sub(r'(?<="routed_experts_bytes": )\d+', "0", lines))
    with pytest.raises(ValueError, match="describes 0 experts of tokens"):
        records.read_groups(tmp_path)


def test_what_a_killed_process_left_is_not_read_and_written_over_and_a_damaged_step_is_refused(tmp_path):
    record(tmp_path, 1)
    (tmp_path / "tmp_step_000002").mkdir()
    (tmp_path / "tmp_step_000002" / "groups.jsonl").write_text("half of")
    assert records.recorded_steps(tmp_path) == [1]
    with pytest.raises(FileNotFoundError, match="holds no step 2; it holds: 1"):
        records.read_index(tmp_path, 2)
    record(tmp_path, 2)
    assert records.recorded_steps(tmp_path) == [1, 2] and not (tmp_path / "tmp_step_000002").exists()
    tokens = records.step_folder(tmp_path, 1) / "tokens.safetensors"
    *data, last = tokens.read_bytes()
    tokens.write_bytes(bytes([*data, last ^ 1]))
    with pytest.raises(ValueError, match=r"tokens\.safetensors is not what was saved"):
        records.read_index(tmp_path, 1)


def test_later_steps_of_an_earlier_run_are_put_aside(tmp_path):
    record(tmp_path, 1, 2, 3)
    assert records.put_aside(tmp_path, 3) is None
    first = tmp_path / "superseded_001"
    assert records.put_aside(tmp_path, 1) == first
    assert records.recorded_steps(first) == [2, 3] and records.recorded_steps(tmp_path) == [1]
    record(tmp_path, 2)
    assert records.put_aside(tmp_path, 0) == tmp_path / "superseded_002" and records.recorded_steps(tmp_path) == []
    shutil.rmtree(first)
    record(tmp_path, 1)
    assert records.put_aside(tmp_path, 0) == tmp_path / "superseded_003", "although a folder before the last is gone"


def shown(folder: Path, *arguments: str, status: int = 0) -> str:
    file = io.StringIO()
    assert main([str(folder), *arguments], Console(file=file, width=200)) == status
    return file.getvalue()


def test_groups_are_a_table_and_one_shows_what_was_said_and_what_came_of_it(tmp_path):
    record(tmp_path, 1, 2)
    lines = [line for line in shown(tmp_path, "--list").splitlines() if "/d:" in line]
    assert len(lines) == 4
    cells = re.split(r"\s{2,}", lines[1].strip())
    assert cells == ["1", "1/1/d:1 (not trained)", "chat", "3", "0.000", "0.000", "2", "3", "1.0", "1 failed"]
    assert "(not trained)" not in lines[0]
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
    worst = shown(tmp_path, "--worst")
    assert "group 1/1/d:1" in worst and "of 2 samples" in worst, "the smallest mean reward, and failures are no zeros"
    assert "sample 1: failed, no reward" in worst and "the environment was out" in worst and "advantage" not in worst
    noisy = token_text(sample("s", 1.0), lambda ids: "\x1b[31m")
    assert "\x1b" not in noisy.plain, "what a model says does not drive the terminal"


def test_what_is_not_there_is_said(tmp_path, capsys):
    record(tmp_path, 1)
    for arguments, error in {
        "--group nobody": "",
        "--filter weather=bad": "",
        "--sample 9": "",
        "--filter status=truncated": "",
        "--tokens --tokenizer ./none": "",
        "--tokens --tokenizer tiny:none": "there is no model 'tiny:none'",
    }.items():
        assert shown(tmp_path, *arguments.split(), status=2) == ""
        assert f"error: {error}" in capsys.readouterr().err
    shown(tmp_path / "elsewhere", status=2)

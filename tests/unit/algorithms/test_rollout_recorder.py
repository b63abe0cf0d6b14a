"""The record of a run's rollouts, and training again from it; fakes in place of workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from nemo_rl.algorithms.trainers.rollout_recorder import check_record
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.rollouts.records import StepIndex, read_groups, read_index, recorded_steps, step_folder, write_step
from nemo_rl.rollouts.replay import RecordedRollouts
from nemo_rl.types import GroupHandle, RolloutGroup, Sample
from tests.fakes import FakeRollouts, handle
from tests.unit.algorithms.fake_runs import GRPORun, alternate, small
from tests.unit.config.run_configs import build

IDENTITY = {
    "policy.model": {"name": "tiny", "config_hash": "1"},
    "policy.tokenizer": {"vocabulary_hash": "2", "chat_template_hash": "3"},
    "data.train": "of no matter",
}


class Recording(FakeRollouts):
    """Writes the step that was begun when it is waited for, as the rollout worker does meanwhile."""

    begun: tuple[Any, ...] | None = None

    def start_record(self, *arguments: Any) -> None:
        assert self.begun is None, "one step at a time"
        self.begun = arguments

    def finish_records(self) -> int:
        if self.begun is None:
            return 0
        (root, index, keep, handles), self.begun = self.begun, None
        return write_step(root, index, [whole(handle) for handle in handles], ["t"] * len(handles), keep)


def whole(handle: GroupHandle) -> RolloutGroup:
    samples = []
    for meta in handle.samples:
        mask = np.arange(meta.length) >= meta.num_prompt_tokens
        tokens, logprobs = np.arange(meta.length), np.zeros(meta.length, np.float32)
        samples.append(Sample(meta=meta, token_ids=tokens, token_mask=mask, generation_logprobs=logprobs))
    return RolloutGroup(group_id=handle.group_id, prompt_id=handle.prompt_id, samples=samples)


class Replaying(RecordedRollouts):
    """Reads in this process."""

    def __init__(self, root: Path) -> None:
        self.root, self.steps = root, recorded_steps(root)
        self._index: StepIndex | None = None
        self._batches: list[list[GroupHandle]] = []
        self.generation_use = FakeRollouts(None, []).generation_use  # type: ignore[method-assign]

    @property
    def controller_tensor_bytes(self) -> int:
        return 0

    def load(self, folder: Path) -> list[GroupHandle]:
        groups, *_ = read_groups(folder)
        return [handle(*(s.meta for s in g.samples), name=g.group_id, prompt=g.prompt_id) for g in groups]


class Run(GRPORun):
    """A GRPO in `folder`, from `rollouts` or from its own."""

    def __init__(self, folder: Path, *overrides: str, reward: Any = alternate, rollouts: Any = None) -> None:
        super().__init__(folder, *overrides, rollouts=rollouts or Recording(reward, []), identity=IDENTITY)


def recording(root: Path) -> tuple[str, ...]:
    return ("grpo.rollout_record.enabled=true", f"grpo.rollout_record.save_dir={root}")


def trained(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows]


def test_every_step_is_recorded_with_what_was_trained_in_a_folder_of_this_run(tmp_path):
    run = Run(tmp_path, *recording(tmp_path / "record"))
    rows = run.go()
    assert recorded_steps(tmp_path / "record") == [1, 2, 3]
    index = read_index(tmp_path / "record", 2)
    assert index.weight_version == 1 and index.seed == 42 and index.groups_per_batch == 2
    assert index.group_ids == list(index.trained) and all(name.startswith("2/") for name in index.group_ids)
    assert [sorted(of) for of in index.trained.values()] == [pytest.approx([-1.41421, 1.41421], abs=1e-4)] * 2
    assert index.environment_metrics == {"math/num_groups": 2.0}
    assert "the first step" in run.text.getvalue() and "3 steps of rollouts" in run.text.getvalue()
    assert rows[0]["performance/recorded_bytes"] == 0 < rows[1]["performance/recorded_bytes"]
    # A run that goes on replaces what is after its checkpoint.
    for path in (tmp_path / "ckpt").glob("step_3"):
        path.rename(tmp_path / "taken_away")
    again = Run(tmp_path, *recording(tmp_path / "record"))
    again.go()
    assert recorded_steps(tmp_path / "record") == [1, 2, 3]
    assert recorded_steps(tmp_path / "record" / "superseded_001") == [3] and "superseded_001" in again.text.getvalue()
    # Another run is refused.
    other = Run(tmp_path / "two", *recording(tmp_path / "record"), "policy.generation.temperature=0.5")
    with pytest.raises(ValueError, match=r"another run; set grpo\.rollout_record\.save_dir(.|\n)*temperature.*0\.5"):
        other.go()
    assert recorded_steps(tmp_path / "record") == [1, 2, 3]


def test_a_run_that_goes_back_puts_the_steps_that_it_repeats_aside(tmp_path):
    run = Run(tmp_path, *recording(tmp_path / "record"), "grpo.max_num_steps=4")
    deaths = [WorkerDied("gone", worker="policy-0", rank=0, method="train")]

    def die_in_step_4() -> None:
        if run.trainer.state.total_steps == 3 and deaths:
            raise deaths.pop()

    run.policy.on_wait = die_in_step_4
    run.trainer.refit.prepare = lambda: None
    run.go()
    assert recorded_steps(tmp_path / "record") == [1, 2, 3, 4]
    assert recorded_steps(tmp_path / "record" / "superseded_001") == [3], "it was still being written"


def test_a_record_gives_a_run_the_same_steps(tmp_path, caplog):
    caplog.set_level("INFO")
    record = tmp_path / "record"

    def by_name(request: Any, i: int) -> float:
        return float(crc32(f"{request.group_id}/{i}".encode()) % 3)

    want = Run(tmp_path / "one", *recording(record), reward=by_name).go()
    replay = Run(tmp_path / "two", f"grpo.replay_from={record}", "grpo.max_num_steps=4", rollouts=Replaying(record))
    got = replay.go()
    assert trained(got)[:3] == trained(want) and len({row["train/reward"] for row in want}) > 1
    assert f"the record in {record} ends with step 3" in caplog.text


def test_what_cannot_be_replayed_is_refused_with_the_differences(tmp_path):
    record = tmp_path / "record"
    Run(tmp_path, *recording(record)).go()
    keys = (*small(tmp_path, "grpo"), f"grpo.replay_from={record}")
    same = build(*keys)
    check_record(same, IDENTITY)
    other = {**IDENTITY, "policy.model": {"name": "large", "config_hash": "1"}}
    config = build(*keys, "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=8")
    with pytest.raises(ValueError, match="cannot replay") as refusal:
        check_record(config, other)
    names = [line.strip().partition(":")[0] for line in str(refusal.value).splitlines()[1:]]
    assert names == ["policy.model.name", "rollouts.num_generations_per_prompt"]
    step_folder(record, 1).rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="holds steps 2 to 3; a replay needs all from 1 on"):
        check_record(same, IDENTITY)
    with pytest.raises(FileNotFoundError, match="holds no recorded step"):
        check_record(build(*keys, f"grpo.replay_from={tmp_path / 'gone'}"), IDENTITY)
    with pytest.raises(ValueError, match="no engine is started that could answer validation prompts"):
        build(*keys, "grpo.val_period=5")
    with pytest.raises(ValueError, match="nothing is sampled with replay_from"):
        build(*keys, "grpo.rollout_record.enabled=true")

"""Checkpoints in the background, several policies of one run, and early stopping."""

import errno
import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.config.loop import EarlyStoppingConfig, LoopConfig
from nemo_rl.algorithms.interruption import Interruption
from nemo_rl.algorithms.loop import NonFiniteLoss, Trainer, merge_results
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.utils.checkpoint.manager import CheckpointManager, DiskFullError
from nemo_rl.utils.checkpoint.save import StateWrite
from tests.fakes import FakePolicy, checkpoints_in, result, run_tools

NEVER = LoopConfig(val_period=0)


class Position:
    """Data of which one piece is taken per step."""

    taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class FakeTrainer(Trainer):
    """Each of `errors` is raised once, in the step of its number. A validation gives that of `values`."""

    def __init__(
        self, folder: Path, *, num_steps: int = 6, loop: Any = NEVER, policies: Any = (), values: Any = (), **save: Any
    ) -> None:
        self.folder, self.values, self.position = folder, values, Position()
        self.errors: dict[int, BaseException] = {}
        tools, self.text = run_tools(folder, checkpoints_in(folder, **save), num_steps)
        how = {"policies": policies, "data": self.position, "nonfinite_action": "stop"}
        super().__init__(loop, tools, num_steps=num_steps, **how)

    def at_step(self, step: int) -> None:
        """What else happens."""

    def step(self) -> None:
        number = self.state.total_steps + 1
        if number in self.errors:
            raise self.errors.pop(number)
        self.at_step(number)
        self.position.taken += 1

    def validate(self) -> dict[str, float]:
        value = self.values[self.state.total_steps]
        return {} if value is None else {"val_loss": value}

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]


def died(worker: str) -> WorkerDied:
    return WorkerDied(f"{worker} died in train", worker=worker, rank=0, method="train")


# -- checkpoints in the background


class Write:
    """Done when it has been asked `polls` times, or when somebody waits for it."""

    def __init__(self, directory: Path, polls: int, failure: BaseException | None) -> None:
        self.directory, self.polls, self.failure = directory, polls, failure
        (directory / "weights").write_text("begun")

    def is_done(self) -> bool:
        self.polls -= 1
        return self.polls <= 0

    def finish(self) -> None:
        self.polls = 0
        if self.failure is not None:
            raise self.failure
        (self.directory / "weights").write_text("whole")


class CountingTrainer(FakeTrainer):
    """`seen` holds, before each step, the names in the checkpoint directory."""

    def __init__(self, folder: Path, *, polls: int = 2, failure: BaseException | None = None, **how: Any) -> None:
        super().__init__(folder, **{"save_period": 3, "keep_top_k": None, "async_save": True} | how)
        self.polls, self.failure, self.calls, self.seen = polls, failure, [], {}
        self.recovery.replacements = {"policy": lambda: self.calls.append("recover")}

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "c").glob("*"))

    def step(self) -> None:
        self.seen[self.state.total_steps + 1] = self.names()
        super().step()

    def write_state(self, directory: Path) -> StateWrite:
        self.calls.append(f"start {self.state.total_steps}")
        return Write(directory, self.polls, self.failure)

    def read_state(self, directory: Path) -> None:
        self.calls.append(f"read {(directory / 'weights').read_text()} {self.state.total_steps}")

    def sound_steps(self) -> list[str]:
        latest = CheckpointManager(self.tools.checkpointing).latest_sound()
        assert latest is None or (latest / "weights").read_text() == "whole"
        return self.names()


def test_the_controllers_random_generators_continue_where_the_checkpoint_stands(tmp_path):
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    CountingTrainer(tmp_path, num_steps=3).train()
    want = draw()
    assert draw() != want
    CountingTrainer(tmp_path).resume()
    assert draw() == want


def test_steps_go_on_while_a_checkpoint_is_written_and_it_appears_when_it_is_whole(tmp_path):
    trainer = CountingTrainer(tmp_path)

    def wait_for_seal(step: int) -> None:  # it runs in a thread; the next look finds it ready
        if trainer.pending_save is not None and trainer.pending_save.sealing is not None:
            trainer.pending_save.sealing.result()

    trainer.at_step = wait_for_seal
    trainer.train()
    assert trainer.seen[4] == ["tmp_step_3"], "not finished, not visible"
    assert trainer.seen[6] == ["tmp_step_3"], "written after step 5, sealed during step 6"
    assert trainer.calls == ["start 3", "start 6"]
    assert trainer.sound_steps() == ["step_3", "step_6"], "the last one is waited for"
    assert [row["step"] for row in trainer.rows() if "timing/train/checkpointing" in row] == [3, 6]


def test_a_failed_save_ends_the_run_at_the_next_step_boundary_and_says_why(tmp_path):
    CountingTrainer(tmp_path, num_steps=3).train()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    trainer = CountingTrainer(tmp_path, num_steps=20, failure=full, polls=1)
    trainer.resume()
    with pytest.raises(DiskFullError, match=r"no space to save step 6 .*step_3 is untouched"):
        trainer.train()
    assert max(trainer.seen) == 7 and trainer.sound_steps() == ["step_3"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("the loss is not finite"), "step 3 could not be finished: rank 3 could not write"),
        (KeyboardInterrupt(), "given up"),  # without waiting
    ],
)
def test_an_error_of_the_run_is_told_whatever_becomes_of_the_save(tmp_path, error, said):
    trainer = CountingTrainer(tmp_path, polls=100, failure=RuntimeError("rank 3 could not write"))
    trainer.errors = {4: error}
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error and said in trainer.text.getvalue()
    assert trainer.sound_steps() == []


@pytest.mark.parametrize(("polls", "resumed_after"), [(100, 3), (2, 6)])
def test_after_a_worker_died_the_run_goes_on_from_the_last_whole_checkpoint(tmp_path, polls, resumed_after):
    """Step 6 was on its way to the disk: it counts if all of it had been written, and otherwise was never there."""
    CountingTrainer(tmp_path, num_steps=3).train()
    trainer = CountingTrainer(tmp_path, num_steps=8, polls=polls)
    trainer.errors = {8: died("policy-0")}
    trainer.resume()
    trainer.train()
    assert trainer.calls[:4] == ["read whole 3", "start 6", "recover", f"read whole {resumed_after}"]
    assert trainer.sound_steps() == ["step_3", "step_6", "step_8"]


@pytest.mark.parametrize(("asked", "is_said"), [(3, True), (1, False), (1_000_000, False)])
def test_a_run_says_at_its_start_that_its_data_ends_before_the_steps_that_were_asked_for(tmp_path, asked, is_said):
    loop = LoopConfig(val_period=0, max_num_steps=asked, max_num_epochs=2)
    trainer = FakeTrainer(tmp_path, num_steps=1, loop=loop)
    trainer.train()
    said = "max_num_epochs=2 ends the run after step 1, where the data ends, before max_num_steps=3"
    assert (said in trainer.text.getvalue()) is is_said


# -- several policies


class TwoPolicies(FakeTrainer):
    """A policy and a critic, which has the `results`."""

    def __init__(self, folder: Path, *, num_steps: int = 4, results: Any = None, **how: Any) -> None:
        self.calls: list[str] = []
        critic = FakePolicy(results or [result()], self.calls, name_prefix="value")
        policies = [FakePolicy(calls=self.calls), critic]
        super().__init__(folder, num_steps=num_steps, policies=policies, save_period=2, **how)

    def at_step(self, step: int) -> None:
        for policy in self.policies:
            self.take_steps(policy, NLLLoss(), Logprobs(filtered=False))


@pytest.mark.parametrize("is_async", [False, True])
def test_all_policies_and_the_place_in_the_data_are_saved_and_restored(tmp_path, is_async):
    first = TwoPolicies(tmp_path, num_steps=2, async_save=is_async)
    first.train()
    assert first.calls == [*["train", "value.train"] * 2, "save", "value.save"]
    again = TwoPolicies(tmp_path, async_save=is_async)
    assert again.resume()
    assert again.calls == ["load_checkpoint", "value.load_checkpoint"]
    assert again.position.taken == 2 and again.state.total_steps == 2
    norms = {name for name in first.rows()[0] if name.endswith("/grad_norm")}
    assert norms == {"train/grad_norm", "train/value/grad_norm"}


@pytest.mark.parametrize(("worker", "restarted"), [("policy-0", "restart"), ("value-1", "value.restart")])
def test_only_the_policy_that_died_is_replaced_and_all_go_back_to_the_checkpoint(tmp_path, worker, restarted):
    trainer = TwoPolicies(tmp_path)
    trainer.errors = {3: died(worker)}
    trainer.train()
    saved = [*["train", "value.train"] * 2, "save", "value.save"]
    assert trainer.calls == [*saved, restarted, "load_checkpoint", "value.load_checkpoint", *saved]
    assert trainer.position.taken == 4


def test_a_loss_that_is_not_finite_is_written_down_under_its_policys_name(tmp_path):
    trainer = TwoPolicies(tmp_path, results=[result(), result(math.nan, math.nan, 1, ("d:3", "d:1"))])
    with pytest.raises(NonFiniteLoss, match=r"loss nan.*value_nonfinite_step_2\.jsonl.*nonfinite_action=skip"):
        trainer.train()
    records = (tmp_path / "run" / "value_nonfinite_step_2.jsonl").read_text().splitlines()
    assert [json.loads(record)["sample_id"] for record in records] == ["d:1", "d:3"]


def test_passes_are_merged_into_one_result():
    found = merge_results([result(1.0, 2.0), result(3.0, 4.0, 1, ("b", "a")), result(5.0, 6.0, 1, ("a",))])
    assert (found.losses, found.grad_norms) == ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0])
    assert found.metrics == {"loss": 3.0, "global_valid_toks": 72.0}
    assert found.num_skipped_steps == 2 and found.nonfinite_samples == ["a", "b"]


# -- early stopping


def stopping(folder: Path, values: list[float], *, val_at_start: bool = False, **rule: object) -> FakeTrainer:
    """A run that validates after every step; the value after step n is number n of `values`."""
    early = EarlyStoppingConfig.model_validate({"metric_name": "val:val_loss"} | rule)
    loop = LoopConfig(val_period=1, val_at_start=val_at_start, early_stopping=early)
    how: Any = {"policies": [FakePolicy()], "num_steps": len(values) - 1, "save_period": 100}
    return FakeTrainer(folder, loop=loop, values=values, **how)


@pytest.mark.parametrize(
    ("values", "rule", "taken"),
    [
        ([3, 4, 5, 2, 7, 8, 9, 1], {"patience": 3}, 7),
        ([5, 4.9, 4.8, 4.7, 4.6], {"patience": 2, "min_delta": 0.5}, 3),
        ([5, 4.7, 4.4, 4.3, 4.2], {"patience": 2, "min_delta": 0.5}, 5),
        ([1, 2, 3, 2, 2], {"patience": 2, "higher_is_better": True}, 5),
        ([3, 2, 1, 4], {"patience": 2, "higher_is_better": True}, 3),
        ([5, 4, 3, 2], {"patience": None, "threshold": 4}, 2),
        ([1, 2, 3, 2], {"patience": None, "threshold": 3, "higher_is_better": True}, 3),
        ([5, 6, 7, 8, 9, 10], {"patience": None, "threshold": 1}, 6),
        ([5, 6, 7, 1], {"patience": 2, "threshold": 6}, 1),
        ([math.nan, math.nan, 1, 2], {"patience": 2}, 2),
        ([math.nan, 3, 2, 1], {"patience": 2}, 4),
        ([3, None, 2, None, None, 1], {"patience": 2}, 5),
        ([9, 9, 9, 9], {"metric_name": None, "patience": 1}, 4),
    ],
)
def test_steps_until_the_run_ends(tmp_path, values, rule, taken):
    trainer = stopping(tmp_path, [math.inf, *values], **rule)
    trainer.train()
    assert trainer.state.total_steps == taken
    assert ("early stopping: " in trainer.text.getvalue()) == trainer.state.stopped_early


def test_a_metric_that_no_validation_has_ends_the_run_with_those_that_there_are(tmp_path):
    with pytest.raises(ValueError, match=r'metric_name is "val:val_los" and no .*; there are: validation/val_loss'):
        stopping(tmp_path, [1.0, 2.0], metric_name="val:val_los").train()


def test_a_stopped_run_leaves_its_checkpoint_and_stays_stopped(tmp_path):
    for rule, taken in (({"patience": 2}, 3), ({"patience": 2}, 3), ({"metric_name": None}, 6)):
        trainer = stopping(tmp_path, [math.inf, 3.0, 4, 5, 6, 7, 8], **rule)
        is_resumed = trainer.resume()
        trainer.train()
        assert trainer.state.total_steps == taken
        stays = "early_stopping.metric_name=null continues it" in trainer.text.getvalue()
        assert stays == (is_resumed and taken == 3)
    # And one that has reached its goal before the first step is not trained.
    trainer = stopping(tmp_path / "good", [1.0, 2.0], val_at_start=True, threshold=1.5)
    trainer.train()
    assert trainer.state.total_steps == 0
    assert "early stopping: val:val_loss has reached its goal" in trainer.text.getvalue()


def test_periodic_validations_begin_at_a_step_and_checkpoints_have_two_periods(tmp_path):
    loop = LoopConfig(val_period=1, val_start_at=4, val_at_start=True)
    how: Any = {"policies": [FakePolicy()], "num_steps": 5, "save_period": 3, "ft_save_period": 2, "keep_top_k": None}
    trainer = FakeTrainer(tmp_path, loop=loop, values=[1.0] * 6, **how)
    trainer.train()
    assert [number for number, row in enumerate(trainer.rows()) if "validation/val_loss" in row] == [0, 4, 5]
    saved = sorted(path.name for path in Path(trainer.tools.checkpointing.checkpoint_dir).glob("step_*"))
    assert saved == ["step_2", "step_3", "step_4", "step_5"]


@pytest.mark.parametrize(("enabled", "told"), [(True, "saved, and the run ends"), (False, "nothing is saved")])
def test_the_end_of_the_time_says_whether_there_is_a_checkpoint(tmp_path, enabled, told):
    trainer = FakeTrainer(tmp_path, enabled=enabled, checkpoint_must_save_by="00:00:00:00")
    trainer.train()
    assert trainer.state.total_steps == 1 and told in " ".join(trainer.text.getvalue().split())


# -- a run that is told to end


def told(folder: Path, *, at_step: int, grace_s: float = 60.0) -> FakeTrainer:
    """A run that validates after every second step, to which SIGTERM comes in a step."""
    how: Any = {"loop": LoopConfig(val_period=2), "values": [0.0] * 9, "policies": [FakePolicy()], "save_period": 3}
    trainer = FakeTrainer(folder, **how)
    trainer.tools.interruption = Interruption(grace_s)
    trainer.at_step = lambda step: signal.raise_signal(signal.SIGTERM) if step == at_step else None
    return trainer


def end(trainer: FakeTrainer) -> str:
    with pytest.raises(KeyboardInterrupt), trainer.tools.interruption.listening():
        trainer.train()
    return trainer.describe_interruption()


def test_a_run_that_is_told_to_end_finishes_its_step_and_saves_and_the_next_one_validates_first(tmp_path):
    trainer = told(tmp_path, at_step=2)
    saved = "SIGTERM: the run ends after step 2; it is saved, and the same command resumes after it"
    assert end(trainer) == saved and trainer.rows()[-1]["step"] == 2
    assert not any("validation/val_loss" in row for row in trainer.rows())
    resumed = told(tmp_path, at_step=0)
    assert resumed.resume() and resumed.state.total_steps == 2
    resumed.train()
    assert resumed.position.taken == 6
    assert [row["step"] for row in trainer.rows() if "validation/val_loss" in row] == [2, 4, 6]


def test_a_run_that_has_no_time_to_save_says_from_where_it_continues(tmp_path):
    trainer = told(tmp_path / "short", at_step=5)
    trainer.tools.deadline.longest_save_s = 59.0
    ended = "SIGTERM: the run ends after step 5; the same command resumes after step 3, the last one saved"
    assert end(trainer) == ended and trainer.position.taken == 5 == trainer.rows()[-1]["step"]
    trainer = told(tmp_path / "none", at_step=2, grace_s=0.0)
    trainer.errors = {3: AssertionError("no other step begins")}
    ended = "SIGTERM: the run ends after step 1; nothing was saved, and the same command starts from step 1"
    assert end(trainer) == ended


def test_workers_that_were_told_to_end_too_are_not_replaced(tmp_path):
    trainer = told(tmp_path, at_step=4)
    trainer.recovery.replacements = {"policy": lambda: pytest.fail("it is replaced")}

    def both(step: int) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
            raise died("policy-0")

    trainer.at_step = both
    assert end(trainer).endswith("after step 3; it is saved, and the same command resumes after it")

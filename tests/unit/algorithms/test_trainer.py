"""Checkpoints in the background: when they become visible, and what ends them."""

from __future__ import annotations

import errno
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.config.loop import LoopConfig
from nemo_rl.algorithms.trainers.trainer import RunTools, Trainer
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.utils.checkpoint.manager import CheckpointManager, DiskFullError
from nemo_rl.utils.checkpoint.save import AllWritten, StateWrite
from nemo_rl.utils.config import CheckpointingConfig, LoggerConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from tests.fakes import NoData


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


class CountingTrainer(Trainer):
    """Counts steps; `seen` holds, after each step, the names in the checkpoint directory."""

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int = 6,
        polls: int = 2,
        failure: BaseException | None = None,
        at_step: Callable[[int], None] = lambda step: None,
        **checkpointing: object,
    ) -> None:
        self.folder, self.polls, self.failure, self.at_step = folder, polls, failure, at_step
        self.text = io.StringIO()
        settings = {"save_period": 3, "keep_top_k": None, "metric_name": None, "async_save": True} | checkpointing
        super().__init__(
            LoopConfig(val_period=0),
            RunTools(
                logger=Logger(LoggerConfig(), folder / "run"),
                console=RunConsole(num_steps=num_steps, file=self.text, force_terminal=False),
                checkpointing=CheckpointingConfig.model_validate({"checkpoint_dir": str(folder / "c")} | settings),
                resolved_config_yaml="",
                identity={},
            ),
            num_steps=num_steps,
            policies=[],
            data=NoData(),
            nonfinite_action="stop",
        )
        self.replacements = {"policy": lambda: self.calls.append("recover")}
        self.seen: dict[int, list[str]] = {}
        self.calls: list[str] = []

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "c").iterdir()) if (self.folder / "c").is_dir() else []

    def step(self) -> None:
        step = self.state.total_steps + 1
        self.seen[step] = self.names()
        self.at_step(step)

    def validate(self) -> dict[str, float]:
        return {}

    def write_state(self, directory: Path) -> StateWrite:
        if not self.tools.checkpointing.async_save:
            self.calls.append(f"write {self.state.total_steps}")
            (directory / "weights").write_text("whole")
            return AllWritten()
        self.calls.append(f"start {self.state.total_steps}")
        return Write(directory, self.polls, self.failure)

    def read_state(self, directory: Path) -> None:
        self.calls.append(f"read {(directory / 'weights').read_text()} {self.state.total_steps}")


def wait_for_seal(trainer: CountingTrainer) -> None:
    """The seal runs in a thread: let it end, so that the next look finds it ready."""
    pending = trainer.pending_save
    if pending is not None and pending.sealing is not None:
        pending.sealing.result()


def sound_steps(trainer: CountingTrainer) -> list[str]:
    manager = CheckpointManager(trainer.tools.checkpointing)
    latest = manager.latest_sound()
    assert latest is None or (latest / "weights").read_text() == "whole"
    return trainer.names()


def test_the_controllers_random_generators_continue_where_the_checkpoint_stands(tmp_path):
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    trainer = CountingTrainer(tmp_path, num_steps=3)
    trainer.train()
    want = draw()
    assert draw() != want
    CountingTrainer(tmp_path).resume()
    assert draw() == want


def test_steps_go_on_while_a_checkpoint_is_written_and_it_appears_when_it_is_whole(tmp_path):
    trainer = CountingTrainer(tmp_path)
    trainer.at_step = lambda step: wait_for_seal(trainer)
    trainer.train()
    assert trainer.seen[4] == ["tmp_step_3"], "not finished, not visible"
    assert trainer.seen[6] == ["tmp_step_3"], "written after step 5, sealed during step 6"
    assert trainer.calls == ["start 3", "start 6"]
    assert sound_steps(trainer) == ["step_3", "step_6"], "the last one is waited for"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "timing/train/checkpointing" in row] == [3, 6]


def test_one_save_at_a_time_the_next_waits(tmp_path):
    trainer = CountingTrainer(tmp_path, polls=100, save_period=1, num_steps=3)
    trainer.train()
    assert trainer.seen == {1: [], 2: ["tmp_step_1"], 3: ["step_1", "tmp_step_2"]}
    assert sound_steps(trainer) == ["step_1", "step_2", "step_3"]


def test_a_failed_save_ends_the_run_at_the_next_step_boundary_and_says_why(tmp_path):
    CountingTrainer(tmp_path, num_steps=3).train()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    trainer = CountingTrainer(tmp_path, num_steps=20, failure=full, polls=1)
    trainer.resume()
    with pytest.raises(DiskFullError, match=r"no space to save step 6 .*step_3 is untouched"):
        trainer.train()
    assert max(trainer.seen) == 7
    assert sound_steps(trainer) == ["step_3"]


def test_an_error_of_the_run_is_told_even_if_the_save_fails_too(tmp_path):
    def fail(step: int) -> None:
        if step == 4:
            raise ValueError("the loss is not finite")

    trainer = CountingTrainer(tmp_path, polls=100, at_step=fail, failure=RuntimeError("rank 3 could not write"))
    with pytest.raises(ValueError, match="the loss is not finite"):
        trainer.train()
    assert "the checkpoint of step 3 could not be finished: rank 3 could not write" in trainer.text.getvalue()
    assert sound_steps(trainer) == []


def test_an_interrupt_does_not_wait_for_a_checkpoint(tmp_path):
    def interrupt(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    trainer = CountingTrainer(tmp_path, polls=100, at_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "given up" in trainer.text.getvalue()
    assert sound_steps(trainer) == []


@pytest.mark.parametrize(
    ("polls", "resumed_after", "names"),
    [(100, 3, ["step_3", "step_6", "step_8"]), (2, 6, ["step_3", "step_6", "step_8"])],
)
def test_after_a_worker_died_the_run_goes_on_from_the_last_whole_checkpoint(tmp_path, polls, resumed_after, names):
    """Step 6 was on its way to the disk: it counts if all of it had been written, and otherwise was never there."""
    CountingTrainer(tmp_path, num_steps=3).train()
    died = []

    def die(step: int) -> None:
        if step == 8 and not died:
            died.append(step)
            raise WorkerDied("policy-0 died in train", worker="policy-0", rank=0, method="train")

    trainer = CountingTrainer(tmp_path, num_steps=8, polls=polls, at_step=die)
    trainer.resume()
    trainer.train()
    assert trainer.calls[:4] == ["read whole 3", "start 6", "recover", f"read whole {resumed_after}"]
    assert sound_steps(trainer) == names


def test_a_run_that_is_continued_with_fewer_steps_than_it_has_takes_none(tmp_path):
    CountingTrainer(tmp_path, num_steps=6).train()
    shorter = CountingTrainer(tmp_path, num_steps=4)
    assert shorter.resume() and shorter.state.total_steps == 6
    shorter.train()
    assert shorter.seen == {}

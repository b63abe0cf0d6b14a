"""When a run ends because a validation is good enough or gets no better, and when it goes on."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from nemo_rl.algorithms.config.loop import EarlyStoppingConfig, LoopConfig
from nemo_rl.algorithms.trainers.trainer import RunTools, Trainer
from nemo_rl.utils.checkpoint.save import AllWritten
from nemo_rl.utils.config import CheckpointingConfig, LoggerConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from tests.fakes import NoData


class ScriptedTrainer(Trainer):
    """Validates after every step; the values are given."""

    def __init__(self, folder: Path, values: list[float], *, val_at_start: bool = False, **stopping: object) -> None:
        self.text = io.StringIO()
        settings = {"metric_name": "val:val_loss"} | stopping
        super().__init__(
            LoopConfig(
                val_period=1,
                val_at_start=val_at_start,
                early_stopping=EarlyStoppingConfig.model_validate(settings),
            ),
            RunTools(
                logger=Logger(LoggerConfig(), folder / "run"),
                console=RunConsole(num_steps=len(values), file=self.text, force_terminal=False),
                checkpointing=CheckpointingConfig.model_validate(
                    {"checkpoint_dir": str(folder / "c"), "save_period": 100, "metric_name": None}
                ),
                resolved_config_yaml="",
                identity={},
            ),
            num_steps=len(values) - val_at_start,
            policies=[],
            data=NoData(),
            nonfinite_action="stop",
        )
        self.values = list(values)

    def step(self) -> None:
        pass

    def validate(self) -> dict[str, float]:
        value = self.values[self.state.total_steps]
        return {"val_loss": value}

    def write_state(self, directory: Path) -> AllWritten:
        return AllWritten()

    def read_state(self, directory: Path) -> None:
        pass


def steps(trainer: ScriptedTrainer) -> int:
    """Steps that the run takes; the value of step n is number n of `values`."""
    trainer.values = [math.inf, *trainer.values]
    trainer.train()
    return trainer.state.total_steps


@pytest.mark.parametrize(
    ("values", "stopping", "taken"),
    [
        ([5, 4, 3, 2, 1, 0], {}, 6),
        ([3, 4, 5, 6, 7, 8], {"patience": 3}, 4),
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
        ([9, 9, 9, 9], {"metric_name": None, "patience": 1}, 4),
    ],
)
def test_steps_until_the_run_ends(tmp_path, values, stopping, taken):
    trainer = ScriptedTrainer(tmp_path, values, **stopping)
    assert steps(trainer) == taken
    assert ("is good enough or gets no better" in trainer.text.getvalue()) == trainer.state.stopped_early


def test_a_stopped_run_leaves_its_checkpoint_and_stays_stopped(tmp_path):
    values = [3.0, 4, 5, 6, 7, 8]
    assert steps(ScriptedTrainer(tmp_path, values, patience=2)) == 3
    again = ScriptedTrainer(tmp_path, values, patience=2)
    again.resume()
    assert steps(again) == 3
    assert "early_stopping.metric_name=null would go on" in again.text.getvalue()
    on = ScriptedTrainer(tmp_path, values, metric_name=None)
    on.resume()
    assert steps(on) == 6


def test_patience_is_counted_over_a_restart(tmp_path):
    values = [3.0, 4, 5, 6, 7, 8]
    first = ScriptedTrainer(tmp_path, values[:2], patience=3)
    assert steps(first) == 2
    resumed = ScriptedTrainer(tmp_path, values, patience=3)
    resumed.resume()
    assert steps(resumed) == 4
    assert resumed.state.best_validation == 3.0


def test_a_model_that_is_good_enough_before_the_first_step_is_not_trained(tmp_path):
    trainer = ScriptedTrainer(tmp_path, [1.0, 2.0], val_at_start=True, threshold=1.5)
    trainer.train()
    assert trainer.state.total_steps == 0
    assert "val:val_loss is good enough" in trainer.text.getvalue()

"""Several policies that are trained, saved and restored together."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.config.loop import LoopConfig
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.trainers.trainer import NonFiniteLoss, RunTools, Trainer, merge_results
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import TrainResult
from nemo_rl.utils.config import CheckpointingConfig, LoggerConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from tests.fakes import FakePolicy


class Position:
    """Data of which one piece is taken per step."""

    def __init__(self) -> None:
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class TwoPolicies(Trainer):
    """A policy and a critic, which raises `error` once, in step 3."""

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int = 4,
        error: Exception | None = None,
        action: str = "stop",
        results: dict[str, list[TrainResult]] | None = None,
        is_async: bool = False,
    ) -> None:
        self.calls: list[str] = []
        self.text = io.StringIO()
        self.error = error
        self.policy, self.value = (
            FakePolicy(
                **({"results": results[name]} if results and name in results else {}),
                calls=self.calls,
                name_prefix=name,
            )
            for name in ("policy", "value")
        )
        self.position = Position()
        checkpoints = {
            "checkpoint_dir": str(folder / "c"),
            "save_period": 2,
            "metric_name": None,
            "async_save": is_async,
        }
        super().__init__(
            LoopConfig(val_period=0),
            RunTools(
                logger=Logger(LoggerConfig(), folder / "run"),
                console=RunConsole(num_steps=num_steps, file=self.text, force_terminal=False),
                checkpointing=CheckpointingConfig.model_validate(checkpoints),
                resolved_config_yaml="",
                identity={},
            ),
            num_steps=num_steps,
            policies=[self.policy, self.value],  # type: ignore[list-item]
            data=self.position,
            nonfinite_action=action,
        )

    def step(self) -> None:
        if self.state.total_steps == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.position.taken += 1
        for policy in (self.policy, self.value):
            self.take_steps(policy, NLLLoss(), Logprobs(filtered=False))  # type: ignore[arg-type]

    def validate(self) -> dict[str, float]:
        return {}


def result(loss: float = 0.5, norm: float = 1.0, skipped: int = 0, samples: tuple[str, ...] = ()) -> TrainResult:
    return TrainResult(
        losses=[loss],
        grad_norms=[norm],
        learning_rates=[0.1],
        metrics={"loss": loss, "global_valid_toks": 24.0},
        num_skipped_steps=skipped,
        nonfinite_samples=list(samples),
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_all_policies_and_the_place_in_the_data_are_saved_and_restored(tmp_path, is_async):
    first = TwoPolicies(tmp_path, num_steps=2, is_async=is_async)
    first.train()
    assert first.calls == [*["train", "value.train"] * 2, "save", "value.save"]
    again = TwoPolicies(tmp_path, is_async=is_async)
    assert again.resume()
    assert again.calls == ["load_checkpoint", "value.load_checkpoint"]
    assert again.position.taken == 2 and again.state.total_steps == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {name for name in rows[0] if name.endswith("/grad_norm")} == {"train/grad_norm", "train/value/grad_norm"}


def died(worker: str) -> WorkerDied:
    return WorkerDied(f"{worker} died in train", worker=worker, rank=0, method="train")


@pytest.mark.parametrize(("worker", "restarted"), [("policy-0", "restart"), ("value-1", "value.restart")])
def test_only_the_policy_that_died_is_replaced_and_all_go_back_to_the_checkpoint(tmp_path, worker, restarted):
    trainer = TwoPolicies(tmp_path, error=died(worker))
    trainer.train()
    step = ["train", "value.train"]
    saved = [*step * 2, "save", "value.save"]
    assert trainer.calls == [*saved, restarted, "load_checkpoint", "value.load_checkpoint", *saved]
    assert trainer.position.taken == 4


def test_what_cannot_be_replaced_ends_the_run(tmp_path):
    with pytest.raises(WorkerDied, match="policy-extra-0"):
        TwoPolicies(tmp_path, error=died("policy-extra-0")).train()


def test_a_loss_that_is_not_finite_is_written_down_under_its_policys_name(tmp_path):
    broken = result(math.nan, math.nan, 1, ("d:3", "d:1"))
    trainer = TwoPolicies(tmp_path, results={"value": [result(), broken]})
    with pytest.raises(NonFiniteLoss, match=r"step 2: loss nan.*value_nonfinite_step_2\.jsonl.*nonfinite_action=skip"):
        trainer.train()
    records = (tmp_path / "run" / "value_nonfinite_step_2.jsonl").read_text().splitlines()
    assert [json.loads(record)["sample_id"] for record in records] == ["d:1", "d:3"]


def test_several_passes_stop_at_the_first_that_is_not_finite(tmp_path):
    trainer = TwoPolicies(tmp_path, results={"policy": [result(), result(math.nan, math.nan, 1, ("d:3",)), result()]})
    with pytest.raises(NonFiniteLoss):
        trainer.take_steps(trainer.policy, NLLLoss(), Logprobs(filtered=False), num_passes=3)  # type: ignore[arg-type]
    assert trainer.calls == ["train", "train"]


def test_passes_are_merged_into_one_result():
    found = merge_results([result(1.0, 2.0), result(3.0, 4.0, 1, ("b", "a")), result(5.0, 6.0, 1, ("a",))])
    assert (found.losses, found.grad_norms) == ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0])
    assert found.metrics == {"loss": 3.0, "global_valid_toks": 72.0}
    assert found.num_skipped_steps == 2 and found.nonfinite_samples == ["a", "b"]

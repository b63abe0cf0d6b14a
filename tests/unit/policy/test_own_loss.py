"""A loss of the user's trains on a worker, and a wrong one ends the step with one line that names it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.distributed.actor_host import _as_text
from nemo_rl.distributed.errors import UserCodeError
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import LossByName, LossInputs, PolicyGradientInputs, TrainResult
from tests.own_losses import Cautious, Focal, OfNemoRL, Wrong
from tests.unit.policy import steps
from tests.worlds import run_world


def test_it_trains_one_step(qwen: Path) -> None:
    cfg = ClippedPGLossConfig(disable_ppo_ratio=True, reference_policy_kl_penalty=0.0)
    theirs = LossByName(OfNemoRL(), PolicyGradientInputs)
    losses = [Focal(0.0), Focal(2.0), theirs, ClippedPGLoss(cfg), Cautious(cfg, 1.0)]

    def rank_main(rank: int, world: int) -> list[TrainResult]:
        results = []
        for loss in losses:
            worker = steps.make_worker(qwen, steps.policy_config(train_global_batch_size=16))
            steps.load_step(worker)
            results.append(worker.train(loss, Logprobs()))
        return results

    nll, focal, theirs, known, cautious = run_world(rank_main, 1)[0]
    assert 0 < focal.losses[0] < nll.losses[0] and nll.grad_norms[0] > 0 and nll.num_skipped_steps == 0
    assert 0 < nll.metrics["focal_probability"] < 1
    for own in (theirs, cautious):
        assert own.losses == pytest.approx(known.losses, rel=1e-5)
        assert own.grad_norms == pytest.approx(known.grad_norms, rel=1e-5)
        assert own.metrics["num_valid_samples"] == known.metrics["num_valid_samples"] == 15
    assert cautious.metrics["square"] == pytest.approx(0, abs=1e-9) and "clip_fraction" in cautious.metrics


@dataclass(kw_only=True)
class WithDifficulty(LossInputs):
    difficulty: torch.Tensor  # [B]


WRONG = {
    "a tensor": "a Tensor, not (loss, metrics)",
    "nothing": "a NoneType, not (loss, metrics)",
    "a number": "(float, dict), not a tensor and a dictionary",
    "no metrics": "(Tensor, NoneType), not a tensor and a dictionary",
    "every token": "a loss of shape [1, ",
    "an integer": "a loss of shape [] and torch.int64",
    "no gradient": "a loss without gradient",
    "metrics of every token": "metrics that are no single numbers: ratio",
}


def test_a_wrong_result_is_one_line_that_names_the_loss(qwen: Path) -> None:
    losses: list[Any] = [*map(Wrong, WRONG), LossByName(OfNemoRL(), WithDifficulty)]

    def rank_main(rank: int, world: int) -> list[str]:
        worker = steps.make_worker(qwen, steps.policy_config(train_micro_batch_size=1))
        steps.load_step(worker)
        told = []
        for loss in losses:
            with pytest.raises(UserCodeError) as error:
                worker.train(loss, Logprobs())
            sent = _as_text(error.value)
            assert sent.remote_traceback == "", "the message says all"
            told.append(str(sent))
        return told

    [[*told, column]] = run_world(rank_main, 1)
    for text, expected in zip(told, WRONG.values(), strict=True):
        assert text.startswith(f"UserCodeError: loss tests.own_losses.Wrong returned {expected}") and "\n" not in text
    assert "no row has the column 'difficulty'" in column and "WithDifficulty" in column


def test_an_evaluation_needs_no_gradient_and_a_nan_is_not_stepped_over(qwen: Path) -> None:
    def rank_main(rank: int, world: int) -> tuple[dict[str, float], TrainResult]:
        worker = steps.make_worker(qwen, steps.policy_config(train_global_batch_size=16))
        steps.load_step(worker)
        return worker.evaluate(Wrong("no gradient"), Logprobs()), worker.train(Wrong("nan"), Logprobs())

    [(evaluated, trained)] = run_world(rank_main, 1)
    assert evaluated["loss"] < 0 and trained.num_skipped_steps == 1 and len(trained.nonfinite_samples) == 16

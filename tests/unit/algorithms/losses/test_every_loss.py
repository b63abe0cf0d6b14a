"""Every loss is independent of splits, masks and padding, and hides no bad value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl.algorithms.config.ppo import ValueLossConfig
from nemo_rl.algorithms.config.supervised import RewardModelLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.preference import PreferenceLoss
from nemo_rl.algorithms.losses.value import ValueInputs, ValueLoss, explained_variance
from nemo_rl.types import LossFunction, LossInputs
from tests.loss_invariance import Partition, check_bad_values, check_empty, check_masks, check_partition, partitions
from tests.unit.algorithms.losses import batches, test_clipped_pg, test_distillation, test_preference
from tests.unit.algorithms.losses.batches import all_valid, evaluated

OF_SAMPLING = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")


@dataclass(frozen=True)
class Case:
    """`batch(units, seed)` are outputs and inputs of so many rows, or pairs of rows; `columns` those that count."""

    loss: LossFunction
    batch: Callable[[int, int], tuple[Tensor, LossInputs]]
    columns: Sequence[str] = ()
    rows_per_unit: int = 1
    whole_rows: bool = False  # only whole rows are masked


CASES = {
    "nll": Case(NLLLoss(), batches.random_rows),
    "value": Case(ValueLoss(ValueLossConfig(value_clip=None)), batches.random_values, ["returns"]),
    "value, clipped": Case(ValueLoss(ValueLossConfig(value_clip=0.2)), batches.random_values, ["values", "returns"]),
}
for has_margin in (False, True):
    loss = PreferenceLoss(RewardModelLossConfig(use_margin=has_margin))
    CASES[f"reward model, margin {has_margin}"] = Case(loss, batches.random_scores, rows_per_unit=2, whole_rows=True)
for name in test_preference.VARIANTS:
    CASES[name] = Case(test_preference.loss_fn(name), batches.random_pairs, ["reference_logprob_sum"], rows_per_unit=2)
for mode in test_distillation.MODES:
    loss, batch = test_distillation.make_loss(mode, kl_type="mixed"), partial(test_distillation.random_batch, mode=mode)
    CASES[f"distillation, {mode}"] = Case(loss, batch, [] if mode == "whole" else ["teacher_topk"])
for name in test_clipped_pg.SWITCHES:
    columns = OF_SAMPLING if name in ("grpo", "gspo", "cispo", "icepop", "reinforce") else ()
    CASES[name] = Case(ClippedPGLoss(test_clipped_pg.config(name)), test_clipped_pg.random_batch, columns)
_LIKELIHOOD = test_clipped_pg.config("grpo").model_copy(update={"positive_example_nll_weight": 0.1})
CASES["likelihood"] = Case(ClippedPGLoss(_LIKELIHOOD), test_clipped_pg.random_likelihood_batch, OF_SAMPLING)
CASES["filtered"] = Case(
    ClippedPGLoss(test_clipped_pg.config("on_policy_kl")), test_clipped_pg.random_batch_twice, OF_SAMPLING
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), partition=partitions(4), seed=st.integers(0, 1000))
def test_any_split_gives_the_same(name: str, partition: Partition, seed: int):
    case = CASES[name]
    check_partition(case.loss, *case.batch(4, seed), partition, rows_per_unit=case.rows_per_unit)


@pytest.mark.parametrize("name", CASES)
def test_masks_bad_values_and_empty_micro_batches(name: str):
    case = CASES[name]
    check_masks(case.loss, *case.batch(3, 0), whole_rows=case.whole_rows)
    check_empty(case.loss, *case.batch(3, 0))
    if case.columns or name not in test_clipped_pg.SWITCHES:
        check_bad_values(case.loss, *case.batch(2, 0), columns=case.columns)


def test_a_ratio_that_overflows_is_not_hidden_by_the_clip():
    logprobs, inputs = test_clipped_pg.one_row([0.5], [0.5], 1.0)
    inputs.prev_logprobs = inputs.generation_logprobs = torch.tensor([[-100.0]])
    counts: Any = (torch.tensor(1.0), torch.tensor(1.0))
    assert torch.isnan(CASES["grpo"].loss(logprobs, inputs, *counts)[0])


# -- the losses of a value model and of supervised learning by hand

CLIPPED, PLAIN = (ValueLoss(ValueLossConfig(value_clip=value_clip)) for value_clip in (0.2, None))


def one_row(values: list[float], old: list[float], returns: list[float]) -> tuple[torch.Tensor, ValueInputs]:
    columns = {"values": torch.tensor([old]), "returns": torch.tensor([returns])}
    return torch.tensor([values], requires_grad=True), all_valid(ValueInputs, 1, len(values), **columns)


def test_clipping_by_hand():
    """Moved within the bound, too far towards the return, too far away from it, beyond it, too far down towards it."""
    batch = one_row([0.1, 0.5, -0.5, 2.0, -0.5], [0.0, 0.0, 0.0, 0.9, 0.0], [1.0, 1.0, 1.0, 1.0, -1.0])
    loss, gradient, metrics = evaluated(CLIPPED, *batch)
    errors = [0.1 - 1, 0.2 - 1, -0.5 - 1, 2.0 - 1, -0.2 + 1]
    assert loss == pytest.approx(0.5 * sum(error**2 for error in errors) / 5)
    assert gradient[0].tolist() == pytest.approx([errors[0] / 5, 0.0, errors[2] / 5, errors[3] / 5, 0.0])
    assert (metrics["value_clip_fraction"], metrics["value_loss"]) == (pytest.approx(0.4), loss)
    # Without a clip it is the scaled squared error.
    unclipped = ValueLoss(ValueLossConfig(value_clip=None, scale=2.0))
    loss, _, metrics = evaluated(unclipped, *one_row([0.5, 2.0], [0.0, 0.0], [1.0, 0.0]))
    assert loss == pytest.approx(2.0 * (0.25 + 4.0) / 2)
    found = [metrics[name] for name in ("value_clip_fraction", "values_mean", "returns_mean")]
    assert found == pytest.approx([0.0, 1.25, 0.5])


@pytest.mark.parametrize(("values", "expected"), [([5, 5, 5], 0.0), ([2, 3, 4], 1.0), ([3, 2, 1], -3.0)])
def test_explained_variance_of_a_step(values: list[float], expected: float):
    """A constant, off by a constant, the wrong way round, in any unit; and nothing where all returns are equal."""
    for returns, unit, want in (([1, 2, 3], 1.0, expected), ([1, 2, 3], 0.01, expected), ([0.7] * 3, 1.0, 0.0)):
        scaled = [unit * value for value in values]
        _, _, metrics = evaluated(PLAIN, *one_row(scaled, scaled, [unit * value for value in returns]))
        assert explained_variance(metrics) == pytest.approx(want, abs=1e-5)


def test_nll_by_hand():
    """Three loss tokens of two rows, and one more somewhere else in the optimizer step."""
    inputs = all_valid(LossInputs, 2, 3)
    inputs.token_mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    logprobs = torch.tensor([[0.0, math.log(0.5), math.log(0.25)], [0.0, math.log(0.5), 0.0]], requires_grad=True)
    loss, gradient, metrics = evaluated(NLLLoss(), logprobs, inputs, 3.0, 4.0)
    assert loss == pytest.approx((1 + 2 + 1) * math.log(2) / 4)
    assert gradient.tolist() == [[0.0, -0.25, -0.25], [0.0, -0.25, 0.0]]
    counts = {"num_unmasked_tokens": 3.0, "num_valid_samples": 2.0}
    assert metrics == pytest.approx({"loss": loss, "token_probability": 1.25 / 4} | counts)

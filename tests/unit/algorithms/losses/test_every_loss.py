"""Every loss is independent of splits, masks and padding, and hides no bad value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from nemo_rl.algorithms.losses.value import ValueLoss
from nemo_rl.types import LossFunction, LossInputs
from tests.loss_invariance import Partition, check_bad_values, check_empty, check_masks, check_partition, partitions
from tests.unit.algorithms.losses import test_clipped_pg, test_distillation, test_preference
from tests.unit.algorithms.losses.batches import random_pairs, random_rows, random_scores, random_values

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
    "nll": Case(NLLLoss(), random_rows),
    "value": Case(ValueLoss(ValueLossConfig(value_clip=None)), random_values, ["returns"]),
    "value, clipped": Case(ValueLoss(ValueLossConfig(value_clip=0.2)), random_values, ["values", "returns"]),
}
for has_margin in (False, True):
    loss = PreferenceLoss(RewardModelLossConfig(use_margin=has_margin))
    CASES[f"reward model, margin {has_margin}"] = Case(loss, random_scores, rows_per_unit=2, whole_rows=True)
for name in test_preference.VARIANTS:
    CASES[name] = Case(test_preference.loss_fn(name), random_pairs, ["reference_logprob_sum"], rows_per_unit=2)
for mode in test_distillation.MODES:
    CASES[f"distillation, {mode}"] = Case(
        test_distillation.make_loss(mode, kl_type="mixed"),
        lambda rows, seed, mode=mode: test_distillation.random_batch(rows, seed, mode),
        [] if mode == "whole" else ["teacher_topk"],
    )
for name in test_clipped_pg.SWITCHES:
    CASES[name] = Case(
        ClippedPGLoss(test_clipped_pg.config(name)),
        test_clipped_pg.random_batch,
        OF_SAMPLING if name in ("grpo", "gspo", "cispo", "icepop", "reinforce") else (),
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

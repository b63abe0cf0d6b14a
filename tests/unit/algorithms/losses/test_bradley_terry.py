import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.supervised import RewardModelLossConfig
from nemo_rl.algorithms.losses.preference import PreferenceLoss
from nemo_rl.types import PreferenceInputs
from tests.loss_invariance import (
    Partition,
    check_bad_values,
    check_empty,
    check_masks,
    check_partition,
    global_counts,
    partitions,
)
from tests.unit.algorithms.losses.batches import random_pairs

PLAIN, MARGIN = (PreferenceLoss(RewardModelLossConfig(use_margin=use_margin)) for use_margin in (False, True))


def random_scores(num_pairs: int, seed: int) -> tuple[torch.Tensor, PreferenceInputs]:
    """One score per row, at its last token."""
    logprobs, inputs = random_pairs(num_pairs, seed)
    last = inputs.token_mask.shape[1] - 1 - inputs.token_mask.flip(-1).argmax(-1)
    return (logprobs.detach() * torch.nn.functional.one_hot(last, logprobs.shape[1])).requires_grad_(), inputs


@settings(max_examples=25, deadline=None)
@given(loss_fn=st.sampled_from([PLAIN, MARGIN]), partition=partitions(4), seed=st.integers(0, 1000))
def test_any_split_of_the_pairs_gives_the_same(loss_fn: PreferenceLoss, partition: Partition, seed: int):
    check_partition(loss_fn, *random_scores(4, seed), partition, rows_per_unit=2)


def test_masks_bad_values_and_empty_micro_batches():
    batch = random_scores(3, 0)
    for loss_fn in (PLAIN, MARGIN):
        check_masks(loss_fn, *batch, whole_rows=True)
        check_bad_values(loss_fn, *batch, columns=[])
        check_empty(loss_fn, *batch)


def test_a_bad_margin_makes_the_loss_not_finite():
    scores, inputs = random_scores(1, 0)
    inputs.margin[0] = math.inf
    assert not torch.isfinite(MARGIN(scores, inputs, *global_counts(inputs))[0])
    assert torch.isfinite(PLAIN(scores, inputs, *global_counts(inputs))[0])


@pytest.mark.parametrize(("loss_fn", "margin"), [(PLAIN, 0.0), (MARGIN, 1.5)])
def test_value_and_gradient_by_hand(loss_fn: PreferenceLoss, margin: float):
    """Scores 2 against 0.5, and -1 against 0, which is the wrong way round."""
    scores = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.5, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    inputs = PreferenceInputs(
        input_ids=torch.zeros(4, 3, dtype=torch.int64),
        token_mask=torch.ones(4, 3),
        sample_mask=torch.ones(4),
        reference_logprob_sum=torch.zeros(4),
        margin=torch.tensor([1.5, 0.0, 0.0, 0.0]),
    )
    loss, metrics = loss_fn(scores, inputs, *global_counts(inputs))
    assert loss.item() == pytest.approx((math.log1p(math.exp(margin - 1.5)) + math.log1p(math.exp(1.0))) / 2)
    (gradient,) = torch.autograd.grad(loss, scores)
    pull = [1 / (1 + math.exp(1.5 - margin)) / 2, 1 / (1 + math.exp(-1.0)) / 2]
    assert gradient[:, 0].tolist() == pytest.approx([-pull[0], pull[0], -pull[1], pull[1]])
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss": loss.item(),
        "accuracy": 0.5,
        "rewards_chosen_mean": 0.5,
        "rewards_rejected_mean": 0.25,
        "rewards_margin_mean": 0.25,
        "num_valid_samples": 2.0,
    }

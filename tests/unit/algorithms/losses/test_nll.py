import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.losses.nll import NLLLoss
from tests.loss_invariance import (
    Partition,
    check_bad_values,
    check_empty,
    check_masks,
    check_partition,
    global_counts,
    partitions,
)
from tests.unit.algorithms.losses.batches import random_rows


@settings(max_examples=25, deadline=None)
@given(partition=partitions(5), seed=st.integers(0, 1000))
def test_any_split_gives_the_same(partition: Partition, seed: int):
    check_partition(NLLLoss(), *random_rows(5, seed), partition)


def test_masks_bad_values_and_empty_micro_batches():
    batch = random_rows(3, 0)
    check_masks(NLLLoss(), *batch)
    check_bad_values(NLLLoss(), *batch, columns=[])
    check_empty(NLLLoss(), *batch)


def test_value_by_hand():
    """Three loss tokens of two rows, and one more somewhere else in the optimizer step."""
    logprobs, inputs = random_rows(2, 0, length=3)
    inputs.token_mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    logprobs = torch.tensor([[0.0, math.log(0.5), math.log(0.25)], [0.0, math.log(0.5), 0.0]], requires_grad=True)
    loss, metrics = NLLLoss()(logprobs, inputs, torch.tensor(3.0), torch.tensor(4.0))
    assert loss.item() == pytest.approx((1 + 2 + 1) * math.log(2) / 4)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [[0.0, -0.25, -0.25], [0.0, -0.25, 0.0]]
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss": loss.item(),
        "token_probability": pytest.approx(1.25 / 4),
        "num_unmasked_tokens": 3.0,
        "num_valid_samples": 2.0,
    }


def test_it_is_the_cross_entropy_of_the_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, 11, generator=generator, requires_grad=True)
    _, inputs = random_rows(3, 0)
    targets = torch.randint(11, (3, 8), generator=generator)
    valid = inputs.token_mask * inputs.sample_mask[:, None] > 0
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    loss, _ = NLLLoss()(logprobs, inputs, *global_counts(inputs))
    expected = torch.nn.functional.cross_entropy(logits[valid], targets[valid])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))

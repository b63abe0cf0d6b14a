import math

import pytest
import torch

from nemo_rl.algorithms.losses.nll import NLLLoss
from tests.unit.algorithms.losses.batches import random_rows


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

"""The losses of a value model and of supervised learning by hand."""

import math

import pytest
import torch

from nemo_rl.algorithms.config.ppo import ValueLossConfig
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.value import ValueInputs, ValueLoss, explained_variance
from nemo_rl.types import LossInputs
from tests.unit.algorithms.losses.batches import all_valid, evaluated

CLIPPED, PLAIN = (ValueLoss(ValueLossConfig(value_clip=value_clip)) for value_clip in (0.2, None))


def one_row(values: list[float], old: list[float], returns: list[float]) -> tuple[torch.Tensor, ValueInputs]:
    columns = {"values": torch.tensor([old]), "returns": torch.tensor([returns])}
    return torch.tensor([values], requires_grad=True), all_valid(ValueInputs, 1, len(values), **columns)


def test_clipping_by_hand():
    """Return 1 each: moved within the bound, moved too far towards it, moved too far away from it, beyond it."""
    batch = one_row([0.1, 0.5, -0.5, 2.0], [0.0, 0.0, 0.0, 0.9], [1.0] * 4)
    loss, gradient, metrics = evaluated(CLIPPED, *batch)
    errors = [0.1 - 1, 0.2 - 1, -0.5 - 1, 2.0 - 1]
    assert loss == pytest.approx(0.5 * sum(error**2 for error in errors) / 4)
    assert gradient[0].tolist() == pytest.approx([errors[0] / 4, 0.0, errors[2] / 4, errors[3] / 4])
    assert (metrics["value_clip_fraction"], metrics["value_loss"]) == (0.25, loss)
    # Without a clip it is the scaled squared error.
    unclipped = ValueLoss(ValueLossConfig(value_clip=None, scale=2.0))
    loss, _, metrics = evaluated(unclipped, *one_row([0.5, 2.0], [0.0, 0.0], [1.0, 0.0]))
    assert loss == pytest.approx(2.0 * (0.25 + 4.0) / 2)
    found = [metrics[name] for name in ("value_clip_fraction", "values_mean", "returns_mean")]
    assert found == pytest.approx([0.0, 1.25, 0.5])


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([5.0, 5.0, 5.0], [1.0, 2.0, 3.0], 0.0),
        ([2.0, 3.0, 4.0], [1.0, 2.0, 3.0], 1.0),  # off by a constant
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),
        ([0.1, 0.2, 0.3], [0.7, 0.7, 0.7], 0.0),
    ],
)
def test_explained_variance_of_a_step(values: list[float], returns: list[float], expected: float):
    _, _, metrics = evaluated(PLAIN, *one_row(values, values, returns))
    assert explained_variance(metrics) == pytest.approx(expected, abs=1e-5)


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

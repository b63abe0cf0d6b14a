import pytest
import torch

from nemo_rl.algorithms.config.ppo import ValueLossConfig
from nemo_rl.algorithms.losses.value import ValueInputs, ValueLoss, explained_variance
from tests.loss_invariance import global_counts

CLIPPED, PLAIN = (ValueLoss(ValueLossConfig(value_clip=value_clip)) for value_clip in (0.2, None))


def one_row(values: list[float], old: list[float], returns: list[float]) -> tuple[torch.Tensor, ValueInputs]:
    inputs = ValueInputs(
        input_ids=torch.zeros(1, len(values), dtype=torch.int64),
        token_mask=torch.ones(1, len(values)),
        sample_mask=torch.ones(1),
        values=torch.tensor([old]),
        returns=torch.tensor([returns]),
    )
    return torch.tensor([values], requires_grad=True), inputs


def test_clipping_by_hand():
    """Return 1 each: moved within the bound, moved too far towards it, moved too far away from it, beyond it."""
    batch = one_row([0.1, 0.5, -0.5, 2.0], [0.0, 0.0, 0.0, 0.9], [1.0] * 4)
    loss, metrics = CLIPPED(*batch, *global_counts(batch[1]))
    errors = [0.1 - 1, 0.2 - 1, -0.5 - 1, 2.0 - 1]
    assert loss.item() == pytest.approx(0.5 * sum(error**2 for error in errors) / 4)
    (gradient,) = torch.autograd.grad(loss, batch[0])
    assert gradient[0].tolist() == pytest.approx([errors[0] / 4, 0.0, errors[2] / 4, errors[3] / 4])
    assert metrics["value_clip_fraction"].item() == 0.25
    assert metrics["value_loss"].item() == loss.item()


def test_without_a_clip_it_is_the_scaled_squared_error():
    batch = one_row([0.5, 2.0], [0.0, 0.0], [1.0, 0.0])
    loss, metrics = ValueLoss(ValueLossConfig(value_clip=None, scale=2.0))(*batch, *global_counts(batch[1]))
    assert loss.item() == pytest.approx(2.0 * (0.25 + 4.0) / 2)
    assert metrics["value_clip_fraction"].item() == 0.0
    means = {name: metrics[name].item() for name in ("values_mean", "returns_mean")}
    assert means == {"values_mean": pytest.approx(1.25), "returns_mean": 0.5}


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
    batch = one_row(values, values, returns)
    _, metrics = PLAIN(*batch, *global_counts(batch[1]))
    value = explained_variance({name: metric.item() for name, metric in metrics.items()})
    assert value == pytest.approx(expected, abs=1e-5)

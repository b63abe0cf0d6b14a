import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.ppo import ValueLossConfig
from nemo_rl.algorithms.losses.value import ValueLoss, explained_variance
from nemo_rl.types import ValueInputs
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

CLIPPED, PLAIN = (ValueLoss(ValueLossConfig(value_clip=value_clip)) for value_clip in (0.2, None))


def random_values(num_rows: int, seed: int) -> tuple[torch.Tensor, ValueInputs]:
    values, inputs = random_rows(num_rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    old, returns = (values.detach() + 0.3 * torch.randn(values.shape, generator=generator) for _ in range(2))
    return values, ValueInputs(**vars(inputs), values=old, returns=returns)


def one_row(values: list[float], old: list[float], returns: list[float]) -> tuple[torch.Tensor, ValueInputs]:
    inputs = ValueInputs(
        input_ids=torch.zeros(1, len(values), dtype=torch.int64),
        token_mask=torch.ones(1, len(values)),
        sample_mask=torch.ones(1),
        values=torch.tensor([old]),
        returns=torch.tensor([returns]),
    )
    return torch.tensor([values], requires_grad=True), inputs


@settings(max_examples=25, deadline=None)
@given(loss_fn=st.sampled_from([CLIPPED, PLAIN]), partition=partitions(5), seed=st.integers(0, 1000))
def test_any_split_gives_the_same(loss_fn: ValueLoss, partition: Partition, seed: int):
    check_partition(loss_fn, *random_values(5, seed), partition)


def test_masks_bad_values_and_empty_micro_batches():
    batch = random_values(3, 0)
    for loss_fn, columns in ((CLIPPED, ["values", "returns"]), (PLAIN, ["returns"])):
        check_masks(loss_fn, *batch)
        check_bad_values(loss_fn, *batch, columns=columns)
        check_empty(loss_fn, *batch)


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
    assert torch.autograd.grad(loss, batch[0])[0][0].tolist() == pytest.approx([-1.0, 4.0])
    assert metrics["value_clip_fraction"].item() == 0.0
    means = {name: metrics[name].item() for name in ("values_mean", "returns_mean")}
    assert means == {"values_mean": pytest.approx(1.25), "returns_mean": 0.5}


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
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

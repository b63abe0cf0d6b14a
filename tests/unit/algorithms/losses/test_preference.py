import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.supervised import DPOLossConfig
from nemo_rl.algorithms.losses.preference import DPOLoss
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
from tests.unit.algorithms.losses.batches import pair_of, random_pairs

VARIANTS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "cdpo": {"label_smoothing": 0.1},
    "robust": {"preference_loss": "robust", "label_smoothing": 0.2},
    "hinge": {"preference_loss": "hinge"},
    "ipo": {"preference_loss": "ipo"},
    "length_normalised": {"preference_average_log_probs": True},
    "with_sft": {"sft_loss_weight": 0.3},
    "with_sft_per_token": {"sft_loss_weight": 0.3, "preference_loss_weight": 0.5, "sft_average_log_probs": True},
    "sft_alone": {"sft_loss_weight": 1.0, "preference_loss_weight": 0.0},
}
BETA = 0.5


def loss_fn(name: str, **changes: Any) -> DPOLoss:
    values = {"reference_policy_kl_penalty": BETA, "sft_average_log_probs": False} | VARIANTS[name] | changes
    return DPOLoss(DPOLossConfig.model_validate(values))


def run(loss: DPOLoss, logprobs: torch.Tensor, inputs: PreferenceInputs) -> tuple[float, Any, dict[str, float]]:
    value, metrics = loss(logprobs, inputs, *global_counts(inputs))
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.item(), gradient, {name: metric.item() for name, metric in metrics.items()}


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(VARIANTS)), partition=partitions(4), seed=st.integers(0, 1000))
def test_any_split_of_the_pairs_gives_the_same(name: str, partition: Partition, seed: int):
    check_partition(loss_fn(name), *random_pairs(4, seed), partition, rows_per_unit=2)


@pytest.mark.parametrize("name", VARIANTS)
def test_masks_bad_values_and_empty_micro_batches(name: str):
    loss, batch = loss_fn(name), random_pairs(3, 0, length=5)
    check_masks(loss, *batch)
    check_bad_values(loss, *batch, columns=["reference_logprob_sum"])
    check_empty(loss, *batch)


def naive_loss(cfg: DPOLossConfig, logprobs: torch.Tensor, x: PreferenceInputs) -> torch.Tensor:
    """The formulas with scalars, pair by pair; nothing shared with the implementation."""
    beta, eps = cfg.reference_policy_kl_penalty, cfg.label_smoothing
    losses = []
    for chosen in range(0, len(logprobs), 2):
        if x.sample_mask[chosen] == 0:
            continue
        ratios = []
        for row in (chosen, chosen + 1):
            tokens = [t for t in range(logprobs.shape[1]) if x.token_mask[row, t] > 0]
            ratio = sum(logprobs[row, t] for t in tokens) - x.reference_logprob_sum[row]
            if cfg.preference_average_log_probs or cfg.preference_loss == "ipo":
                ratio = ratio / len(tokens)
            ratios.append(ratio)
        h = ratios[0] - ratios[1]
        p = 1 / (1 + torch.exp(-beta * h))
        pair = {
            "sigmoid": -(1 - eps) * torch.log(p) - eps * torch.log(1 - p),
            "robust": (-(1 - eps) * torch.log(p) + eps * torch.log(1 - p)) / (1 - 2 * eps),
            "hinge": torch.clamp(1 - beta * h, min=0),
            "ipo": (h - 1 / (2 * beta)) ** 2,
        }[cfg.preference_loss]
        tokens = [t for t in range(logprobs.shape[1]) if x.token_mask[chosen, t] > 0]
        nll = -sum(logprobs[chosen, t] for t in tokens)
        nll = nll / len(tokens) if cfg.sft_average_log_probs else nll
        losses.append(cfg.preference_loss_weight * pair + cfg.sft_loss_weight * nll)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_equal_the_naive_formula(name: str, seed: int):
    loss = loss_fn(name)
    logprobs, inputs = random_pairs(4, seed)
    value, _ = loss(logprobs, inputs, *global_counts(inputs))
    expected = naive_loss(loss.cfg, logprobs, inputs)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(value, logprobs), torch.autograd.grad(expected, logprobs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "dpo"])
def test_every_switch_changes_the_loss(name: str):
    values = [run(loss_fn(variant), *random_pairs(4, 1))[0] for variant in ("dpo", name)]
    assert values[0] != pytest.approx(values[1], abs=1e-4)


# log-ratios: chosen (-1 - 2) - (-4) = 1, rejected -3 - (-2) = -1; h = 2
PAIR = ([-1.0, -2.0], [-3.0], (-4.0, -2.0))


def test_dpo_by_hand():
    value, gradient, metrics = run(loss_fn("dpo"), *pair_of(*PAIR))
    probability = 1 / (1 + math.exp(-BETA * 2))
    assert value == pytest.approx(-math.log(probability))
    slope = BETA * (1 - probability)
    torch.testing.assert_close(gradient, torch.tensor([[-slope, -slope], [slope, 0.0]]))
    assert metrics == {
        "loss": value,
        "preference_loss": value,
        "sft_loss": pytest.approx(3.0),
        "accuracy": 1.0,
        "rewards_chosen_mean": BETA * 1,
        "rewards_rejected_mean": BETA * -1,
        "rewards_margin_mean": BETA * 2,
        "logprobs_chosen_mean": -3.0,
        "logprobs_rejected_mean": -3.0,
        "num_valid_samples": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cdpo", 0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.exp(1))),
        ("robust", (0.8 * math.log1p(math.exp(-1)) - 0.2 * math.log1p(math.exp(1))) / 0.6),
        ("hinge", 0.0),
        ("ipo", (1 / 2 - -1 / 1 - 1 / (2 * BETA)) ** 2),
        ("length_normalised", math.log1p(math.exp(-BETA * 1.5))),
        ("with_sft", math.log1p(math.exp(-1)) + 0.3 * 3.0),
        ("with_sft_per_token", 0.5 * math.log1p(math.exp(-1)) + 0.3 * 1.5),
        ("sft_alone", 3.0),
    ],
)
def test_variants_by_hand(name: str, expected: float):
    value, _, metrics = run(loss_fn(name), *pair_of(*PAIR))
    assert value == pytest.approx(expected, abs=1e-6)
    averages = name in ("ipo", "length_normalised")
    assert metrics["rewards_margin_mean"] == pytest.approx(BETA * (1.5 if averages else 2.0))
    assert metrics["logprobs_chosen_mean"] == pytest.approx(-1.5 if averages else -3.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, math.log(2)) for name in ("dpo", "cdpo", "robust", "length_normalised", "with_sft")),
        ("hinge", 1.0),
        ("ipo", 1 / (4 * BETA**2)),
    ],
)
def test_a_policy_equal_to_the_reference(name: str, expected: float):
    """With answers so long that the rounding of their sums would show."""
    logprobs, inputs = random_pairs(4, 0, length=3000)
    summed = [(row * mask).sum() for row, mask in zip(logprobs.detach().double(), inputs.token_mask, strict=True)]
    inputs.reference_logprob_sum = torch.stack(summed).float()
    _, _, metrics = run(loss_fn(name), logprobs, inputs)
    assert metrics["preference_loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["accuracy"] == 0.0, "equal rewards are not a preference"


def test_robust_is_unbiased_under_flipped_labels():
    """Its mean over labels flipped with probability e is the sigmoid loss of the true labels."""
    logprobs, inputs = random_pairs(1, 0)
    swapped = [1, 0]
    flipped = PreferenceInputs(
        **{name: getattr(inputs, name)[swapped] for name in ("input_ids", "token_mask", "sample_mask", "margin")},
        reference_logprob_sum=inputs.reference_logprob_sum[swapped],
    )
    robust = loss_fn("robust")
    true, wrong = run(robust, logprobs, inputs)[0], run(robust, logprobs.detach()[swapped].requires_grad_(), flipped)[0]
    assert 0.8 * true + 0.2 * wrong == pytest.approx(run(loss_fn("dpo"), logprobs, inputs)[0], abs=1e-5)


def test_half_a_pair_is_ours_to_avoid():
    logprobs, inputs = random_pairs(1, 0)
    half = PreferenceInputs(**{name: values[:1] for name, values in vars(inputs).items()})
    with pytest.raises(AssertionError, match="half a pair"):
        loss_fn("dpo")(logprobs[:1], half, torch.tensor(2.0), torch.tensor(8.0))

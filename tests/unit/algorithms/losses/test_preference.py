"""Losses of pairs of answers: DPO and its variants, and reward models."""

import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.config.supervised import DPOLossConfig, RewardModelLossConfig
from nemo_rl.algorithms.losses.preference import DPOLoss, PreferenceLoss
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.config.rules import StrictModel
from tests.loss_invariance import global_counts
from tests.tables import cases, pattern
from tests.unit.algorithms.losses.batches import evaluated, pair_of, random_pairs, random_scores

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


# log-ratios: chosen (-1 - 2) - (-4) = 1, rejected -3 - (-2) = -1; h = 2
PAIR = ([-1.0, -2.0], [-3.0], (-4.0, -2.0))


def test_dpo_by_hand():
    value, gradient, metrics = evaluated(loss_fn("dpo"), *pair_of(*PAIR))
    probability = 1 / (1 + math.exp(-BETA * 2))
    assert value == pytest.approx(-math.log(probability))
    slope = BETA * (1 - probability)
    torch.testing.assert_close(gradient, torch.tensor([[-slope, -slope], [slope, 0.0]]))
    want = {"loss": value, "preference_loss": value, "sft_loss": 3.0, "accuracy": 1.0, "num_valid_samples": 1.0}
    rewards = {"chosen": BETA * 1, "rejected": BETA * -1, "margin": BETA * 2}
    want |= {f"rewards_{name}_mean": reward for name, reward in rewards.items()}
    assert metrics == pytest.approx(want | {"logprobs_chosen_mean": -3.0, "logprobs_rejected_mean": -3.0})


BY_HAND = {
    "ipo": (1 / 2 - -1 / 1 - 1 / (2 * BETA)) ** 2,
    "length_normalised": math.log1p(math.exp(-BETA * 1.5)),
    "with_sft": math.log1p(math.exp(-1)) + 0.3 * 3.0,
    "with_sft_per_token": 0.5 * math.log1p(math.exp(-1)) + 0.3 * 1.5,
    "sft_alone": 3.0,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_variants_by_hand(name: str):
    """tests/parity has the others."""
    value, _, metrics = evaluated(loss_fn(name), *pair_of(*PAIR))
    assert value == pytest.approx(BY_HAND[name], abs=1e-6)
    averages = name in ("ipo", "length_normalised")
    assert metrics["rewards_margin_mean"] == pytest.approx(BETA * (1.5 if averages else 2.0))
    assert metrics["logprobs_chosen_mean"] == pytest.approx(-1.5 if averages else -3.0)


EQUAL = dict.fromkeys(("dpo", "cdpo", "robust", "length_normalised", "with_sft"), math.log(2))
EQUAL |= {"hinge": 1.0, "ipo": 1 / (4 * BETA**2)}


@pytest.mark.parametrize("name", EQUAL)
def test_a_policy_equal_to_the_reference(name: str):
    """With answers so long that the rounding of their sums would show."""
    logprobs, inputs = random_pairs(4, 0, length=3000)
    summed = [(row * mask).sum() for row, mask in zip(logprobs.detach().double(), inputs.token_mask, strict=True)]
    inputs.reference_logprob_sum = torch.stack(summed).float()
    _, _, metrics = evaluated(loss_fn(name), logprobs, inputs)
    assert metrics["preference_loss"] == pytest.approx(EQUAL[name], abs=1e-6)
    assert metrics["accuracy"] == 0.0, "equal rewards are not a preference"


# -- configuration


class Master(StrictModel):
    dpo: DPOLossConfig


def build(*values: str) -> DPOLossConfig:
    return build_config(Master, {"dpo": {}}, [f"+dpo.{value}" for value in values]).dpo


@pytest.mark.parametrize("average", [True, False])
def test_the_sft_term_is_averaged_when_the_preferences_are(average: bool):
    preferences = f"preference_average_log_probs={average}"
    assert build(preferences).sft_average_log_probs is average
    assert build(preferences, "sft_average_log_probs=false").sft_average_log_probs is False


REFUSED = """
preference_loss=robust -> set dpo.label_smoothing=0.1
preference_loss=ipo & label_smoothing=0.1 -> dpo.label_smoothing ... preference_loss=sigmoid
preference_loss=hinge & label_smoothing=0.1 -> set dpo.label_smoothing=0, or dpo.preference_loss=sigmoid
label_smoothing=0.5 -> dpo.label_smoothing ... less than 0.5
preference_loss_weight=0 -> dpo.preference_loss_weight ... nothing would be learned
reference_policy_kl_penalty=0 -> dpo.reference_policy_kl_penalty ... nothing would be learned
reference_policy_kl_penalty=0 & preference_loss=ipo & sft_loss_weight=1.0
    -> dpo.reference_policy_kl_penalty ... ipo divides by
"""


@pytest.mark.parametrize(("values", "told"), cases(REFUSED))
def test_what_cannot_work_is_refused_by_its_key(values: tuple[str, ...], told: str):
    with pytest.raises(ConfigError, match=pattern(told)):
        build(*values)


# -- reward models

PLAIN, MARGIN = (PreferenceLoss(RewardModelLossConfig(use_margin=use_margin)) for use_margin in (False, True))


def test_a_bad_margin_makes_the_loss_not_finite():
    scores, inputs = random_scores(1, 0)
    inputs.margin[0] = math.inf
    assert not torch.isfinite(MARGIN(scores, inputs, *global_counts(inputs))[0])
    assert torch.isfinite(PLAIN(scores, inputs, *global_counts(inputs))[0])


def test_scores_are_reported_as_rewards():
    """Scores 2 against 0.5, and -1 against 0, which is the wrong way round."""
    _, inputs = random_pairs(2, 0, length=3)
    inputs.token_mask = torch.ones(4, 3)
    scores = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.5, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    loss, _, metrics = evaluated(PLAIN, scores.requires_grad_(), inputs)
    assert loss == pytest.approx((math.log1p(math.exp(-1.5)) + math.log1p(math.exp(1.0))) / 2)
    want = {"loss": loss, "accuracy": 0.5, "num_valid_samples": 2.0}
    assert metrics == want | {"rewards_chosen_mean": 0.5, "rewards_rejected_mean": 0.25, "rewards_margin_mean": 0.25}

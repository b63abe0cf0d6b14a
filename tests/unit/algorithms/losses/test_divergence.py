"""Bounds of importance weights, and agreement of training and generation. Formulas are in test_clipped_pg.py."""

import math

import pytest
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.divergence import agreement_metrics, calculate_kl, importance_weights
from tests.unit.algorithms.losses.test_clipped_pg import bounded


def test_clamps_and_their_absence():
    logprobs, reference = torch.tensor([0.0, 0.0]), torch.tensor([5.0, -5.0])
    assert calculate_kl(logprobs, reference, "k1", 2.0, None).tolist() == [-2.0, 2.0]
    assert calculate_kl(logprobs, reference, "k1", None, 3.0).tolist() == [-3.0, 3.0]
    assert calculate_kl(logprobs, reference, "k1", None, None).tolist() == [-5.0, 5.0]
    assert calculate_kl(logprobs, reference, "k3").tolist() == pytest.approx([10.0, math.exp(-5) - 1 + 5])


@pytest.mark.parametrize(
    ("kind", "used", "out_of_bounds"),
    [
        ("tis", [0.5, 1.0, 2.0], [False, False, True]),
        ("tis", [0.8, 1.0, 2.0], [True, False, True]),
        ("icepop", [0.5, 1.0, 0.0], [False, False, True]),  # the bound itself is inside
    ],
)
def test_weights_beyond_their_bounds_are_clamped_or_left_out(kind, used, out_of_bounds):
    cfg = ClippedPGLossConfig.model_validate(bounded(kind, used[0], 2.0))
    weights = importance_weights(torch.tensor([[0.5, 1.0, 4.0]]).log(), torch.zeros(1, 3), torch.ones(1, 3), cfg)
    assert weights.used[0].tolist() == pytest.approx(used)
    assert weights.out_of_bounds[0].tolist() == out_of_bounds


def test_the_worst_sample_is_seen_among_others():
    prev = torch.zeros(3, 4)
    gen = torch.tensor([[0.0] * 4, [0.0, 0.0, -1.0, -1.0], [-9.0] * 4])
    mask = torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4])
    metrics = agreement_metrics(prev, gen * mask, mask, mask.sum())
    assert metrics["sample_mult_prob_error_max"].item() == pytest.approx((2 + 2 * math.e) / 4)


def test_agreement_by_hand():
    prev, gen = torch.tensor([[math.log(0.4)]]), torch.tensor([[math.log(0.5)]])
    metrics = agreement_metrics(prev, gen, torch.ones(1, 1), torch.tensor(1.0))
    assert metrics["token_mult_prob_error"].item() == pytest.approx(1.25)
    assert metrics["gen_kl_error"].item() == pytest.approx(0.8 - 1 - math.log(0.8), abs=1e-6)
    assert metrics["policy_kl_error"].item() == pytest.approx(1.25 - 1 - math.log(1.25), abs=1e-6)
    ratios = (0.45 / 0.4, 0.45 / 0.5)
    js = sum(r - 1 - math.log(r) for r in ratios) / 2
    assert metrics["js_divergence_error"].item() == pytest.approx(js, abs=1e-6)

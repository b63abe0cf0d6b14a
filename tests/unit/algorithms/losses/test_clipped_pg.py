"""The loss against numbers worked out by hand, where tests/parity does not have them."""

import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.types import PolicyGradientInputs
from tests.loss_invariance import global_counts
from tests.unit.algorithms.losses.batches import random_rows

GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}
CORRECTION = {"use_importance_sampling_correction": True}
NO_KL = {"reference_policy_kl_penalty": 0.0}


def bounded(kind: str, low: float, high: float) -> dict[str, Any]:
    """A correction with weights between these."""
    bounds = {"truncated_importance_sampling_ratio_min": low, "truncated_importance_sampling_ratio": high}
    return {**CORRECTION, "truncated_importance_sampling_type": kind, **bounds}


SWITCHES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "clip_higher": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28},
    "dual_clip": {"ratio_clip_c": 1.25},
    "k1": {"reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_type": "k2"},
    "k3_clamped": {"kl_input_clamp_value": 0.2, "kl_output_clamp_value": 0.01},
    "k3_unclamped": {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "no_kl": NO_KL,
    "on_policy_kl": {"use_on_policy_kl_approximation": True},
    "sequence_loss": {"token_level_loss": False},
    "gspo": {**GSPO, "ratio_clip_min": 0.05},
    "gspo_corrected": {**GSPO, **CORRECTION, "truncated_importance_sampling_ratio": 1.1},
    "dr_grpo": {"length_normalizer": 7},
    "on_policy": {"force_on_policy_ratio": True},
    "reinforce": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True},
    "correction": CORRECTION,
    "tis": {**CORRECTION, "truncated_importance_sampling_ratio": 1.1},
    "icepop": bounded("icepop", 0.8, 1.2),
    "seq_mask_tis": bounded("seq-mask-tis", 0.95, 1.05),
}


def config(name: str) -> ClippedPGLossConfig:
    return ClippedPGLossConfig.model_validate({"reference_policy_kl_penalty": 0.1} | SWITCHES[name])


def random_batch(num_rows: int, seed: int) -> tuple[torch.Tensor, PolicyGradientInputs]:
    """Previous logprobs, and others near them."""
    logprobs, rows = random_rows(num_rows, seed)
    prev = logprobs.detach()
    generator = torch.Generator().manual_seed(seed + 1)

    def near(scale: float) -> torch.Tensor:
        return prev + scale * torch.randn(prev.shape, generator=generator)

    inputs = PolicyGradientInputs(
        **vars(rows),
        advantages=torch.randn(num_rows, 1, generator=generator).expand(prev.shape).clone(),
        prev_logprobs=prev,
        generation_logprobs=near(0.15),
        reference_policy_logprobs=near(0.3),
    )
    return near(0.4).requires_grad_(), inputs


def one_row(
    curr: list[float], prev: list[float], advantage: float, **changes: list[float]
) -> tuple[Any, PolicyGradientInputs]:
    """Probabilities of the tokens of one row, all valid."""

    def log(probs: list[float]) -> torch.Tensor:
        return torch.tensor([probs]).log()

    inputs = PolicyGradientInputs(
        input_ids=torch.zeros(1, len(curr), dtype=torch.int64),
        token_mask=torch.ones(1, len(curr)),
        sample_mask=torch.ones(1),
        advantages=torch.full((1, len(curr)), advantage),
        prev_logprobs=log(prev),
        generation_logprobs=log(changes.get("gen", prev)),
        reference_policy_logprobs=log(changes.get("reference", prev)),
    )
    return log(curr).requires_grad_(), inputs


def run(
    cfg: dict[str, Any], logprobs: torch.Tensor, inputs: PolicyGradientInputs
) -> tuple[float, list[float], dict[str, float]]:
    loss, metrics = ClippedPGLoss(ClippedPGLossConfig.model_validate(NO_KL | cfg))(
        logprobs, inputs, *global_counts(inputs)
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), grad[0].tolist(), {name: value.item() for name, value in metrics.items()}


def test_clip_by_hand():
    # Ratios 1.5 and 0.5 with A = 2: min(3.0, 2.4) and min(1.0, 1.6).
    loss, grad, metrics = run({}, *one_row([0.6, 0.2], [0.4, 0.4], 2.0))
    assert loss == pytest.approx(-(2.4 + 1.0) / 2)
    assert grad == pytest.approx([0.0, -1.0 / 2])  # the clipped token has no gradient
    assert metrics["clip_fraction"] == 0.5
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    assert metrics["probs_ratio_clamped"] == pytest.approx(1.0)
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == pytest.approx((0.5, 1.5))
    assert (metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"]) == pytest.approx((0.8, 1.2))


def test_kl_in_reward_is_reported_and_not_in_the_loss():
    batch = one_row([0.5], [0.5], 0.0, reference=[0.25])
    inside, _, inside_metrics = run({"reference_policy_kl_penalty": 1.0}, *batch)
    outside, grad, metrics = run({"reference_policy_kl_penalty": 2.0, "use_kl_in_reward": True}, *batch)
    kl = 0.5 - 1 + math.log(2)
    assert inside == pytest.approx(kl) and inside_metrics["kl_penalty"] == pytest.approx(kl)
    assert outside == 0.0 and grad == [0.0] and metrics["kl_penalty"] == pytest.approx(kl)


@pytest.mark.parametrize(
    ("name", "loss", "grad"),
    [
        # Ratios 1.5 and 0.5 of previous to present, weights 4 and 0.5 of previous to generation; A = 2.
        ("on_policy", -2.0, [-1.0, -1.0]),
        ("reinforce", -(math.log(0.6) + math.log(0.2)), [-1.0, -1.0]),
        ("correction", -(2.4 * 4 + 1.0 * 0.5) / 2, [0.0, -0.25]),
        ("tis", -(2.4 * 1.1 + 1.0 * 0.5) / 2, [0.0, -0.25]),
        ("icepop", 0.0, [0.0, 0.0]),
        ("seq_mask_tis", 0.0, [0.0, 0.0]),  # the geometric mean is sqrt(2)
        ("gspo_corrected", -math.sqrt(0.75) * 2.0 * 1.1, [-math.sqrt(0.75) * 1.1] * 2),
    ],
)
def test_what_trl_does_not_have_by_hand(name: str, loss: float, grad: list[float]):
    """tests/parity has the other switches."""
    batch = one_row([0.6, 0.2], [0.4, 0.4], 2.0, gen=[0.1, 0.8])
    found, gradient, _ = run(SWITCHES[name], *batch)
    assert found == pytest.approx(loss) and gradient == pytest.approx(grad)


def test_importance_metrics_by_hand():
    batch = one_row([0.4, 0.4], [0.4, 0.4], 1.0, gen=[0.1, 0.4])
    switches = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
    loss, _, metrics = run(switches, *batch)
    assert loss == pytest.approx(-(2.0 + 1.0) / 2)
    assert metrics["sampling_importance_ratio"] == pytest.approx(2.5)
    assert metrics["is_oob_ratio"] == 0.5
    entropy = -(4.0 * math.log(0.4) + 1.0 * math.log(0.4)) / 2
    assert metrics["approx_entropy"] == pytest.approx(entropy)
    assert metrics["num_valid_samples"] == 1.0

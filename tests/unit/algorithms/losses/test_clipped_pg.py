"""The loss against numbers worked out by hand, a naive scalar version of every formula, and every split of a batch."""

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
    "no_kl": {"reference_policy_kl_penalty": 0.0},
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


def naive_loss(cfg: ClippedPGLossConfig, curr: torch.Tensor, x: PolicyGradientInputs) -> torch.Tensor:
    """Every formula with scalars, one token at a time; nothing shared with the implementation."""
    rows = [r for r in range(len(curr)) if x.sample_mask[r] > 0]
    tokens = {r: [t for t in range(curr.shape[1]) if x.token_mask[r, t] > 0] for r in rows}
    num_tokens = sum(len(t) for t in tokens.values())
    total = torch.zeros(())
    for r in rows:
        seq_log_ratio = torch.stack([curr[r, t] - x.prev_logprobs[r, t] for t in tokens[r]]).mean()
        seq_log_weight = sum((x.prev_logprobs[r, t] - x.generation_logprobs[r, t]).item() for t in tokens[r])
        row_total = torch.zeros(())
        for t in tokens[r]:
            adv, logp = x.advantages[r, t].item(), curr[r, t]
            prev, gen, ref = (
                v[r, t].item() for v in (x.prev_logprobs, x.generation_logprobs, x.reference_policy_logprobs)
            )
            if cfg.force_on_policy_ratio:
                ratio = torch.exp(logp - logp.item())
            else:
                ratio = torch.exp(seq_log_ratio if cfg.sequence_level_importance_ratios else logp - prev)
            low, high = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
            if cfg.disable_ppo_ratio:
                token = -adv * logp
            elif cfg.use_cispo:
                token = -adv * min(max(ratio.item(), low), high) * logp
            else:
                clipped = ratio.item() > high if adv >= 0 else ratio.item() < low
                token = torch.tensor(-adv * (high if adv >= 0 else low)) if clipped else -adv * ratio
                if cfg.ratio_clip_c is not None and adv < 0 and token.item() > -cfg.ratio_clip_c * adv:
                    token = torch.tensor(-cfg.ratio_clip_c * adv)
            if cfg.use_importance_sampling_correction:
                weight = math.exp(seq_log_weight if cfg.sequence_level_importance_ratios else prev - gen)
                low_w = cfg.truncated_importance_sampling_ratio_min or 0.0
                high_w = cfg.truncated_importance_sampling_ratio or math.inf
                if cfg.truncated_importance_sampling_type == "tis":
                    weight = min(max(weight, low_w), high_w)
                elif cfg.truncated_importance_sampling_type == "icepop":
                    weight = weight if low_w <= weight <= high_w else 0.0
                elif not low_w <= math.exp(seq_log_weight / len(tokens[r])) <= high_w:
                    weight = 0.0
                token = token * weight
            if cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward:
                bound = math.inf if cfg.kl_input_clamp_value is None else cfg.kl_input_clamp_value
                log_r = torch.clamp(ref - logp, -bound, bound)
                kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.exp(log_r) - 1 - log_r}
                out = math.inf if cfg.kl_output_clamp_value is None else cfg.kl_output_clamp_value
                value = torch.clamp(kl[cfg.reference_policy_kl_type], -out, out)
                if cfg.use_on_policy_kl_approximation:
                    value = value * math.exp(logp.item() - gen)
                token = token + cfg.reference_policy_kl_penalty * value
            row_total = row_total + token
        if cfg.length_normalizer is not None:
            total = total + row_total / (len(rows) * cfg.length_normalizer)
        elif cfg.token_level_loss:
            total = total + row_total / num_tokens
        else:
            total = total + row_total / len(tokens[r]) / len(rows)
    return total


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_equal_the_naive_formula(name: str, seed: int):
    cfg = config(name)
    logprobs, inputs = random_batch(4, seed)
    loss, metrics = ClippedPGLoss(cfg)(logprobs, inputs, *global_counts(inputs))
    expected = naive_loss(cfg, logprobs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert metrics["loss"].item() == loss.item()
    torch.testing.assert_close(
        torch.autograd.grad(loss, logprobs), torch.autograd.grad(expected, logprobs), rtol=1e-5, atol=1e-6
    )


NO_KL = {"reference_policy_kl_penalty": 0.0}


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

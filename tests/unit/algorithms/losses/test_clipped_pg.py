"""The loss and its parts against numbers worked out by hand, where tests/parity does not have them."""

import math
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.losses.divergence import agreement_metrics, calculate_kl, importance_weights
from nemo_rl.types import LikelihoodInputs, PolicyGradientInputs
from tests.unit.algorithms.losses.batches import all_valid, evaluated, random_rows

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
    "no_kl_reinforce": {**NO_KL, "disable_ppo_ratio": True},
    "no_kl_cispo": {**NO_KL, "use_cispo": True},
    "no_kl_dual_clip": {**NO_KL, "ratio_clip_c": 1.25},
    "no_kl_gspo_corrected": {**NO_KL, **GSPO, **CORRECTION, "truncated_importance_sampling_ratio": 1.1},
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

    columns = {"advantages": torch.randn(num_rows, 1, generator=generator).expand(prev.shape).clone()}
    columns |= {"generation_logprobs": near(0.15), "reference_policy_logprobs": near(0.3)}
    inputs = PolicyGradientInputs(**vars(rows), prev_logprobs=prev, **columns)
    return near(0.4).requires_grad_(), inputs


def random_likelihood_batch(num_rows: int, seed: int) -> tuple[torch.Tensor, LikelihoodInputs]:
    """Every other row is good."""
    logprobs, inputs = random_batch(num_rows, seed)
    return logprobs, LikelihoodInputs(**vars(inputs), nll_weights=torch.arange(num_rows) % 2 / 7)


def random_batch_twice(num_rows: int, seed: int) -> tuple[torch.Tensor, PolicyGradientInputs]:
    """Logprobs with and without filters."""
    logprobs, inputs = random_batch(num_rows, seed)
    return torch.stack([logprobs, logprobs - 0.1], dim=-1).detach().requires_grad_(), inputs


def one_row(
    curr: list[float], prev: list[float], advantage: float, **changes: list[float]
) -> tuple[Any, PolicyGradientInputs]:
    """Probabilities of the tokens of one row, all valid."""

    def log(probs: list[float]) -> torch.Tensor:
        return torch.tensor([probs]).log()

    columns = {"prev_logprobs": log(prev), "advantages": torch.full((1, len(curr)), advantage)}
    columns["generation_logprobs"] = log(changes.get("gen", prev))
    columns["reference_policy_logprobs"] = log(changes.get("reference", prev))
    return log(curr).requires_grad_(), all_valid(PolicyGradientInputs, 1, len(curr), **columns)


def run(
    cfg: dict[str, Any], logprobs: torch.Tensor, inputs: PolicyGradientInputs
) -> tuple[float, list[float], dict[str, float]]:
    loss_fn = ClippedPGLoss(ClippedPGLossConfig.model_validate(NO_KL | cfg))
    loss, gradient, metrics = evaluated(loss_fn, logprobs, inputs)
    return loss, gradient[0].tolist(), metrics


@pytest.mark.parametrize("name", SWITCHES)
def test_it_says_whether_rows_without_advantage_have_a_gradient(name: str):
    logprobs, inputs = random_batch(6, seed=3)
    inputs.advantages[:3] = 0.0
    loss_fn = ClippedPGLoss(config(name))
    _, gradient, _ = evaluated(loss_fn, logprobs, inputs)
    assert bool((gradient[:3] == 0).all()) == loss_fn.only_advantages_teach
    assert bool((gradient[3:] != 0).any())


def test_clip_by_hand():
    # Ratios 1.5, 0.5 and 1 with A = 2: min(3.0, 2.4), min(1.0, 1.6) and 2.
    batch = one_row([0.6, 0.2, 0.4], [0.4, 0.4, 0.4], 2.0)
    loss, grad, metrics = run({}, *batch)
    assert loss == pytest.approx(-(2.4 + 1.0 + 2.0) / 3)
    assert grad == pytest.approx([0.0, -1.0 / 3, -2.0 / 3])  # the clipped token has no gradient
    want = {"clip_fraction": 1 / 3, "probs_ratio": 1.0, "probs_ratio_min": 0.5, "probs_ratio_max": 1.5}
    want |= {"probs_ratio_clamped": 1.0, "probs_ratio_clamped_min": 0.8, "probs_ratio_clamped_max": 1.2}
    assert {name: metrics[name] for name in want} == pytest.approx(want)
    assert run({"use_cispo": True}, *batch)[2]["clip_fraction"] == pytest.approx(2 / 3)


def test_kl_in_reward_is_reported_and_not_in_the_loss():
    batch = one_row([0.5], [0.5], 0.0, reference=[0.25])
    inside, _, inside_metrics = run({"reference_policy_kl_penalty": 1.0}, *batch)
    outside, grad, metrics = run({"reference_policy_kl_penalty": 2.0, "use_kl_in_reward": True}, *batch)
    kl = 0.5 - 1 + math.log(2)
    assert inside == pytest.approx(kl) and inside_metrics["kl_penalty"] == pytest.approx(kl)
    assert outside == 0.0 and grad == [0.0] and metrics["kl_penalty"] == pytest.approx(kl)


def test_the_kl_of_a_filtered_policy_is_of_both_without_filters():
    """The policy term has the filtered logprobs, the KL and its weight the unfiltered ones."""
    logprobs, inputs = one_row([0.5], [0.5], 1.0, gen=[0.8], reference=[0.25])
    both = torch.stack([logprobs.detach(), torch.tensor([[0.4]]).log()], dim=-1).requires_grad_()
    on_policy = {"reference_policy_kl_penalty": 1.0, "use_on_policy_kl_approximation": True}
    loss_fn = ClippedPGLoss(ClippedPGLossConfig.model_validate(on_policy))
    loss, gradient, metrics = evaluated(loss_fn, both, inputs)
    kl = (0.25 / 0.4 - 1 - math.log(0.25 / 0.4)) * 0.4 / 0.8
    assert loss == pytest.approx(-1.0 + kl) and metrics["kl_penalty"] == pytest.approx(kl)
    assert gradient[0, 0].tolist() == pytest.approx([-1.0, (1 - 0.25 / 0.4) * 0.4 / 0.8])


def test_the_likelihood_of_good_samples_by_hand():
    logprobs, inputs = one_row([0.5, 0.2], [0.5, 0.2], 0.0)
    good = LikelihoodInputs(**vars(inputs), nll_weights=torch.tensor([0.25]))
    cfg = NO_KL | {"positive_example_nll_weight": 0.1}
    loss, grad, metrics = run(cfg, logprobs, good)
    nll = -(math.log(0.5) + math.log(0.2)) / 4
    assert loss == pytest.approx(0.1 * nll) and metrics["positive_example_nll"] == pytest.approx(nll)
    assert grad == pytest.approx([-0.1 / 4] * 2)


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
    loss, _, metrics = run(CORRECTION | {"truncated_importance_sampling_ratio": 2.0}, *batch)
    assert loss == pytest.approx(-(2.0 + 1.0) / 2)
    want = {"sampling_importance_ratio": 2.5, "is_oob_ratio": 0.5, "num_valid_samples": 1.0}
    want["approx_entropy"] = -(4.0 * math.log(0.4) + 1.0 * math.log(0.4)) / 2
    assert {name: metrics[name] for name in want} == pytest.approx(want)


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
    assert weights.used[0].tolist() == pytest.approx(used) and weights.out_of_bounds[0].tolist() == out_of_bounds


def test_agreement_by_hand():
    prev, gen = torch.tensor([[math.log(0.4)]]), torch.tensor([[math.log(0.5)]])
    metrics = agreement_metrics(prev, gen, torch.ones(1, 1), torch.tensor(1.0))
    assert metrics["token_mult_prob_error"].item() == pytest.approx(1.25)
    assert metrics["gen_kl_error"].item() == pytest.approx(0.8 - 1 - math.log(0.8), abs=1e-6)
    assert metrics["policy_kl_error"].item() == pytest.approx(1.25 - 1 - math.log(1.25), abs=1e-6)
    js = sum(r - 1 - math.log(r) for r in (0.45 / 0.4, 0.45 / 0.5)) / 2
    assert metrics["js_divergence_error"].item() == pytest.approx(js, abs=1e-6)

    # The worst of three samples, of which one is masked.
    gen = torch.tensor([[0.0] * 4, [0.0, 0.0, -1.0, -1.0], [-9.0] * 4])
    mask = torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4])
    metrics = agreement_metrics(torch.zeros(3, 4), gen * mask, mask, mask.sum())
    assert metrics["sample_mult_prob_error_max"].item() == pytest.approx((2 + 2 * math.e) / 4)

"""How far two policies are apart on sampled tokens: KL estimates, importance weights, agreement metrics.

All functions take log-probabilities of the tokens that were sampled, not whole distributions.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.aggregate import masked_max, masked_row_mean, token_mean

KLType = Literal["k1", "k2", "k3"]


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: KLType = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
) -> Tensor:
    """Estimate of KL(policy || reference) for each token; any shape, same shape out.

    J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. For tokens x drawn from
    the policy, with r = reference(x) / policy(x):

        k1 = -log r              unbiased, high variance, can be negative
        k2 = (log r)^2 / 2       biased, low variance, its gradient is the one of the true KL
        k3 = (r - 1) - log r     unbiased, low variance, never negative

    `input_clamp_value` bounds |log r| before `exp`, `output_clamp_value` bounds the estimate; `None` turns either off.
    A clamped token gets no gradient. Clamping hides an infinite log-ratio: check the inputs for finiteness first.
    """
    log_r = logprobs_reference - logprobs
    if input_clamp_value is not None:
        log_r = log_r.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        kl = -log_r
    elif kl_type == "k2":
        kl = log_r.square() / 2
    else:
        # E[r - 1] is 0 under the policy, so adding it to k1 keeps the mean and removes variance. expm1 keeps the digits
        # of a small log r, which exp(log r) - 1 would cancel.
        kl = torch.expm1(log_r) - log_r
    if output_clamp_value is not None:
        kl = kl.clamp(-output_clamp_value, output_clamp_value)
    return kl


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor, cfg: ClippedPGLossConfig) -> Tensor:
    """`calculate_kl` with the estimator and the clamps of `cfg`."""
    clamps = cfg.kl_input_clamp_value, cfg.kl_output_clamp_value
    return calculate_kl(logprobs, reference_logprobs, cfg.reference_policy_kl_type, *clamps)


# -- importance weights: tokens come from the generation engine, the gradient belongs to the trainer's policy


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """[B, S] each, without gradient. Constant along a row for sequence-level weights."""

    raw: Tensor  # exp(prev - generation)
    used: Tensor  # after the bounds; this multiplies the loss
    out_of_bounds: Tensor  # bool: the bounds changed the weight


def importance_weights(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, cfg: ClippedPGLossConfig
) -> ImportanceWeights:
    """exp(prev - generation) per token, or per sequence (product over its tokens), and the same within its bounds.

    Weighting by the ratio of trainer to engine probability makes an expectation over the engine's samples one over the
    trainer's policy. Inputs must be 0 wherever `mask` is 0. Bounds trade a little bias for finite variance, as
    `cfg.truncated_importance_sampling_type` says:

    - `None`: the weights are unchanged.
    - `tis`: weights are clamped (truncated importance sampling, https://fengyao.notion.site/off-policy-rl).
    - `icepop`: weights out of bounds become 0, which drops the token (Ring-1T, arXiv 2510.18855).
    - `seq-mask-tis`: a sequence is dropped if the geometric mean of its weights is out of bounds; other weights are
      unchanged.

    Dropped tokens still count in the loss's divisor, so that it does not depend on the weights.
    """
    # Detached: the weight corrects where samples come from and is no part of what is optimised.
    log_weights = (prev_logprobs - generation_logprobs).detach()
    if cfg.sequence_level_importance_ratios:
        log_weights = (log_weights * mask).sum(-1, keepdim=True).expand_as(log_weights)
    raw, kind = log_weights.exp(), cfg.truncated_importance_sampling_type
    low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if kind is None:
        return ImportanceWeights(raw=raw, used=raw, out_of_bounds=torch.zeros_like(raw, dtype=torch.bool))
    if kind == "seq-mask-tis":
        # A product over tokens grows with length; the geometric mean lets one bound serve all lengths.
        geometric_mean = masked_row_mean(raw.log(), mask).exp()
        out_of_bounds = ((geometric_mean < low) | (geometric_mean > high))[:, None].expand_as(raw)
    else:
        out_of_bounds = (raw < low) | (raw > high)
    used = raw.clamp(low, high) if kind == "tis" else torch.where(out_of_bounds, 0.0, raw)
    return ImportanceWeights(raw=raw, used=used, out_of_bounds=out_of_bounds)


def agreement_metrics(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, global_valid_toks: Tensor
) -> dict[str, Tensor]:
    """How well trainer and generation engine agree on the sampled tokens. Inputs [B, S], 0 wherever `mask` is 0.

    token_mult_prob_error  mean of exp(|generation - prev|); 1 is perfect
    sample_mult_prob_error_max  the same mean of the worst sample
    gen_kl_error           KL(generation || prev), k3
    policy_kl_error        KL(prev || generation), k3 (on the generation engine's tokens)
    js_divergence_error    half the KL of each to their equal mixture, k3
    """
    prev, gen = prev_logprobs.detach(), generation_logprobs.detach()
    # The log of (p + q) / 2 from logs, because p and q themselves underflow for unlikely tokens.
    mixture = torch.logaddexp(prev, gen) - math.log(2.0)

    def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
        return calculate_kl(logprobs, reference, "k3", input_clamp_value=None, output_clamp_value=None)

    per_token = {
        "token_mult_prob_error": (gen - prev).abs().exp(),
        "gen_kl_error": k3(gen, prev),
        "policy_kl_error": k3(prev, gen),
        "js_divergence_error": (k3(prev, mixture) + k3(gen, mixture)) / 2,
    }
    metrics = {name: token_mean(values, mask, global_valid_toks) for name, values in per_token.items()}
    of_rows = masked_row_mean(per_token["token_mult_prob_error"], mask)
    return metrics | {"sample_mult_prob_error_max": masked_max(of_rows, mask.sum(-1) > 0)}

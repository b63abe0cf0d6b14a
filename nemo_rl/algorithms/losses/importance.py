"""How far the generation engine's distribution is from the trainer's, and weights that correct for it.

Tokens are sampled by the generation engine (log-probability `generation_logprobs`) but the policy gradient assumes the
trainer's policy at the start of the step (`prev_logprobs`). Weighting by exp(prev - generation) corrects the
expectation; bounding the weights trades a little bias for finite variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_rl.algorithms.losses.aggregate import masked_row_mean, token_mean
from nemo_rl.algorithms.losses.kl import calculate_kl

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """[B, S] float tensors without gradient. Constant along a row for sequence-level weights."""

    raw: Tensor  # exp(prev - generation)
    used: Tensor  # after the bounds; this multiplies the loss
    out_of_bounds: Tensor  # bool: the bounds changed the weight


def raw_importance_weights(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, *, sequence_level: bool
) -> Tensor:
    """exp(prev - generation) per token, or per sequence (product over its tokens), repeated over the row: [B, S].

    Inputs must be 0 wherever `mask` is 0.
    """
    log_weights = (prev_logprobs - generation_logprobs).detach()
    if sequence_level:
        log_weights = (log_weights * mask).sum(-1, keepdim=True).expand_as(log_weights)
    return log_weights.exp()


def bound_importance_weights(
    raw: Tensor, mask: Tensor, *, kind: TruncationType | None, minimum: float | None, maximum: float | None
) -> ImportanceWeights:
    """Apply the bounds [`minimum`, `maximum`]; a missing one is 0 or infinity.

    - `None`: the weights as they are.
    - `tis`: clamped into the bounds (truncated importance sampling, https://fengyao.notion.site/off-policy-rl).
    - `icepop`: 0 outside the bounds: the token is left out (Ring-1T, arXiv 2510.18855).
    - `seq-mask-tis`: a whole sequence is left out when the geometric mean of its weights is out of bounds; the tokens
      of the others keep their weights as they are.

    Tokens left out stay in the loss's divisor, so that it does not depend on the weights.
    """
    low = 0.0 if minimum is None else minimum
    high = math.inf if maximum is None else maximum
    if kind is None:
        return ImportanceWeights(raw=raw, used=raw, out_of_bounds=torch.zeros_like(raw, dtype=torch.bool))
    if kind == "tis":
        return ImportanceWeights(raw=raw, used=raw.clamp(low, high), out_of_bounds=(raw < low) | (raw > high))
    if kind == "icepop":
        out_of_bounds = (raw < low) | (raw > high)
    elif kind == "seq-mask-tis":
        geometric_mean = masked_row_mean(raw.log(), mask).exp()
        out_of_bounds = ((geometric_mean < low) | (geometric_mean > high))[:, None].expand_as(raw)
    else:
        raise ValueError(f"Unknown truncated importance sampling type {kind!r}; use tis, icepop or seq-mask-tis.")
    return ImportanceWeights(raw=raw, used=torch.where(out_of_bounds, 0.0, raw), out_of_bounds=out_of_bounds)


def agreement_metrics(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, global_valid_toks: Tensor
) -> dict[str, Tensor]:
    """How well trainer and generation engine agree on the sampled tokens. Inputs [B, S], 0 wherever `mask` is 0.

    token_mult_prob_error  mean of exp(|generation - prev|); 1 is perfect
    gen_kl_error           KL(generation || prev), k3
    policy_kl_error        KL(prev || generation), k3 (on the generation engine's tokens)
    js_divergence_error    half the KL of each to their equal mixture, k3
    """
    prev, gen = prev_logprobs.detach(), generation_logprobs.detach()
    mixture = torch.logaddexp(prev, gen) - math.log(2.0)

    def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
        return calculate_kl(logprobs, reference, "k3", input_clamp_value=None, output_clamp_value=None)

    per_token = {
        "token_mult_prob_error": (gen - prev).abs().exp(),
        "gen_kl_error": k3(gen, prev),
        "policy_kl_error": k3(prev, gen),
        "js_divergence_error": (k3(prev, mixture) + k3(gen, mixture)) / 2,
    }
    return {name: token_mean(values, mask, global_valid_toks) for name, values in per_token.items()}

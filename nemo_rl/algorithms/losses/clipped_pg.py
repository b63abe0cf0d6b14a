"""The clipped policy-gradient loss: GRPO, DAPO, GSPO, Dr.GRPO, CISPO and REINFORCE by switches of one config.

In: log-probabilities of a micro-batch and the global counts of the optimizer step. Out: the micro-batch's part of the
loss, and its part of each metric. `docs/guides/grpo.md` has the formula and the paper behind each switch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.aggregate import (
    constant_length_mean,
    divide_by_count,
    masked_max,
    masked_min,
    masked_row_mean,
    nan_unless_finite,
    sequence_mean,
    token_mean,
)
from nemo_rl.algorithms.losses.importance import (
    ImportanceWeights,
    agreement_metrics,
    bound_importance_weights,
    raw_importance_weights,
)
from nemo_rl.algorithms.losses.kl import calculate_kl
from nemo_rl.types import LossMetrics, PolicyGradientInputs


class ClippedPGLoss:
    """A `nemo_rl.types.LossFunction`.

    Values at masked positions are never looked at, whatever they are. A non-finite value at a valid position makes the
    loss NaN, also where a clamp or a clip would hide it, so that the caller can stop. A micro-batch without a valid
    token gives 0 with a graph, so that every rank can call backward.

    Works on [B, S] rows of one sequence each. A trainer that packs sequences computes its log-probabilities packed and
    unpacks them into rows before the loss: one float per token, nothing next to the logits.
    """

    inputs_type = PolicyGradientInputs

    def __init__(self, cfg: ClippedPGLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, logprobs: Tensor, inputs: PolicyGradientInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        cfg = self.cfg
        assert logprobs.shape == inputs.token_mask.shape, (logprobs.shape, inputs.token_mask.shape)
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        valid = mask > 0

        def at_valid(values: Tensor) -> Tensor:
            return torch.where(valid, values, 0.0)  # before any exp: padding may hold anything

        curr, prev = at_valid(logprobs), at_valid(inputs.prev_logprobs)
        gen, advantages = at_valid(inputs.generation_logprobs), at_valid(inputs.advantages)

        def aggregate(values: Tensor) -> Tensor:
            if cfg.length_normalizer is not None:
                return constant_length_mean(values, mask, global_valid_seqs, cfg.length_normalizer)
            if cfg.token_level_loss:
                return token_mean(values, mask, global_valid_toks)
            return sequence_mean(values, inputs.token_mask, inputs.sample_mask, global_valid_seqs)

        ratio = self._ratio(curr, prev, mask)
        ratio_clamped = ratio.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)
        policy_loss, clipped = self._policy_loss(curr, ratio, ratio_clamped, advantages)
        weights = self._importance_weights(prev, gen, mask)
        must_be_finite = [curr, prev, gen, advantages, ratio]
        if cfg.use_importance_sampling_correction:
            policy_loss = policy_loss * weights.used
            must_be_finite.append(weights.raw)
        loss = aggregate(policy_loss)

        kl = torch.zeros_like(curr)
        if cfg.reference_policy_kl_penalty != 0:
            reference = at_valid(inputs.reference_policy_logprobs)
            must_be_finite.append(reference)
            kl = self._kl(curr, gen, reference)
            if not cfg.use_kl_in_reward:
                loss = loss + cfg.reference_policy_kl_penalty * aggregate(kl)

        loss = nan_unless_finite(loss, must_be_finite)

        with torch.no_grad():
            metrics = agreement_metrics(prev, gen, mask, global_valid_toks)
            metrics |= self._importance_metrics(weights, inputs, mask, global_valid_seqs, global_valid_toks)
            for name, values in {
                "probs_ratio": ratio,
                "probs_ratio_clamped": ratio_clamped,
                "clip_fraction": clipped.to(mask.dtype),
                "kl_penalty": kl,
                "approx_entropy": -(curr - gen).exp() * curr,
            }.items():
                metrics[name] = token_mean(values, mask, global_valid_toks)
            for name, values in {"probs_ratio": ratio, "probs_ratio_clamped": ratio_clamped}.items():
                metrics[f"{name}_min"] = masked_min(values, valid)
                metrics[f"{name}_max"] = masked_max(values, valid)
            metrics["num_valid_samples"] = inputs.sample_mask.sum()
            metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _ratio(self, curr: Tensor, prev: Tensor, mask: Tensor) -> Tensor:
        """pi / pi_prev of each token; its geometric mean over the sequence with `sequence_level_importance_ratios`."""
        log_ratio = curr - (curr.detach() if self.cfg.force_on_policy_ratio else prev)
        if self.cfg.sequence_level_importance_ratios:  # GSPO, arXiv 2507.18071, eq. 7
            log_ratio = masked_row_mean(log_ratio, mask)[:, None].expand_as(log_ratio)
        return log_ratio.exp()

    def _policy_loss(
        self, curr: Tensor, ratio: Tensor, ratio_clamped: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of each token, and whether clipping changed it. All [B, S]."""
        if self.cfg.disable_ppo_ratio:  # REINFORCE: the gradient is -A * grad log pi, the value itself means nothing
            return -advantages * curr, torch.zeros_like(curr, dtype=torch.bool)
        if self.cfg.use_cispo:  # MiniMax-M1, arXiv 2506.13585, eq. 4: clip the weight, keep every token's gradient
            return -advantages * ratio_clamped.detach() * curr, ratio_clamped != ratio
        loss = torch.maximum(-advantages * ratio, -advantages * ratio_clamped)
        if self.cfg.ratio_clip_c is not None:  # dual clip, arXiv 1912.09729, eq. 5: bounded where A < 0
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.cfg.ratio_clip_c), loss)
        return loss, loss != -advantages * ratio

    def _importance_weights(self, prev: Tensor, gen: Tensor, mask: Tensor) -> ImportanceWeights:
        raw = raw_importance_weights(prev, gen, mask, sequence_level=self.cfg.sequence_level_importance_ratios)
        return bound_importance_weights(
            raw,
            mask,
            kind=self.cfg.truncated_importance_sampling_type,
            minimum=self.cfg.truncated_importance_sampling_ratio_min,
            maximum=self.cfg.truncated_importance_sampling_ratio,
        )

    def _kl(self, curr: Tensor, gen: Tensor, reference: Tensor) -> Tensor:
        cfg = self.cfg
        kl = calculate_kl(
            curr, reference, cfg.reference_policy_kl_type, cfg.kl_input_clamp_value, cfg.kl_output_clamp_value
        )
        if cfg.use_on_policy_kl_approximation:  # tokens come from the generation engine, the KL is under the policy
            kl = (curr - gen).exp().detach() * kl
        return kl

    def _importance_metrics(
        self, weights: ImportanceWeights, inputs: PolicyGradientInputs, mask: Tensor, num_seqs: Tensor, num_toks: Tensor
    ) -> LossMetrics:
        """Mean weight before the bounds, and share of items out of bounds: of sequences where weights are theirs."""
        out_of_bounds = weights.out_of_bounds.to(mask.dtype)
        if self.cfg.sequence_level_importance_ratios:
            has_tokens = inputs.sample_mask * (mask.sum(-1) > 0)
            ratio = divide_by_count((weights.raw[:, 0] * has_tokens).sum(), num_seqs)
            oob = divide_by_count((out_of_bounds[:, 0] * has_tokens).sum(), num_seqs)
        else:
            ratio, oob = token_mean(weights.raw, mask, num_toks), token_mean(out_of_bounds, mask, num_toks)
        return {"sampling_importance_ratio": ratio, "is_oob_ratio": oob}

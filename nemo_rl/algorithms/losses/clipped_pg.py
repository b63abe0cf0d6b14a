"""The clipped policy-gradient loss: GRPO, DAPO, GSPO, Dr.GRPO, CISPO and REINFORCE by switches of one config.

Log-probabilities of a micro-batch and global counts of the optimizer step -> the micro-batch's part of the loss and of
each metric. `docs/guides/grpo.md` has the formula and the paper of each switch.
"""

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
from nemo_rl.algorithms.losses.divergence import ImportanceWeights, agreement_metrics, importance_weights, reference_kl
from nemo_rl.types import LikelihoodInputs, LossMetrics, PolicyGradientInputs


class ClippedPGLoss:
    """A `nemo_rl.types.LossFunction` on rows [B, S] of one sequence each.

    Values at masked positions are ignored, NaN included. A non-finite value at a valid position makes the loss
    NaN, even if a clamp or a clip would hide it, so that the caller can stop. A micro-batch without a valid token gives
    0 with a graph, so that every rank can call backward.
    """

    def __init__(self, cfg: ClippedPGLossConfig) -> None:
        self.cfg = cfg

    @property
    def only_advantages_teach(self) -> bool:
        """Whether a row with advantages of 0 has no gradient: nothing is added to the policy gradient, but the
        likelihood of rows with `nll_weights`."""
        return self.cfg.reference_policy_kl_penalty == 0 and not self.cfg.use_kl_in_reward

    @property
    def inputs_type(self) -> type[PolicyGradientInputs]:
        return LikelihoodInputs if self.cfg.positive_example_nll_weight > 0 else PolicyGradientInputs

    def __call__(
        self, outputs: Tensor, inputs: PolicyGradientInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """`outputs`: logprobs [B, S]; or [B, S, 2] of `LogprobsTwice`, of which the KL takes the unfiltered ones."""
        cfg = self.cfg
        logprobs, unfiltered = (outputs, outputs) if outputs.ndim == 2 else outputs.unbind(-1)
        assert logprobs.shape == inputs.token_mask.shape, (logprobs.shape, inputs.token_mask.shape)
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        valid = mask > 0

        def at_valid(values: Tensor) -> Tensor:
            return torch.where(valid, values, 0.0)  # before any exp: 0 * inf at a masked position would be NaN

        curr, prev = at_valid(logprobs), at_valid(inputs.prev_logprobs)
        gen, advantages = at_valid(inputs.generation_logprobs), at_valid(inputs.advantages)

        def aggregate(values: Tensor) -> Tensor:
            if cfg.length_normalizer is not None:
                return constant_length_mean(values, mask, global_valid_seqs, cfg.length_normalizer)
            if cfg.token_level_loss:
                return token_mean(values, mask, global_valid_toks)
            return sequence_mean(values, inputs.token_mask, inputs.sample_mask, global_valid_seqs)

        # The ratio pi / pi_prev corrects for the optimizer steps since the samples were scored.
        log_ratio = curr - (curr.detach() if cfg.force_on_policy_ratio else prev)
        if cfg.sequence_level_importance_ratios:  # GSPO, arXiv 2507.18071, eq. 7: geometric mean over the sequence
            log_ratio = masked_row_mean(log_ratio, mask)[:, None].expand_as(log_ratio)
        ratio = log_ratio.exp()  # 1 with force_on_policy_ratio, and its gradient is the gradient of log pi
        ratio_clamped = ratio.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)
        policy_loss, clipped = self._policy_loss(curr, ratio, ratio_clamped, advantages)
        must_be_finite = [curr, prev, gen, advantages, ratio]

        # The weights correct for the difference between the engine that sampled and the policy that scored.
        weights = importance_weights(prev, gen, mask, cfg)
        # The weight multiplies after the clip: the clip bounds the step, the weight only says whose sample it is.
        if cfg.use_importance_sampling_correction:
            policy_loss = policy_loss * weights.used
            must_be_finite.append(weights.raw)
        loss = aggregate(policy_loss)

        kl = torch.zeros_like(curr)
        if cfg.reference_policy_kl_penalty != 0:
            # Top-k and top-p filter the policy and not the reference, so the KL is of both without filters.
            whole, reference = at_valid(unfiltered), at_valid(inputs.reference_policy_logprobs)
            must_be_finite += [whole, reference]
            kl = reference_kl(whole, reference, cfg)
            if cfg.use_on_policy_kl_approximation:  # tokens come from the generation engine, the KL is under the policy
                kl = (whole - gen).exp().detach() * kl
            if not cfg.use_kl_in_reward:
                loss = loss + cfg.reference_policy_kl_penalty * aggregate(kl)
        likelihood: dict[str, Tensor] = {}
        if isinstance(inputs, LikelihoodInputs):  # VAPO, arXiv 2504.05118, section 4.3
            nll = -(curr * at_valid(inputs.nll_weights[:, None].expand_as(curr))).sum()
            likelihood["positive_example_nll"] = nll
            loss = loss + cfg.positive_example_nll_weight * nll
        loss = nan_unless_finite(loss, must_be_finite)

        with torch.no_grad():
            metrics = agreement_metrics(prev, gen, mask, global_valid_toks)
            metrics |= self._importance_metrics(weights, inputs, mask, global_valid_seqs, global_valid_toks)
            for name, values in {
                "probs_ratio": ratio,
                "probs_ratio_clamped": ratio_clamped,
                "clip_fraction": clipped.to(mask.dtype),
                "kl_penalty": kl,
                # -E[log pi] is the entropy; tokens come from the engine, hence the weight pi / pi_engine.
                "approx_entropy": -(curr - gen).exp() * curr,
            }.items():
                metrics[name] = token_mean(values, mask, global_valid_toks)
            for name, values in {"probs_ratio": ratio, "probs_ratio_clamped": ratio_clamped}.items():
                metrics[f"{name}_min"] = masked_min(values, valid)
                metrics[f"{name}_max"] = masked_max(values, valid)
            metrics["num_valid_samples"] = inputs.sample_mask.sum()
            metrics |= likelihood
            metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _policy_loss(
        self, curr: Tensor, ratio: Tensor, ratio_clamped: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of each token, and whether clipping changed it. All [B, S]."""
        if self.cfg.disable_ppo_ratio:  # REINFORCE: the gradient is -A * grad log pi, the value itself means nothing
            return -advantages * curr, torch.zeros_like(curr, dtype=torch.bool)
        if self.cfg.use_cispo:  # MiniMax-M1, arXiv 2506.13585, eq. 4: clip the weight, keep every token's gradient
            return -advantages * ratio_clamped.detach() * curr, ratio_clamped != ratio
        # The larger of the two losses: a token that has moved far enough in the direction of its advantage gets no more
        # gradient, a token that has moved in the wrong direction keeps it (PPO, arXiv 1707.06347, eq. 7).
        loss = torch.maximum(-advantages * ratio, -advantages * ratio_clamped)
        if self.cfg.ratio_clip_c is not None:  # dual clip, arXiv 1912.09729, eq. 5: bounded where A < 0
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.cfg.ratio_clip_c), loss)
        return loss, loss != -advantages * ratio

    def _importance_metrics(
        self, weights: ImportanceWeights, inputs: PolicyGradientInputs, mask: Tensor, num_seqs: Tensor, num_toks: Tensor
    ) -> LossMetrics:
        """Mean weight before the bounds, and share out of bounds, over tokens or, for sequence weights, sequences."""
        out_of_bounds = weights.out_of_bounds.to(mask.dtype)
        if self.cfg.sequence_level_importance_ratios:
            has_tokens = inputs.sample_mask * (mask.sum(-1) > 0)
            ratio = divide_by_count((weights.raw[:, 0] * has_tokens).sum(), num_seqs)
            oob = divide_by_count((out_of_bounds[:, 0] * has_tokens).sum(), num_seqs)
        else:
            ratio, oob = token_mean(weights.raw, mask, num_toks), token_mean(out_of_bounds, mask, num_toks)
        return {"sampling_importance_ratio": ratio, "is_oob_ratio": oob}

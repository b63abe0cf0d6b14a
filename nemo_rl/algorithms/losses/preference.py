"""Losses of pairs: DPO and its variants, and reward models. Even rows are the chosen, odd rows the rejected ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl.algorithms.config.supervised import DPOLossConfig, RewardModelLossConfig
from nemo_rl.algorithms.losses.aggregate import divide_by_count, nan_unless_finite
from nemo_rl.types import LossInputs, LossMetrics


@dataclass(kw_only=True)
class PairInputs(LossInputs):
    """Even rows are the chosen, odd rows the rejected sequences of pairs. [B] each."""

    margin: Tensor  # of the chosen row; 0 on rejected ones


@dataclass(kw_only=True)
class PreferenceInputs(PairInputs):
    """Pairs with their logprobs under the reference policy. [B] each."""

    reference_logprob_sum: Tensor  # sum over the loss tokens


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a micro-batch, [P] with P = B / 2, and how many the optimizer step has."""

    mask: Tensor  # 1 where both sequences take part
    global_count: Tensor  # 0-d

    @classmethod
    def of(cls, inputs: LossInputs, global_valid_seqs: Tensor) -> Pairs:
        """`global_valid_seqs` counts sequences, so pairs are half of it."""
        # A pair with one sequence left out has nothing to compare, so its other sequence is left out too.
        assert len(inputs.sample_mask) % 2 == 0, "half a pair"
        return cls(mask=inputs.sample_mask[::2] * inputs.sample_mask[1::2], global_count=global_valid_seqs / 2)

    @property
    def row_mask(self) -> Tensor:
        """[B]"""
        return self.mask.repeat_interleave(2)

    def mean(self, values: Tensor) -> Tensor:
        """Sum over the pairs that take part / pairs of the optimizer step; values [P]."""
        return divide_by_count((values * self.mask).sum(), self.global_count)

    def reward_metrics(self, chosen: Tensor, rejected: Tensor) -> LossMetrics:
        """Means of rewards [P] and of their difference, and the share of pairs whose chosen one has the larger."""
        return {
            "accuracy": self.mean((chosen > rejected).to(chosen.dtype)),
            "rewards_chosen_mean": self.mean(chosen),
            "rewards_rejected_mean": self.mean(rejected),
            "rewards_margin_mean": self.mean(chosen - rejected),
            "num_valid_samples": self.mask.sum(),
        }


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """[B, ...] -> chosen and rejected, [B / 2, ...] each."""
    return values[::2], values[1::2]


class PreferenceLoss:
    """A `nemo_rl.types.LossFunction` of scores [B, S]: even rows chosen, odd rows rejected.

    A row holds its score at one position and 0 elsewhere, so its score is the sum. The loss of a pair is
    -logsigmoid(chosen - rejected) (Bradley and Terry, 1952; arXiv 2203.02155, eq. 1), with `use_margin`
    -logsigmoid(chosen - rejected - margin) (Llama 2, arXiv 2307.09288, eq. 2).

    Values of masked pairs are ignored; a non-finite one elsewhere makes the loss NaN.
    """

    inputs_type = PairInputs

    def __init__(self, cfg: RewardModelLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, scores: Tensor, inputs: PairInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """Metrics: the loss, and the scores as rewards; a pair counts as accurate whatever its margin."""
        assert scores.shape == inputs.token_mask.shape, (scores.shape, inputs.token_mask.shape)
        pairs = Pairs.of(inputs, global_valid_seqs)
        chosen, rejected = split_pairs(torch.where(pairs.row_mask[:, None] > 0, scores, 0.0).sum(-1))
        difference = chosen - rejected  # a constant added to all scores changes nothing
        must_be_finite = [chosen, rejected]
        if self.cfg.use_margin:
            margin = torch.where(pairs.mask > 0, inputs.margin[::2], 0.0)
            difference = difference - margin
            must_be_finite.append(margin)
        loss = nan_unless_finite(pairs.mean(-logsigmoid(difference)), must_be_finite)
        metrics = pairs.reward_metrics(chosen, rejected) | {"loss": loss}
        return loss, {name: value.detach() for name, value in metrics.items()}


class DPOLoss:
    """A `nemo_rl.types.LossFunction` of logprobs [B, S]: even rows chosen, odd rows rejected.

    With h = log-ratio of the chosen - log-ratio of the rejected sequence, a log-ratio being the logprob under the
    policy minus that under the reference policy, summed over the loss tokens (per token with
    `preference_average_log_probs`), the loss of a pair is

        sigmoid  -logsigmoid(beta h); with label smoothing e
                 -(1 - e) logsigmoid(beta h) - e logsigmoid(-beta h)
                 DPO, arXiv 2305.18290, eq. 7; cDPO, https://ericmitchell.ai/cdpo.pdf
        robust   (-(1 - e) logsigmoid(beta h) + e logsigmoid(-beta h)) / (1 - 2 e)
                 rDPO, arXiv 2403.00409: its mean over flipped labels is the sigmoid loss of the true ones
        hinge    max(0, 1 - beta h)
                 RSO, arXiv 2309.06657: the hinge loss of SLiC on log-ratios
        ipo      (h - 1 / (2 beta))^2
                 IPO, arXiv 2310.12036, eq. 17

    IPO's h is always per token, as in TRL: a fixed margin between sums would demand less per token of longer answers.
    The SFT term is the mean over pairs of the chosen sequence's negative log-likelihood.

    If policy and reference are equal, the preference loss is ln 2 (ipo: 1 / (4 beta^2), hinge: 1). Values at masked
    positions and of masked pairs are ignored; a non-finite one elsewhere makes the loss NaN.
    """

    inputs_type = PreferenceInputs

    def __init__(self, cfg: DPOLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, logprobs: Tensor, inputs: PreferenceInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """Metrics: the loss and its two terms; rewards beta * log-ratio, logprobs as they are compared."""
        cfg = self.cfg
        assert logprobs.shape == inputs.token_mask.shape, (logprobs.shape, inputs.token_mask.shape)
        pairs = Pairs.of(inputs, global_valid_seqs)
        mask = inputs.token_mask * pairs.row_mask[:, None]
        # In float64: the loss needs a small difference of two large sums, which float32 rounding would swamp.
        sums = torch.where(mask > 0, logprobs, 0.0).double().sum(-1).float()
        # logsigmoid saturates and would hide an infinite log-ratio, so sums and reference are checked below.
        reference = torch.where(pairs.row_mask > 0, inputs.reference_logprob_sum, 0.0)
        num_tokens = mask.sum(-1)

        def per_token(values: Tensor, average: bool) -> Tensor:
            return divide_by_count(values, num_tokens) if average else values

        average = cfg.preference_average_log_probs or cfg.preference_loss == "ipo"
        chosen, rejected = split_pairs(per_token(sums - reference, average))
        preference_loss = pairs.mean(self._preference_loss(chosen - rejected))
        sft_loss = pairs.mean(-per_token(sums, cfg.sft_average_log_probs)[::2])
        loss = cfg.preference_loss_weight * preference_loss
        if cfg.sft_loss_weight > 0:
            loss = loss + cfg.sft_loss_weight * sft_loss
        loss = nan_unless_finite(loss, [sums, reference])
        with torch.no_grad():
            beta = cfg.reference_policy_kl_penalty
            logprobs_chosen, logprobs_rejected = split_pairs(per_token(sums, average))
            metrics = pairs.reward_metrics(beta * chosen, beta * rejected) | {
                "loss": loss,
                "preference_loss": preference_loss,
                "sft_loss": sft_loss,
                "logprobs_chosen_mean": pairs.mean(logprobs_chosen),
                "logprobs_rejected_mean": pairs.mean(logprobs_rejected),
            }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _preference_loss(self, difference: Tensor) -> Tensor:
        """Loss of each pair from its difference of log-ratios; [P] each."""
        cfg = self.cfg
        beta, smoothing = cfg.reference_policy_kl_penalty, cfg.label_smoothing
        if cfg.preference_loss == "ipo":
            return (difference - 1 / (2 * beta)).square()
        if cfg.preference_loss == "hinge":
            return torch.relu(1 - beta * difference)
        as_labelled, flipped = -logsigmoid(beta * difference), -logsigmoid(-beta * difference)
        if cfg.preference_loss == "robust":
            return ((1 - smoothing) * as_labelled - smoothing * flipped) / (1 - 2 * smoothing)
        return (1 - smoothing) * as_labelled + smoothing * flipped

"""The loss of direct preference optimisation and its variants."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl.algorithms.loss_config import DPOLossConfig
from nemo_rl.algorithms.losses.aggregate import divide_by_count, nan_unless_finite
from nemo_rl.algorithms.losses.pairs import Pairs, split_pairs
from nemo_rl.types import LossMetrics, PreferenceInputs


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

    IPO's h is per token whatever the switch says, as in TRL: a fixed margin between sums would ask less per token of
    longer answers. The SFT term is the mean over pairs of the chosen sequence's negative log-likelihood.

    A policy equal to the reference has the preference loss ln 2 (ipo: 1 / (4 beta^2), hinge: 1). Values at masked
    positions and of masked pairs are never looked at; a non-finite one elsewhere makes the loss NaN.
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
        # Float64, or sums of long answers would differ from the reference's by rounding alone.
        sums = torch.where(mask > 0, logprobs, 0.0).double().sum(-1).float()
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

"""The negative log-likelihood of supervised fine-tuning."""

import torch
from torch import Tensor

from nemo_rl.algorithms.losses.aggregate import nan_unless_finite, token_mean
from nemo_rl.types import LossInputs, LossMetrics


class NLLLoss:
    """A `nemo_rl.types.LossFunction`: minus the sum of logprobs [B, S] over the loss tokens / tokens of the step.

    Every token of the optimizer step has the same weight. Values at masked positions are ignored; a non-finite logprob
    of a loss token makes the loss NaN; a micro-batch without a loss token gives 0 with a graph.
    """

    inputs_type = LossInputs

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """Metrics: the loss, the mean probability of a loss token, and the numbers of loss tokens and sequences."""
        assert logprobs.shape == inputs.token_mask.shape, (logprobs.shape, inputs.token_mask.shape)
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        logprobs = torch.where(mask > 0, logprobs, 0.0)  # before the product: 0 * inf would be NaN
        loss = nan_unless_finite(token_mean(-logprobs, mask, global_valid_toks), [logprobs])
        metrics = {
            "loss": loss,
            "token_probability": token_mean(logprobs.exp(), mask, global_valid_toks),
            "num_unmasked_tokens": mask.sum(),
            "num_valid_samples": inputs.sample_mask.sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

"""Losses as users write them: with the signature of docs/adding-a-loss.md, with NeMo RL's, and wrong ones."""

from typing import Any

import torch
from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.aggregate import token_mean
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.types import LossInputs, LossMetrics, PolicyGradientInputs


class Focal:
    """-(1 - p)^gamma log p of each loss token, summed, / tokens of the optimizer step."""

    inputs_type = LossInputs

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        logprobs = torch.where(mask > 0, logprobs, 0.0)
        loss = token_mean(-((1 - logprobs.exp()) ** self.gamma) * logprobs, mask, global_valid_toks)
        return loss, {"focal_probability": token_mean(logprobs.exp(), mask, global_valid_toks)}


class Cautious(ClippedPGLoss):
    """Ours, with a term of one's own; it gets the section `loss_fn`."""

    def __init__(self, cfg: ClippedPGLossConfig, weight: float) -> None:
        super().__init__(cfg)
        self.weight = weight

    def __call__(
        self, outputs: Tensor, inputs: PolicyGradientInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        loss, metrics = super().__call__(outputs, inputs, global_valid_seqs, global_valid_toks)
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        square = token_mean(
            torch.where(mask > 0, outputs - inputs.prev_logprobs, 0.0).square(), mask, global_valid_toks
        )
        return loss + self.weight * square, {**metrics, "square": square}


class OfNemoRL:
    """REINFORCE, as somebody wrote it for NeMo RL v0.6: metrics are floats, and rows are whole."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor, next_token_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = (-data["advantages"][:, 1:] * next_token_logprobs * mask).sum() / (global_valid_toks + 1e-8)
        return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}


class Wrong:
    """Returns `what`, a name."""

    inputs_type = LossInputs

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, logprobs: Tensor, inputs: LossInputs, seqs: Tensor, toks: Tensor) -> Any:
        loss = logprobs.sum() / toks
        return {
            "a tensor": loss,
            "nothing": None,
            "a number": (loss.item(), {}),
            "no metrics": (loss, None),
            "every token": (logprobs, {}),
            "an integer": (inputs.input_ids.sum(), {}),
            "no gradient": (loss.detach(), {}),
            "metrics of every token": (loss, {"fine": 1.0, "ratio": logprobs}),
            "nan": (loss * float("nan"), {}),
        }[self.what]


class WithoutInputs:
    def __call__(self, outputs: Tensor, inputs: Any, seqs: Tensor, toks: Tensor) -> Any:
        return outputs.sum(), {}


class TooFew:
    inputs_type = LossInputs

    def __call__(self, outputs: Tensor, inputs: Any) -> Any:
        return outputs.sum(), {}


class OfLogits:
    def __call__(
        self, next_token_logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Any:
        return next_token_logits.sum(), {}

"""The loss of PPO's value model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.algorithms.config.ppo import ValueLossConfig
from nemo_rl.algorithms.losses.aggregate import nan_unless_finite, token_mean
from nemo_rl.types import LossInputs, LossMetrics


@dataclass(kw_only=True)
class ValueInputs(LossInputs):
    """[B, S] each; position i has the value of the state before token i."""

    values: Tensor  # before the update
    returns: Tensor


class ValueLoss:
    """A `nemo_rl.types.LossFunction` of values [B, S]: mean over the loss tokens of the squared error to the return.

    With `value_clip` c, it is the larger of two squared errors: of the value, and of the value clamped to within c of
    its value when the sample was scored (arXiv 2005.12729, section 3; OpenAI Baselines' ppo2). A value that has moved
    by more than c towards its return gets no gradient, as a clipped ratio of the policy gets none.

    Values at masked positions are ignored; a non-finite one elsewhere makes the loss NaN.
    """

    inputs_type = ValueInputs

    def __init__(self, cfg: ValueLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, values: Tensor, inputs: ValueInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """Metrics: the loss, how often clipping changed it, and the means that `explained_variance` needs."""
        assert values.shape == inputs.token_mask.shape, (values.shape, inputs.token_mask.shape)
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        values, old, returns = (torch.where(mask > 0, v, 0.0) for v in (values, inputs.values, inputs.returns))
        error = values - returns
        squared = error.square()
        clipped = torch.zeros_like(mask)
        must_be_finite = [values, returns]
        if self.cfg.value_clip is not None:
            held = old + (values - old).clamp(-self.cfg.value_clip, self.cfg.value_clip)
            squared_held = (held - returns).square()
            clipped = (squared_held > squared).to(mask.dtype)
            # The larger error: clipping may hide progress towards the return, never a step away from it.
            squared = torch.maximum(squared, squared_held)
            must_be_finite.append(old)
        loss = nan_unless_finite(self.cfg.scale * token_mean(squared, mask, global_valid_toks), must_be_finite)
        # Means of squares add up over micro-batches and ranks; a variance of each part would not.
        metrics = {"loss": loss, "value_loss": loss, "num_valid_samples": inputs.sample_mask.sum()}
        for name, of_tokens in {
            "value_clip_fraction": clipped,
            "values_mean": values,
            "returns_mean": returns,
            "returns_square_mean": returns.square(),
            "value_error_mean": error,
            "value_error_square_mean": error.square(),
        }.items():
            metrics[name] = token_mean(of_tokens, mask, global_valid_toks)
        return loss, {name: value.detach() for name, value in metrics.items()}


def explained_variance(metrics: Mapping[str, float]) -> float:
    """1 - variance of (value - return) / variance of the return, from the metrics of a whole optimizer step.

    1: the values equal the returns; 0: they are no better than a constant, or all returns are equal.
    """
    variance = metrics["returns_square_mean"] - metrics["returns_mean"] ** 2
    left = metrics["value_error_square_mean"] - metrics["value_error_mean"] ** 2
    # The sums are float32: a difference this small is rounding.
    if variance <= 1e-6 * metrics["returns_square_mean"]:
        return 0.0
    return 1.0 - left / variance

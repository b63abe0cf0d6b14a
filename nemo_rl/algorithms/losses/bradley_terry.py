"""The loss of reward models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl.algorithms.loss_config import RewardModelLossConfig
from nemo_rl.algorithms.losses.aggregate import nan_unless_finite
from nemo_rl.algorithms.losses.pairs import Pairs, split_pairs
from nemo_rl.types import LossMetrics, PairInputs


class PreferenceLoss:
    """A `nemo_rl.types.LossFunction` of scores [B, S]: even rows chosen, odd rows rejected.

    A row holds its score at one position and 0 elsewhere, so its score is the sum. The loss of a pair is
    -logsigmoid(chosen - rejected) (Bradley and Terry, 1952; arXiv 2203.02155, eq. 1), with `use_margin`
    -logsigmoid(chosen - rejected - margin) (Llama 2, arXiv 2307.09288, eq. 2).

    Values of masked pairs are never looked at; a non-finite one elsewhere makes the loss NaN.
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
        difference = chosen - rejected
        must_be_finite = [chosen, rejected]
        if self.cfg.use_margin:
            margin = torch.where(pairs.mask > 0, inputs.margin[::2], 0.0)
            difference = difference - margin
            must_be_finite.append(margin)
        loss = nan_unless_finite(pairs.mean(-logsigmoid(difference)), must_be_finite)
        metrics = pairs.reward_metrics(chosen, rejected) | {"loss": loss}
        return loss, {name: value.detach() for name, value in metrics.items()}

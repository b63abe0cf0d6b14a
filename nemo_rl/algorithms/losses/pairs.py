"""Rows that come as pairs: even rows are the chosen, odd rows the rejected sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_rl.algorithms.losses.aggregate import divide_by_count
from nemo_rl.types import LossInputs, LossMetrics


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a micro-batch, [P] with P = B / 2, and how many the optimizer step has."""

    mask: Tensor  # 1 where both sequences take part
    global_count: Tensor  # 0-d

    @classmethod
    def of(cls, inputs: LossInputs, global_valid_seqs: Tensor) -> Pairs:
        """`global_valid_seqs` counts sequences, so pairs are half of it."""
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

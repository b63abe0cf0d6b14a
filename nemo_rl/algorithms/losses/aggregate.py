"""Sums over the valid items of a micro-batch, divided by counts of the whole optimizer step.

The divisor does not depend on the micro-batch, so the parts of micro-batches and ranks add up to the whole batch.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def divide_by_count(total: Tensor, count: Tensor | float) -> Tensor:
    """`total / count`, and 0 with the graph of `total` if the count is 0 (then the total is 0 too)."""
    # A where and not a Python if: the count is on the device, and reading it would wait for the device.
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    return total / torch.where(count > 0, count, torch.ones_like(count))


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid tokens of each row: [B, S], [B, S] -> [B]; 0 for a row without one."""
    return divide_by_count((values * mask).sum(-1), mask.sum(-1))


def token_mean(values: Tensor, mask: Tensor, global_valid_toks: Tensor) -> Tensor:
    """Sum over the valid tokens / tokens of the optimizer step (DAPO, arXiv 2503.14476, eq. 8)."""
    return divide_by_count((values * mask).sum(), global_valid_toks)


def sequence_mean(values: Tensor, token_mask: Tensor, sample_mask: Tensor, global_valid_seqs: Tensor) -> Tensor:
    """Sum over valid rows of the row's token mean / sequences of the step (GRPO, arXiv 2402.03300, eq. 3)."""
    return divide_by_count((masked_row_mean(values, token_mask) * sample_mask).sum(), global_valid_seqs)


def constant_length_mean(values: Tensor, mask: Tensor, global_valid_seqs: Tensor, max_tokens: int) -> Tensor:
    """Sum over the valid tokens / (sequences of the step * `max_tokens`) (Dr.GRPO, arXiv 2503.20783, section 3.2).

    Every token has the same weight, independent of the lengths of its own answer and of the others.
    """
    return divide_by_count((values * mask).sum(), global_valid_seqs * max_tokens)


def masked_min(values: Tensor, valid: Tensor) -> Tensor:
    """Smallest valid value; +inf when there is none, which is neutral when micro-batches are reduced by minimum."""
    return torch.where(valid, values, torch.inf).amin()


def masked_max(values: Tensor, valid: Tensor) -> Tensor:
    """Largest valid value; -inf when there is none."""
    return torch.where(valid, values, -torch.inf).amax()


def nan_unless_finite(loss: Tensor, values: Iterable[Tensor]) -> Tensor:
    """`loss`, or NaN when any of `values` is not finite: a clamp or a saturated function would hide that."""
    # Adding NaN to the loss, and not raising here, lets every rank reach the same collectives before the run decides.
    all_finite = torch.stack([torch.isfinite(value).all() for value in values]).all()
    return loss + torch.where(all_finite, 0.0, torch.nan)

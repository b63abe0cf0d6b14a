"""Logprobs of the same tokens under other settings of the head, to find out which setting generation used.

hidden states [N, H] -> head in its own or another dtype -> logits [n, V] once per chunk -> logprob under each variant
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.logit_tiles import OutputHead, smallest_kept, whole_logits
from nemo_rl.models.policy.head.tasks import HeadModel, HeadTask

_ROWS = 64  # whose logits over the whole vocabulary are in memory at a time


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Sampling parameters, and the dtype in which the head multiplies; None: as in training."""

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    head_dtype: str | None = None


@dataclass(frozen=True)
class VariantLogprobs(HeadTask):
    """The logprob of each scored token under each variant, [N, number of variants]."""

    variants: tuple[Variant, ...]

    @property
    def num_values(self) -> int | None:
        return len(self.variants)

    @torch.no_grad()
    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        head = replace(model.output_head(), temperature=1.0)
        out = torch.zeros(len(states), len(self.variants), dtype=torch.float32, device=states.device)
        for start in range(0, len(states), _ROWS):
            rows = slice(start, start + _ROWS)
            for dtype in {variant.head_dtype for variant in self.variants}:
                logits = _logits(states[rows], head, dtype)
                for number, variant in enumerate(self.variants):
                    if variant.head_dtype == dtype:
                        out[rows, number] = _logprobs(logits, variant, batch.targets[rows], head)
        return out


def _logits(states: torch.Tensor, head: OutputHead, dtype: str | None) -> torch.Tensor:
    """float32 [n, V_local]. In another dtype, states, weight and the logits themselves are rounded to it."""
    if dtype is None:
        return whole_logits(states, head)
    wanted = getattr(torch, dtype)
    bias = None if head.bias is None else head.bias.to(wanted)
    rounded = replace(head, weight=head.weight.to(wanted), bias=bias)
    return whole_logits(states.to(wanted), rounded).to(wanted).float()


def _logprobs(logits: torch.Tensor, variant: Variant, targets: torch.Tensor, head: OutputHead) -> torch.Tensor:
    logits = logits / (variant.temperature or 1.0)
    local = targets - head.start
    is_here = ((local >= 0) & (local < logits.shape[1]))[:, None]
    index = local.clamp(0, logits.shape[1] - 1)[:, None]
    sampled = logits.gather(1, index)
    if variant.top_k is not None or variant.top_p < 1.0:
        smallest = smallest_kept(logits, variant.top_k, variant.top_p, head.group)
        kept = logits.masked_fill(logits < smallest[:, None], float("-inf"))
        # As in training, the filter never excludes the token that was sampled.
        logits = kept.scatter(1, index, torch.where(is_here, sampled, kept.gather(1, index)))
    own = torch.where(is_here, sampled, torch.finfo(logits.dtype).min)[:, 0]
    largest = logits.amax(dim=1)
    if head.group is not None:
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=head.group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=head.group)
    total = (logits - largest[:, None]).exp().sum(dim=1)
    if head.group is not None:
        dist.all_reduce(total, group=head.group)
    return own - largest - total.log()

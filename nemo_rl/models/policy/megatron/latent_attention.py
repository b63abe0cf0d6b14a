"""Megatron's multi-head latent attention with whole gradients under tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn


class _SumGradient(torch.autograd.Function):
    """The tensor itself; backward adds up the gradients of a group's ranks.

    Megatron's `copy_to_tensor_model_parallel_region` returns a gradient that is not contiguous, as that of a slice,
    without the sum.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class LatentAttention(MLASelfAttention):
    """The rotary part of the keys is one for all heads, so its gradient is a sum over ranks, each with its own heads.

    megatron-core 0.16 adds it up only where a sequence-parallel gather happens to; the others would train the
    projection on their own heads' part.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pg_collection.tp.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._join)

    def _join(self, module: nn.Module, inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        """Compressed keys and values, then rotary keys: [S, 1, features], of this rank or of all, -> of all.

        With sequence parallelism positions are this rank's, and Megatron's own gather of the rotary keys adds up.
        """
        states, bias = outputs
        group, rank = self.pg_collection.tp, self.config.kv_lora_rank
        is_cut = states.shape[-1] != rank + self.config.qk_pos_emb_head_dim
        if is_cut:
            states = gather_from_tensor_model_parallel_region(states, group=group)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(states, group=group) if is_cut else states, bias
        latent, rotary = states.split([rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, _SumGradient.apply(rotary, group)], dim=-1), bias

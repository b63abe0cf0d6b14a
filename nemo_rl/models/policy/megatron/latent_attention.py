"""Megatron's multi-head latent attention with whole gradients under tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn


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
        return torch.cat([latent, copy_to_tensor_model_parallel_region(rotary, group=group)], dim=-1), bias

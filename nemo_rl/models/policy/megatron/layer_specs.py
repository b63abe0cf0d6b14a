"""What a Megatron transformer layer is made of: Transformer Engine's modules, or torch's.

Torch's layers ("local") run on CPUs and GPUs alike: plain RMSNorm, and the attention of `models/policy/attention.py`,
which knows packed sequences, grouped queries and sequences cut over context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.megatron.latent_attention import LatentAttention
from nemo_rl.models.policy.megatron.moe import use_policy_router
from nemo_rl.models.policy.megatron.packed import SegmentParams
from nemo_rl.models.policy.megatron.transformer_config import LATENT_NORM_EPS


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467), in float32, then cast, then scaled."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **others: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Read by Megatron, which adds up the gradients of tensor-parallel ranks that saw different positions.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class LatentNorm(RMSNorm):
    """The norm of compressed queries, keys and values, whose epsilon is a constant of the architecture."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **others: object) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


class SegmentAttention(MegatronModule):
    """Core attention.

    Over packed sequences: query [T, heads, D] -> [T, heads, D of values]. Without them, over rows of a batch whose
    queries stand on the last of the keys (generation): query [W, B, heads, D] -> [W, B, heads * D of values].
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **others: object
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)  # pyright: ignore[reportArgumentType]
        self.window = config.window_size[0] + 1 if has_window and config.window_size else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return self._of_rows(query, key, value)
        assert isinstance(packed_seq_params, SegmentParams)
        heads_first = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        out, _ = attention.attention(
            self,
            *heads_first,
            attention_mask=None,
            scaling=self.softmax_scale,
            sliding_window=self.window,
            segments=packed_seq_params.segments,
        )
        return out[0]

    def _of_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        queries, keys = len(query), len(key)
        seen = attention.causal_mask(queries, keys, None, query.device) if queries < keys else None
        heads_first = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        out, _ = attention.attention(
            self,
            *heads_first,
            attention_mask=None,
            scaling=self.softmax_scale,
            sliding_window=self.window,
            seen=None if seen is None else seen.expand(query.shape[1], 1, -1, -1),
        )
        return out.transpose(0, 1).flatten(2)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:
        return {}


def layer_specs(config: TransformerConfig, *, use_transformer_engine: bool, vp_stage: int | None) -> Any:
    """The specs of the layers that this rank (or its virtual stage) holds, dense and mixture-of-experts."""
    block: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        use_policy_router(layer)
        if config.multi_latent_attention:
            layer.submodules.self_attention.module = LatentAttention
        if not use_transformer_engine:
            _use_torch(layer.submodules, config)
    if not use_transformer_engine:
        block.layer_norm = RMSNorm
    return block


def _use_torch(parts: Any, config: TransformerConfig) -> None:
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    inner: Any = parts.self_attention.submodules
    inner.core_attention = SegmentAttention
    norm = LatentNorm if config.multi_latent_attention else RMSNorm
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(inner, name):
            setattr(inner, name, norm)

"""Builds Megatron's stages of a model on this rank, and wraps them for gradient reduction.

`build_stages` -> `mark_shards` -> (weights are loaded, adapters inserted) -> `wrap`.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn
from transformers import PretrainedConfig

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head.logprobs import logit_transform
from nemo_rl.models.policy.head.scalar import is_scalar
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.gpt_model import PackedParams, PolicyGPTModel, PolicyScalarModel
from nemo_rl.models.policy.megatron.mapping import FAMILIES, ParallelRanks, Replicated, WeightMap
from nemo_rl.models.policy.megatron.moe import PolicyRouter, StackedExperts, routers
from nemo_rl.models.policy.megatron.transformer_config import LATENT_NORM_EPS, set_frequencies, silu
from nemo_rl.models.policy.token_mixers import mixer_class
from nemo_rl.types import SamplingParams


def build_stages(
    model: PretrainedConfig,
    config: TransformerConfig,
    policy: PolicyConfig,
    sampling: SamplingParams,
    device: torch.device,
    *,
    use_transformer_engine: bool,
) -> list[PolicyGPTModel]:
    """The stages of this pipeline rank, in order, with undefined weights. Needs Megatron's groups."""
    text = model.get_text_config()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    stages = []
    for number in range(policy.megatron_cfg.stages_per_rank):
        vp_stage = number if policy.megatron_cfg.stages_per_rank > 1 else None
        stage = (PolicyScalarModel if is_scalar(model) else PolicyGPTModel)(
            config,
            layer_specs(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage, text=text),
            # Rounded up, as the embeddings of tensor-parallel ranks have equally many rows. See `true_vocab_size`.
            vocab_size=-(-text.vocab_size // tensor_size) * tensor_size,
            max_sequence_length=policy.max_total_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=text.tie_word_embeddings,
            position_embedding_type="none" if config.multi_latent_attention else "rope",
            vp_stage=vp_stage,
        )
        # The frequencies of transformers: Megatron's own differ for scaled rotary embeddings.
        set_frequencies(stage, model, device)
        if text.model_type == "gemma3_text" and stage.pre_process:
            scale = torch.tensor(text.hidden_size**0.5, dtype=config.params_dtype).item()
            stage.embedding.register_forward_hook(lambda module, inputs, states, scale=scale: states * scale)
        stage.transform = logit_transform(model)
        stage.true_vocab_size = text.vocab_size
        stage.chunk_tokens = policy.megatron_cfg.linear_ce_fusion_chunk_size or policy.logprob_chunk_size
        stage.sampling = sampling
        for mlp in stage.modules():
            if type(mlp) is MLP and mlp.activation_func is silu:
                # Megatron then gives this function gate and up projections together.
                mlp.config = copy.copy(config)
                mlp.config.use_te_activation_func = True
                mlp.activation_func = gated_silu
        stage.eval()  # with dropout, the same tokens would have other logprobs in every pass
        stages.append(stage.to(device))
    return stages


def mark_shards(parameters: Mapping[str, torch.Tensor], weights: WeightMap, ranks: ParallelRanks) -> None:
    """Mark the parameters that are one rank's shard, because the gradient norm counts replicated ones once.

    Megatron's layers set these marks only when they draw initial values, which we skip.
    """
    entries = weights.on_rank(ranks)
    for name, parameter in parameters.items():
        is_shard = not isinstance(entries[name].layout, Replicated)
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            vars(parameter).pop(attribute, None)
        set_tensor_model_parallel_attributes(parameter, is_shard, entries[name].layout.dim if is_shard else -1, 1)
        if entries[name].expert is not None or entries[name].stacks_experts:
            # Megatron sums gradients of an expert over its replicas only with expert parallelism. But tensor-parallel
            # ranks that do not share its matrices (expert below tensor parallelism) are replicas with other tokens.
            vars(parameter)["allreduce"] = False


def wrap(
    stages: Sequence[PolicyGPTModel], config: TransformerConfig, settings: MegatronConfig
) -> list[DistributedDataParallel]:
    """The stages, with gradients accumulated in buffers and reduced over the ranks that share the parameters."""
    ddp = settings.distributed_data_parallel_config
    ddp_config = DistributedDataParallelConfig(
        **ddp.model_dump(), use_distributed_optimizer=settings.optimizer.shards_optimizer
    )
    # Expert biases and token counts stay float32, with their values.
    exact = [(router, name, buffer) for router in routers(stages) for name, buffer in router.named_buffers()]
    wrapped = [Float16Module(config, stage) if config.bf16 else stage for stage in stages]
    for router, name, buffer in exact:
        setattr(router, name, buffer)
    return [
        DistributedDataParallel(config, ddp_config, stage, disable_bucketing=number > 0)
        for number, stage in enumerate(wrapped)
    ]


def parameters_by_name(stages: Sequence[PolicyGPTModel]) -> dict[str, torch.Tensor]:
    """Parameters and expert biases by Megatron name, with the layer numbers of the whole model."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        named = [*stage.named_parameters(), *((n, b) for n, b in stage.named_buffers() if n.endswith("expert_bias"))]
        for name, tensor in named:
            if at := re.match(r"decoder\.layers\.(\d+)", name):
                layer: Any = stage.decoder.layers[int(at[1])]
                name = f"decoder.layers.{layer.layer_number - 1}{name[at.end() :]}"  # Megatron counts from 1
            found[name] = tensor
    return found


# -- multi-head latent attention with complete gradients under tensor parallelism


class LatentAttention(MLASelfAttention):
    """All heads share the rotary part of the keys, so its gradient is a sum over ranks, each with its own heads.

    megatron-core 0.19 computes that sum only as a side effect of a sequence-parallel gather; without one, each rank
    would train the projection with the gradient of its own heads.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules of the spec. Megatron would add a norm before queries that have no latent."""
        return vars(submodules)

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent of the queries, and the latent `kv_a` followed by the rotary keys: [S, 1, features] each.

        With sequence parallelism the positions are this rank's, and Megatron's gather of rotary keys sums gradients.
        """
        queries, states = super()._qkv_down_projection(hidden_states)
        group, rank = self.pg_collection.tp, self.config.kv_lora_rank
        is_sharded = states.shape[-1] != rank + self.config.qk_pos_emb_head_dim
        if is_sharded:
            states = gather_from_tensor_model_parallel_region(states, group=group)
        if self.config.sequence_parallel:
            return queries, scatter_to_sequence_parallel_region(states, group=group) if is_sharded else states
        latent, rotary = states.split([rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return queries, torch.cat([latent, copy_to_tensor_model_parallel_region(rotary, group=group)], dim=-1)


# -- the modules of a layer: Transformer Engine's, or torch's ("local")
#
# Torch's modules run on CPUs and GPUs alike: plain RMSNorm, and the attention of `models/policy/attention.py`, which
# supports packed sequences, grouped queries and context parallelism.


def gated_silu(projections: torch.Tensor) -> torch.Tensor:
    """Gate and up projections [S, 1, 2 F] -> silu(gate) * up [S, 1, F], in place without gradients.

    Megatron's own gate adds an offset (0) to the up projections first, into a tensor of its own.
    """
    gate, up = projections.chunk(2, dim=-1)
    return silu(gate) * up if torch.is_grad_enabled() else silu(gate).mul_(up)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467), in float32, then cast, then scaled."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **others: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron then sums the gradients of tensor-parallel ranks, which saw different positions.
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        # Squares of bfloat16 states lose digits that the mean needs.
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centered:  # as Gemma 3, which scales before it casts
            return (wide * (1.0 + self.weight.float())).to(states.dtype)
        return self.weight * wide.to(states.dtype)


class PostNorm(RMSNorm):
    """The norm of the output of attention or of a feed-forward layer, in the place of Megatron's `bias_dropout_add`."""

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:  # pyrefly: ignore[bad-override]  (other arguments)
        def add(output: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
            return residual + RMSNorm.forward(self, output[0])

        return add


class LatentNorm(RMSNorm):
    """The norm of the latents `q_a` and `kv_a`, whose epsilon is a constant of the architecture."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **others: object) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


class PackedAttention(MegatronModule):
    """Core attention.

    Packed sequences: query [T, heads, D] -> [T, heads, D of values]. In generation, rows of a batch whose queries are
    at the positions of the last keys: query [W, B, heads, D] -> [W, B, heads * D of values].
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **others: object
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)  # pyrefly: ignore[bad-argument-type]
        self.window = config.window_size[0] + 1 if has_window and config.window_size else None
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":  # sinks, under the name that they have in Megatron's attention
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

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
        seen, cu_seqlens = None, None
        if packed_seq_params is not None:
            assert isinstance(packed_seq_params, PackedParams)
            heads_first = [states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)]
            cu_seqlens = packed_seq_params.cu_seqlens
        else:
            heads_first = [states.permute(1, 2, 0, 3) for states in (query, key, value)]
            if (queries := len(query)) < (keys := len(key)):
                seen = attention.causal_mask(queries, keys, None, query.device).expand(query.shape[1], 1, -1, -1)
        out, _ = attention.attention(
            self,
            *heads_first,
            attention_mask=None,
            scaling=self.softmax_scale,
            sliding_window=self.window,
            s_aux=self.softmax_offset,
            seen=seen,
            cu_seqlens=cu_seqlens,
        )
        return out[0] if packed_seq_params is not None else out.transpose(0, 1).flatten(2)


class TokenMixer(MegatronModule):
    """A layer of transformers in the place of attention, in which every sequence has a row of its own.

    Every tensor-parallel rank computes all of it.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, hf_config: PretrainedConfig, **_: object) -> None:
        super().__init__(config=config)
        self.mixer = mixer_class(hf_config)(hf_config, layer_number - 1).to(config.params_dtype)

    def forward(
        self, hidden_states: torch.Tensor, packed_seq_params: PackedSeqParams | None = None, **others: object
    ) -> tuple[torch.Tensor, None]:
        """This rank's positions [S, 1, H] -> [S, 1, H]."""
        assert isinstance(packed_seq_params, PackedParams), "`checks` refuses generation"
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        out = self.mixer(hidden_states.transpose(0, 1), cu_seqlens=packed_seq_params.cu_seqlens).transpose(0, 1)
        return scatter_to_sequence_parallel_region(out) if self.config.sequence_parallel else out, None


def layer_specs(
    config: TransformerConfig, *, use_transformer_engine: bool, vp_stage: int | None, text: PretrainedConfig
) -> Any:
    """The specs of the layers of this rank (or of its virtual stage), dense and mixture-of-experts."""
    family = FAMILIES[text.model_type]
    block: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        mlp: Any = layer.submodules.mlp  # a functools.partial
        if mlp.func is MoELayer:
            parts = dataclasses.replace(mlp.keywords["submodules"], router=PolicyRouter)
            if family.experts is not None and family.experts.is_stacked:
                parts.experts = StackedExperts
            layer.submodules.mlp = partial(MoELayer, submodules=parts)
        if config.multi_latent_attention:
            layer.submodules.self_attention.module = LatentAttention
        if use_transformer_engine:
            continue
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if family.has_post_norms:
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = ModuleSpec(
                PostNorm, {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            )
        inner: Any = layer.submodules.self_attention.submodules
        inner.core_attention = PackedAttention
        norm = LatentNorm if config.multi_latent_attention else RMSNorm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if config.qk_layernorm and hasattr(inner, name):
                setattr(inner, name, norm)
    if not use_transformer_engine:
        block.layer_norm = RMSNorm
    if family.has_mixers:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        for number, layer in enumerate(block.layer_specs):  # of which several are one object
            if text.layer_types[first + number] == "linear_attention":
                mixer = ModuleSpec(TokenMixer, {"hf_config": text})
                parts = dataclasses.replace(layer.submodules, self_attention=mixer)
                block.layer_specs[number] = dataclasses.replace(layer, submodules=parts)
    return block

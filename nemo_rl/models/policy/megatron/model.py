"""From a model directory to Megatron's stages of it on this rank: built, filled, wrapped for gradient reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.logprobs import logit_transform
from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel
from nemo_rl.models.policy.megatron.layer_specs import layer_specs
from nemo_rl.models.policy.megatron.mapping import WeightMap
from nemo_rl.models.policy.megatron.moe import routers
from nemo_rl.models.policy.megatron.rotary import set_frequencies
from nemo_rl.models.policy.megatron.scalar_model import stage_class
from nemo_rl.models.policy.megatron.shard_layout import Replicated, ShardPlace
from nemo_rl.models.policy.megatron_config import MegatronConfig
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
    """The stages that this pipeline rank holds, in order, with weights of any value. Needs Megatron's groups."""
    text = model.get_text_config()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    stages = []
    for number in range(policy.megatron_cfg.stages_per_rank):
        vp_stage = number if policy.megatron_cfg.stages_per_rank > 1 else None
        stage = stage_class(model)(
            config,
            layer_specs(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage),
            vocab_size=-(-text.vocab_size // tensor_size) * tensor_size,
            max_sequence_length=policy.max_total_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=text.tie_word_embeddings,
            position_embedding_type="none" if config.multi_latent_attention else "rope",
            vp_stage=vp_stage,
        )
        set_frequencies(stage, model, device)
        stage.set_head(
            transform=logit_transform(model),
            true_vocab_size=text.vocab_size,
            chunk_tokens=policy.megatron_cfg.linear_ce_fusion_chunk_size or policy.logprob_chunk_size,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        stage.eval()  # dropout would give the same tokens other logprobs in every pass
        stages.append(stage.to(device))
    return stages


def mark_shards(parameters: Mapping[str, torch.Tensor], weights: WeightMap, place: ShardPlace) -> None:
    """Tell Megatron which parameters are one rank's part: the norm of the gradient counts the others once.

    Its layers say so themselves only when they draw their first values.
    """
    entries = weights.held(place)
    for name, parameter in parameters.items():
        is_part = not isinstance(entries[name].layout, Replicated)
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            vars(parameter).pop(attribute, None)
        set_tensor_model_parallel_attributes(parameter, is_part, entries[name].layout.dim if is_part else -1, 1)
        if entries[name].expert is not None and place.etp_size != place.tp_size:
            # Megatron asks whether experts are cut, not whether tensor ranks that hold the same ones saw other tokens.
            vars(parameter)["allreduce"] = False


def wrap(
    stages: Sequence[PolicyGPTModel], config: TransformerConfig, settings: MegatronConfig
) -> list[DistributedDataParallel]:
    """Stages whose gradients are added up in float32 buffers and reduced over the ranks that share them."""
    ddp = settings.distributed_data_parallel_config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        bucket_size=ddp.bucket_size,
        use_distributed_optimizer=settings.optimizer.shards_optimizer,
    )
    # Biases of experts and counts of tokens stay float32, with the values they have.
    exact = [(router, name, buffer) for router in routers(stages) for name, buffer in router.named_buffers()]
    wrapped = [Float16Module(config, stage) if config.bf16 else stage for stage in stages]
    for router, name, buffer in exact:
        setattr(router, name, buffer)
    return [
        DistributedDataParallel(config, ddp_config, stage, disable_bucketing=number > 0)
        for number, stage in enumerate(wrapped)
    ]


def parameters_by_name(stages: Sequence[PolicyGPTModel]) -> dict[str, torch.Tensor]:
    """Parameters and expert biases under Megatron's names, with the layer numbers of the whole model."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        named = [*stage.named_parameters(), *((n, b) for n, b in stage.named_buffers() if n.endswith("expert_bias"))]
        for name, tensor in named:
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                # Megatron counts layers from 1.
                layer: Any = stage.decoder.layers[int(parts[2])]
                parts[2] = str(layer.layer_number - 1)
            found[".".join(parts)] = tensor
    return found

"""Whether a model can be cut the way `policy.dtensor_cfg` says, found on the driver before any worker loads it."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.models.policy import attention, peft_format
from nemo_rl.models.policy import attention as context_parallel
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor import lora, moe, parallelize, pipeline
from nemo_rl.models.policy.dtensor import tp_plans as tensor_parallel
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.moe import apply_expert_parallel
from nemo_rl.models.policy.expert_names import ExpertNames
from nemo_rl.models.policy.head.logprobs import LogprobModel, logit_transform
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, auto_class, draw_head, is_scalar
from nemo_rl.models.policy.peft_format import load_peft
from nemo_rl.models.policy.weight_loading import load_weights, named_tensors
from nemo_rl.types import SamplingParams

# -- From a model directory to the parts of the model a rank trains: cut, sharded, filled.

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_stages(
    config: PolicyConfig,
    hf_config: PretrainedConfig,
    model_path: str,
    mesh: ParallelMesh,
    device: torch.device,
    sampling: SamplingParams,
    seed: int,
) -> list[LogprobModel]:
    """The parts of the model on this rank, ready to train: one, or several with an interleaved pipeline. Collective.

    `hf_config`: of a reward or value model as `scalar_config` gives it.
    """
    assert is_scalar(hf_config) == config.reward_model_cfg.enabled
    whole = parallelize.build_on_meta(hf_config, DTYPES[config.master_precision])
    whole.eval()  # dropout would give the same tokens other logprobs in every pass
    if config.dtensor_cfg.lora_cfg.enabled:
        lora.apply_lora(whole, config.dtensor_cfg.lora_cfg)
        lora.cast_frozen(whole, DTYPES[config.precision])
    parts = [whole]
    if mesh.pipeline is not None:
        parts = pipeline.split(whole, mesh.pipeline_rank, mesh.pipeline.size(), config.dtensor_cfg.pipeline)
    stages = []
    for part in parts:
        stage = _cut(part, config, mesh, sampling)
        host = torch.device("cpu")
        parallelize.materialize(stage, host if config.dtensor_cfg.cpu_offload else device, buffer_device=device)
        drawn = _fill(stage, config, model_path, seed)
        # One of the ranks that have the head tells it.
        if drawn and mesh.data_rank == mesh.context_rank == mesh.world["tensor_parallel"].get_local_rank() == 0:
            logger.info("%s has no %s, as a language model: drawn from seed %d", model_path, ", ".join(drawn), seed)
        stages.append(stage)
    if config.dtensor_cfg.lora_cfg.adapter_path is not None:
        group = mesh.pipeline.get_group() if mesh.pipeline is not None else None
        load_peft(
            [stage.hf for stage in stages],
            config.dtensor_cfg.lora_cfg,
            Path(config.dtensor_cfg.lora_cfg.adapter_path),
            config.model_name,
            pipeline=group,
        )
    return stages


def _cut(hf: PreTrainedModel, config: PolicyConfig, mesh: ParallelMesh, sampling: SamplingParams) -> LogprobModel:
    settings = config.dtensor_cfg
    if mesh.tensor is not None:
        tensor_parallel.apply_tensor_parallel(
            hf,
            mesh.tensor,
            sequence_parallel=settings.sequence_parallel,
            custom_plan=settings.custom_parallel_plan,
        )
    apply_expert_parallel(hf, mesh)
    parallelize.recompute_activations(hf, settings.activation_checkpointing)
    layers = parallelize.decoder_layers(hf)
    if settings.torch_compile:
        for layer in layers:
            layer.compile()
    kind = LogprobModel if mesh.pipeline is None else pipeline.PipelineStageModel
    stage = kind(
        hf,
        chunk_tokens=config.logprob_chunk_size,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        tensor=mesh.tensor,
        context=mesh.context,
    )
    parallelize.shard(stage, layers, mesh, DTYPES[config.precision], cpu_offload=settings.cpu_offload)
    return stage


def _fill(stage: LogprobModel, config: PolicyConfig, model_path: str, seed: int) -> list[str]:
    """Returns the names of what the checkpoint does not have and was drawn: the head of a new reward model."""
    tensors = {name: tensor for name, tensor in named_tensors(stage.hf) if not lora.is_adapter(name)}
    names = ExpertNames(stage.hf.config.get_text_config().model_type)
    draw = functools.partial(draw_head, config=stage.hf.config, seed=seed)
    fresh = {HEAD_WEIGHT: draw} if is_scalar(stage.hf.config) else {}
    drawn = load_weights(tensors, model_path, names.read, auto_class=auto_class(stage.hf.config), fresh=fresh)
    if config.dtensor_cfg.lora_cfg.enabled:
        lora.init_adapters(stage.hf, config.dtensor_cfg.lora_cfg, seed)
    return drawn


def row_layout(config: PolicyConfig, hf_config: PretrainedConfig, mesh: ParallelMesh) -> RowLayout:
    """How the sequences of a micro-batch are laid out for this model on this rank."""
    settings = config.dtensor_cfg
    is_padding_free = config.padding_free
    if is_padding_free is None:
        is_padding_free = attention.supports_segments(hf_config) is None
    reward = config.reward_model_cfg
    multiples = [config.make_sequence_length_divisible_by]
    if settings.sequence_parallel:
        multiples.append(settings.tensor_parallel_size)
    if config.dynamic_batching.enabled and not is_padding_free:
        multiples.append(config.dynamic_batching.sequence_length_round)
    return RowLayout(
        padding_free=is_padding_free,
        divisible_by=math.lcm(*multiples),
        context_size=mesh.sizes.context_parallel,
        context_rank=mesh.context_rank,
        context_group=mesh.context.get_group() if mesh.context is not None else None,
        own_states=reward.enabled and reward.reward_model_type == "bradley_terry",
    )


def trainable(stages: Sequence[LogprobModel]) -> list[torch.nn.Parameter]:
    """The parameters that an optimizer is to have, in the model's order."""
    return [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]


def check_layout(config: PolicyConfig, model: PretrainedConfig) -> None:
    """Raises ValueError naming the key to change and what would work.

    Nothing is allocated: where layers have to be looked at, the model is built without weights.
    """
    settings = config.dtensor_cfg
    model = copy.deepcopy(model)  # building a model writes into its configuration
    if not is_scalar(model):
        logit_transform(model)
    if settings.tensor_parallel_size > 1:
        tensor_parallel.check_tensor_parallel(
            model,
            settings.tensor_parallel_size,
            sequence_parallel=settings.sequence_parallel,
            custom_plan=settings.custom_parallel_plan,
        )
    if settings.context_parallel_size > 1:
        context_parallel.check_context_parallel(model, settings.context_parallel_size)
    pipeline.check_pipeline(model, settings)
    if settings.expert_parallel_size > 1:
        moe.check_experts(model, settings.expert_parallel_size)
    if settings.lora_cfg.enabled:
        lora.check_lora(model, settings.lora_cfg)
        if settings.lora_cfg.adapter_path is not None:
            directory = Path(settings.lora_cfg.adapter_path)
            peft_format.check_peft_adapter(directory, model, settings.lora_cfg, config.model_name)
    reason = attention.supports_segments(model)
    if reason is None:
        return
    why = f"the sequences of {config.model_name!r} cannot lie end to end, because {reason}"
    if config.padding_free:
        raise ValueError(f"policy.padding_free=true: {why}; set it to null or false")
    if config.sequence_packing.enabled:
        raise ValueError(
            f"policy.sequence_packing.enabled=true: {why}; set policy.sequence_packing.enabled=false and "
            "policy.dynamic_batching.enabled=true"
        )

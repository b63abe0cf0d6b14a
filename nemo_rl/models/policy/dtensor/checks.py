"""The driver's checks of a policy that trains with `policy.dtensor_cfg`, before any worker starts.

Nothing is allocated: models are built without weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from nemo_rl.config.rules import remedy
from nemo_rl.models.policy import peft_format
from nemo_rl.models.policy.attention import OTHER_MIXERS, uncuttable_reason, unpackable_reason
from nemo_rl.models.policy.checkpoint import policy_tensors
from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig
from nemo_rl.models.policy.dtensor import lora, moe, pipeline, tensor_parallel
from nemo_rl.models.policy.dtensor.optimizer import build_optimizer, build_scheduler
from nemo_rl.models.policy.head.logprobs import logit_transform
from nemo_rl.models.policy.head.scalar import is_scalar
from nemo_rl.models.policy.megatron.files import refuse_megatron_checkpoint
from nemo_rl.models.policy.pretrained import build_on_meta
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.utils.checkpoint.tensors import check_checkpoint_fits


def check_policy(config: PolicyConfig, model: PretrainedConfig, model_path: str) -> None:
    """ValueError, naming the key and what would work, if layout, optimizer or scheduler do not work."""
    check_layout(config, model)
    if isinstance(config, RolloutPolicyConfig) and config.generation.backend == "hf":
        _check_decoding(config.generation.key("backend"), config.generation.default_engine, model)
    optimizer = build_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])
    build_scheduler(config, optimizer)


def _check_decoding(key: str, default: str, model: PretrainedConfig) -> None:
    kind = model.get_text_config().model_type
    if kind in OTHER_MIXERS:
        raise ValueError(
            f"{key}=hf: prompts are padded on the left there, and the layers of type {OTHER_MIXERS[kind]} of a "
            f"{kind!r} model would read the padding; {remedy(f'{key}={default}')}"
        )
    if sees_images(model):
        unseen = f"a {model.model_type!r} model would not see the images of prompts"
        raise ValueError(f"{key}=hf: {unseen}; {remedy(f'{key}={default}')}")


def check_saved_weights(directory: Path, config: PolicyConfig, model: PretrainedConfig) -> None:
    """Check that the checkpoint `directory` holds the tensors that this policy trains, by the headers of its files.

    Raises:
        CheckpointError: listing the missing, the unexpected and the differently shaped tensors.
        DamagedTensorsError: for a header that cannot be read.
    """
    refuse_megatron_checkpoint(directory)
    lora_cfg = config.dtensor_cfg.lora_cfg
    hf = lora.adapted_model(model, lora_cfg) if lora_cfg.enabled else build_on_meta(model, torch.float32)
    tensors = policy_tensors([hf], trained_only=lora_cfg.enabled)
    check_checkpoint_fits(directory / "weights", {name: tensor.shape for name, tensor in tensors.items()})


def check_layout(config: PolicyConfig, model: PretrainedConfig) -> None:
    """ValueError, naming the key and what would work, unless `policy.dtensor_cfg` can cut the model."""
    settings, lora_cfg = config.dtensor_cfg, config.dtensor_cfg.lora_cfg
    if not is_scalar(model):
        logit_transform(model)
    tensor_parallel.check_tensor_parallel(model, settings)
    if settings.context_parallel_size > 1 and (reason := uncuttable_reason(model)) is not None:
        key = settings.key("context_parallel_size")
        raise ValueError(
            f"{key}={settings.context_parallel_size}: sequences of a {model.model_type!r} model cannot be cut over "
            f"ranks, because {reason}; {remedy(f'{key}=1')}, and use tensor_parallel_size or activation_checkpointing "
            "for long sequences"
        )
    pipeline.check_pipeline(model, settings)
    moe.check_experts(model, settings)
    if lora_cfg.enabled:
        adapted = lora.adapted_model(model, lora_cfg)
        if lora_cfg.adapter_path is not None:
            peft_format.check_peft_adapter(Path(lora_cfg.adapter_path), adapted, lora_cfg, config.model_name)
    if (reason := unpackable_reason(model)) is not None:
        why = f"the sequences of {config.model_name!r} cannot lie end to end, because {reason}"
        if config.padding_free:
            key = config.key("padding_free")
            raise ValueError(f"{key}=true: {why}; {remedy(f'{key}=null', f'{key}=false')}")
        if config.sequence_packing.enabled:
            key, instead = config.key("sequence_packing.enabled"), config.key("dynamic_batching.enabled")
            raise ValueError(f"{key}=true: {why}; {remedy(f'{key}=false and {instead}=true', f'{key}=false')}")

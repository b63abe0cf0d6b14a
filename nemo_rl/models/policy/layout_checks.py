"""Whether a model can be cut the way `policy.dtensor_cfg` says, found on the driver before any worker loads it."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import PretrainedConfig

from nemo_rl.models.policy import attention, context_parallel, lora, moe, peft_format, pipeline, tensor_parallel
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.logprobs import logit_transform
from nemo_rl.models.policy.scalar_head import is_scalar


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

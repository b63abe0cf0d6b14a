"""Configuration of a Hugging Face model and `policy.megatron_cfg` -> Megatron's configuration of the same model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.models.policy.config import PolicyConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROUTER_DTYPES = {"float32": "fp32", "fp32": "fp32", "fp64": "fp64", None: None}


def transformer_config(
    model: PretrainedConfig, policy: PolicyConfig, *, use_transformer_engine: bool
) -> TransformerConfig:
    """Megatron's configuration of a model that `megatron_checks` has passed."""
    values = _shape(model) | _training(policy, use_transformer_engine=use_transformer_engine) | _layout(policy)
    if num_experts(model) > 0:
        values |= _experts(model, policy)
    return TransformerConfig(**values)


def num_experts(model: PretrainedConfig) -> int:
    """0 for a dense model."""
    values = model.get_text_config().to_dict()
    found = [values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    return next((int(number) for number in found if number), 0)


def _shape(model: PretrainedConfig) -> dict[str, Any]:
    config = model.get_text_config()
    heads = config.num_attention_heads
    values = config.to_dict()
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": values.get("head_dim") or config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type in ("qwen2", "qwen2_moe"),
        "qk_layernorm": config.model_type in ("qwen3", "qwen3_moe"),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _training(policy: PolicyConfig, *, use_transformer_engine: bool) -> dict[str, Any]:
    settings = policy.megatron_cfg
    dtype = DTYPES[policy.precision]
    recompute: dict[str, Any] = {}
    if settings.activation_checkpointing and settings.recompute_granularity == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": settings.recompute_modules}
    elif settings.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # all of it comes from the checkpoint
        "calculate_per_token_loss": True,  # the losses are sums already: nothing is to be divided
        "gradient_accumulation_fusion": settings.gradient_accumulation_fusion,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": settings.bias_activation_fusion,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": settings.apply_rope_fusion,
        "persist_layer_norm": use_transformer_engine,
        "deterministic_mode": policy.deterministic,
        **recompute,
    }


def _layout(policy: PolicyConfig) -> dict[str, Any]:
    settings = policy.megatron_cfg
    return {
        "tensor_model_parallel_size": settings.tensor_model_parallel_size,
        "pipeline_model_parallel_size": settings.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": settings.virtual_pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": settings.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": settings.num_layers_in_last_pipeline_stage,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size,
        "sequence_parallel": settings.sequence_parallel,
        "moe_token_dispatcher_type": settings.moe_token_dispatcher_type,
        "variable_seq_lengths": settings.pipeline_model_parallel_size > 1,  # micro-batches differ in tokens
    }


def _experts(model: PretrainedConfig, policy: PolicyConfig) -> dict[str, Any]:
    config, settings = model.get_text_config(), policy.megatron_cfg
    values = config.to_dict()
    return {
        "num_moe_experts": num_experts(model),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": values.get("moe_intermediate_size", config.intermediate_size),
        "moe_router_load_balancing_type": settings.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": settings.moe_aux_loss_coeff,
        "moe_router_dtype": _ROUTER_DTYPES[settings.moe_router_dtype],
        "moe_router_pre_softmax": False,
        "moe_permute_fusion": settings.moe_permute_fusion,
        "moe_grouped_gemm": settings.moe_grouped_gemm,
        "moe_shared_expert_overlap": settings.moe_shared_expert_overlap,
    }


def rope_frequencies(model: PretrainedConfig, head_dim: int) -> torch.Tensor:
    """Inverse frequencies of rotary embeddings, float32 [head_dim / 2], as transformers computes them.

    Raises:
        ValueError: a kind of rotary embedding that scales attention, or changes with the length of a sequence.
    """
    config = model.get_text_config()
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if kind in ("dynamic", "longrope") or attention_factor != 1.0:
        raise ValueError(
            f"rope_type={kind!r} of this {config.model_type} model is not known to the Megatron backend; train it with "
            "policy.dtensor_cfg.enabled=true, or set policy.hf_config_overrides.rope_parameters.rope_type to default"
        )
    return frequencies

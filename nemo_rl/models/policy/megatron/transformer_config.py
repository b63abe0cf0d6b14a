"""Configuration of a Hugging Face model and `policy.megatron_cfg` -> Megatron's configuration of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.mapping import heads_of, is_latent, is_moe_layer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the latents `q_a` and `kv_a`, a constant in transformers."""
_LAYOUT_KEYS = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "moe_token_dispatcher_type",
}  # fmt: skip
_EXPERT_KEYS = {
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "moe_permute_fusion",
    "moe_grouped_gemm", "moe_shared_expert_overlap",
}  # fmt: skip
_ROUTER_DTYPES = {"float32": "fp32", "fp32": "fp32", "fp64": "fp64", None: None}


def transformer_config(
    model: PretrainedConfig, policy: PolicyConfig, *, use_transformer_engine: bool
) -> TransformerConfig:
    """Megatron's configuration of a model that has a mapping (`mapping.py`).

    Raises:
        ValueError: Megatron's modules do not support a setting of the model. The text says what would work.
    """
    config = model.get_text_config()
    values = _shape(model) | _training(policy, use_transformer_engine=use_transformer_engine) | _layout(policy)
    values |= _windows(config) | fp8_fields(policy.megatron_cfg, has_experts=num_experts(model) > 0)
    if num_experts(model) > 0:
        values |= _experts(model, policy)
    if not use_transformer_engine and not policy.megatron_cfg.bias_activation_fusion:
        values["activation_func"] = silu
    if not is_latent(config):
        return TransformerConfig(**values, **_attention(model))
    if use_transformer_engine and config.rms_norm_eps != LATENT_NORM_EPS:
        raise ValueError(
            f"rms_norm_eps={config.rms_norm_eps} of this {config.model_type} model: the norms of its latents use "
            f"{LATENT_NORM_EPS}, and Transformer Engine has one value for all; set "
            "policy.megatron_cfg.transformer_impl to local"
        )
    return MLATransformerConfig(**values, **_latent_attention(model))


def silu(gate: torch.Tensor) -> torch.Tensor:
    """SiLU, in place without gradients: Megatron's gate and up projections are one tensor, which stays in memory until
    both are multiplied, so a pass for logprobs saves the memory of a third part."""
    return F.silu(gate, inplace=not torch.is_grad_enabled())


def num_experts(model: PretrainedConfig) -> int:
    """Number of experts in layers with experts; 0 if no layer has any."""
    config = model.get_text_config()
    if not any(is_moe_layer(config, layer) for layer in range(config.num_hidden_layers)):
        return 0
    values = config.to_dict()
    found = [values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    return next(int(number) for number in found if number)


def _shape(model: PretrainedConfig) -> dict[str, Any]:
    config = model.get_text_config()
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _attention(model: PretrainedConfig) -> dict[str, Any]:
    config = model.get_text_config()
    _, groups, head_dim = heads_of(config)
    factor = rope_of(model, head_dim).attention_factor
    return {
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "add_qkv_bias": config.model_type == "qwen2",
        "qk_layernorm": config.model_type in ("qwen3", "qwen3_moe"),
        # The factor multiplies all features of both queries and keys.
        "softmax_scale": None if factor == 1.0 else factor**2 * head_dim**-0.5,
    }


def _latent_attention(model: PretrainedConfig) -> dict[str, Any]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    config = model.get_text_config()
    return {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "qk_layernorm": True,
        **latent_rope(model),
    }


def _windows(config: PretrainedConfig) -> dict[str, Any]:
    """Layers whose queries see at most the last `sliding_window` keys, including their own."""
    window = config.to_dict().get("sliding_window")
    if window is None:
        return {}
    # Other architectures have the window in all layers, whatever the types in their configuration.
    kinds = config.layer_types if config.model_type in ("qwen2", "qwen3") else ["sliding_attention"]
    foreign = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if foreign:
        raise ValueError(
            f"config.json: layer_types: {', '.join(foreign)} of a {config.model_type} model have no mapping to "
            "Megatron Core; train it with policy.dtensor_cfg"
        )
    has_window = [int(kind == "sliding_attention") for kind in kinds]
    # Megatron does not count the query's own key.
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": has_window if len(has_window) > 1 else has_window * config.num_hidden_layers,
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
        "perform_initialization": False,  # all weights come from the checkpoint
        "calculate_per_token_loss": True,  # the losses are already sums with the right divisor
        "gradient_accumulation_fusion": settings.gradient_accumulation_fusion,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": settings.bias_activation_fusion,
        "bias_dropout_fusion": False,
        "attention_backend": AttnBackend[settings.attention_backend],
        "apply_rope_fusion": settings.apply_rope_fusion,
        "persist_layer_norm": use_transformer_engine,
        "deterministic_mode": policy.deterministic,
        **recompute,
    }


def _layout(policy: PolicyConfig) -> dict[str, Any]:
    settings = policy.megatron_cfg
    several_stages = settings.pipeline_model_parallel_size > 1
    return settings.model_dump(include=_LAYOUT_KEYS) | {"variable_seq_lengths": several_stages}  # of micro-batches


def _experts(model: PretrainedConfig, policy: PolicyConfig) -> dict[str, Any]:
    config, settings = model.get_text_config(), policy.megatron_cfg
    values = config.to_dict()
    width = values.get("moe_intermediate_size") or config.intermediate_size
    shared = values.get("n_shared_experts")
    router = ROUTERS[config.model_type](config)
    if config.num_experts_per_tok == 1 and not router.get("moe_router_pre_softmax"):
        works = "2 or more, for the weight of one, normalised, is always 1"
        raise _refused_router(config, "num_experts_per_tok", works)
    return {
        "num_moe_experts": num_experts(model),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": [int(is_moe_layer(config, layer)) for layer in range(config.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": width * shared if shared else None,
        **settings.model_dump(include=_EXPERT_KEYS),
        "moe_router_dtype": _ROUTER_DTYPES[settings.moe_router_dtype],
        **router,
    }


def _deepseek_v2_router(config: Any) -> dict[str, Any]:
    values = {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": config.routed_scaling_factor}
    if config.topk_method == "greedy":
        return values
    if config.topk_method != "group_limited_greedy":
        raise _refused_router(config, "topk_method", "greedy or group_limited_greedy")
    return values | {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}


def _deepseek_v3_router(config: Any) -> dict[str, Any]:
    if not config.norm_topk_prob:
        raise _refused_router(config, "norm_topk_prob", "true")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
    }


ROUTERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    # A softmax over the chosen experts equals the softmax over all, normalised over the chosen.
    "qwen3_moe": lambda config: {"moe_router_pre_softmax": not config.norm_topk_prob},
    "mixtral": lambda config: {"moe_router_pre_softmax": False},
    "deepseek_v2": _deepseek_v2_router,
    "deepseek_v3": _deepseek_v3_router,
}
"""`model_type` -> Megatron's settings of the same router. `moe.PolicyRouter` chooses groups."""


def _refused_router(config: Any, setting: str, works: str) -> ValueError:
    return ValueError(
        f"config.json: {setting}: {getattr(config, setting)} of a {config.model_type} model has no mapping to Megatron "
        f"Core, which needs {works}; train it with policy.dtensor_cfg"
    )


# -- rotary embeddings (Su et al. 2021, arXiv 2104.09864)
#
# transformers computes the frequencies. Some kinds multiply cosine and sine by a factor (YaRN's attention factor, Peng
# et al. 2023, arXiv 2309.00071, section 3.4). If all features rotate, that is the same as a factor of the scores.


class Rope(NamedTuple):
    """Inverse frequencies, float32 [rotated features / 2], and the factor of cosine and sine."""

    frequencies: torch.Tensor
    attention_factor: float


def rope_of(model: PretrainedConfig, head_dim: int) -> Rope:
    """The rotary embeddings of heads whose `head_dim` features all rotate.

    `checks.check_rope` has refused kinds whose frequencies depend on the length of the sequence.
    """
    config = model.get_text_config()
    given, kind = config.rope_parameters, config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return Rope(1.0 / given["rope_theta"] ** exponents, 1.0)
    return Rope(*ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu")))


def latent_rope(model: PretrainedConfig) -> dict[str, Any]:
    """The rotary fields of Megatron's configuration of latent attention, where a part of each head's features rotates.

    Raises:
        ValueError: YaRN without rounding, or with a factor that Megatron cannot express.
    """
    config = model.get_text_config()
    given, kind = config.rope_parameters, config.rope_parameters["rope_type"]
    rope = rope_of(model, config.qk_rope_head_dim)
    values: dict[str, Any] = {"rope_type": "rope", "rotary_base": given["rope_theta"]}
    if kind == "default":
        return values | {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    factor, all_dim = given["factor"], given.get("mscale_all_dim") or 0.0
    values |= {"rotary_scaling_factor": factor, "mscale_all_dim": all_dim}
    if kind != "yarn":
        return values
    if not given.get("truncate", True):
        raise _refused(config, "truncate=False", "truncate to true")
    if factor <= 1:
        if rope.attention_factor != 1.0:
            raise _refused(config, f"attention_factor={rope.attention_factor}", "attention_factor to 1")
        mscale = 1.0
    else:  # Megatron multiplies by (0.1 mscale log factor + 1) / (0.1 mscale_all_dim log factor + 1)
        unit = 0.1 * math.log(factor)
        mscale = (rope.attention_factor * (unit * all_dim + 1.0) - 1.0) / unit
    return values | {
        "rope_type": "yarn",
        "mscale": mscale,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "original_max_position_embeddings": given["original_max_position_embeddings"],
    }


def set_frequencies(stage: Any, model: PretrainedConfig, device: torch.device) -> None:
    """Replace the frequencies that Megatron computed in a stage (a GPTModel) by those of transformers."""
    if not stage.config.multi_latent_attention:
        stage.rotary_pos_emb.inv_freq = rope_of(model, stage.config.kv_channels).frequencies.to(device)
        return
    frequencies = rope_of(model, stage.config.qk_pos_emb_head_dim).frequencies.to(device)
    for layer in stage.decoder.layers:
        embedding = layer.self_attention.rotary_pos_emb
        if not isinstance(embedding, YarnRotaryEmbedding):  # which computes its own in every pass
            embedding.inv_freq = frequencies


def _refused(config: PretrainedConfig, what: str, change: str) -> ValueError:
    return ValueError(
        f"rope_parameters with {what} of this {config.model_type} model are not known to the Megatron backend; train "
        f"it with policy.dtensor_cfg, or set policy.hf_config_overrides.rope_parameters.{change}"
    )


# -- 8-bit floating point with Transformer Engine, from `policy.megatron_cfg.fp8_cfg`
#
# Weights stay in bfloat16 and float32; operands are quantised for each matrix product, so loading, sending and saving
# weights do not depend on FP8. Formats: Micikevicius et al. 2022, arXiv 2209.05433. One scale per block of 128:
# DeepSeek-V3, arXiv 2412.19437, section 3.3.

_MULTIPLES = {"blockwise": 16, "tensorwise": 16, "delayed": 16, "mxfp8": 32}
"""The tokens of a matrix product are a multiple of this (Megatron's router pads the tokens of each expert)."""


def fp8_fields(settings: MegatronConfig, *, has_experts: bool) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`; none without FP8."""
    fp8 = settings.fp8_cfg
    if not fp8.enabled:
        return {}
    padded = {"moe_router_padding_for_quantization": True} if has_experts else {}
    return {"fp8": fp8.fp8, "fp8_recipe": fp8.fp8_recipe, **padded}


def width_multiple(settings: MegatronConfig) -> int:
    """The width of a rank's rows must be a multiple of this; 1 without FP8.

    With sequence parallelism a rank's norms quantise its own part of the row.
    """
    if not settings.fp8_cfg.enabled:
        return 1
    shared_by = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
    return _MULTIPLES[settings.fp8_cfg.fp8_recipe] * shared_by

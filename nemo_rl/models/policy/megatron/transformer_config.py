"""Configuration of a Hugging Face model and `policy.megatron_cfg` -> Megatron's configuration of the same model."""

import math
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.config.rules import remedy
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.megatron.config import Fp8Config, MegatronConfig
from nemo_rl.models.policy.megatron.mapping import FAMILIES, expert_width, heads_of, is_latent, is_moe_layer
from nemo_rl.models.policy.pretrained import DTYPES

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the latents `q_a` and `kv_a`, a constant in transformers."""
_SAME_KEYS = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "moe_token_dispatcher_type",
    "gradient_accumulation_fusion", "bias_activation_fusion", "apply_rope_fusion",
}  # fmt: skip
_EXPERT_KEYS = {
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "moe_permute_fusion",
    "moe_grouped_gemm", "moe_shared_expert_overlap",
}  # fmt: skip


LAYER_TYPES = ("qwen2", "qwen3", "gemma3_text", "gpt_oss")
"""Architectures that have a sliding window in some layers."""


def transformer_config(
    model: PretrainedConfig, policy: PolicyConfig, *, use_transformer_engine: bool
) -> TransformerConfig:
    """Megatron's configuration of a model that has a mapping (`mapping.py`).

    Raises:
        ValueError: Megatron's modules do not support a setting of the model. The text says what would work.
    """
    config, settings = model.get_text_config(), policy.megatron_cfg
    moe_layers = [int(is_moe_layer(config, layer)) for layer in range(config.num_hidden_layers)]
    values = _dense_layers(config) | _training(policy) | _fp8(settings.fp8_cfg, has_experts=any(moe_layers))
    values |= _experts(config, settings, moe_layers) if any(moe_layers) else {}
    values["persist_layer_norm"] = use_transformer_engine
    if values["activation_func"] is F.silu and not use_transformer_engine and not settings.bias_activation_fusion:
        values["activation_func"] = silu
    if not is_latent(config):
        return TransformerConfig(**values, **_attention(config))
    if use_transformer_engine and config.rms_norm_eps != LATENT_NORM_EPS:
        raise ValueError(
            f"rms_norm_eps={config.rms_norm_eps} of this {config.model_type} model: the norms of its latents use "
            f"{LATENT_NORM_EPS}, and Transformer Engine has one value for all; set "
            "megatron_cfg.transformer_impl to local"
        )
    return MLATransformerConfig(**values, **_latent_attention(config))


def silu(gate: torch.Tensor) -> torch.Tensor:
    """SiLU, in place without gradients: Megatron's gate and up projections are one tensor, which stays in memory until
    both are multiplied, so a pass for logprobs saves the memory of a third part."""
    return F.silu(gate, inplace=not torch.is_grad_enabled())


def swish(gate: torch.Tensor, sharpness: float) -> torch.Tensor:
    """SiLU with another slope, which GPT-OSS has."""
    return gate * torch.sigmoid(sharpness * gate)


def _dense_layers(config: PretrainedConfig) -> dict[str, Any]:
    """Sizes, and the windows of layers whose queries see at most the last `sliding_window` keys, with their own."""
    values = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "layernorm_zero_centered_gamma": FAMILIES[config.model_type].zero_centered_norms,
        "attention_output_gate": FAMILIES[config.model_type].has_output_gate,
        "add_bias_linear": FAMILIES[config.model_type].has_biases,
        "softmax_type": "learnable" if FAMILIES[config.model_type].has_sinks else "vanilla",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if config.model_type == "gemma3_text":
        values["activation_func"] = ACT2FN[config.hidden_activation]
    if config.model_type == "gpt_oss":
        values |= {
            "activation_func": partial(swish, sharpness=config.swiglu_alpha),
            "activation_func_clamp_value": config.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
    window = config.to_dict().get("sliding_window")
    if window is None:
        return values
    # Other architectures have the window in all layers, whatever the types in their configuration.
    all_layers = ["sliding_attention"] * config.num_hidden_layers
    kinds = config.layer_types if config.model_type in LAYER_TYPES else all_layers
    if foreign := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise ValueError(
            f"config.json: layer_types: {', '.join(foreign)} of a {config.model_type} model have no mapping to "
            "Megatron Core; train it with dtensor_cfg"
        )
    return values | {
        "window_size": (window - 1, 0),  # Megatron does not count the query's own key
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _attention(config: PretrainedConfig) -> dict[str, Any]:
    _, groups, head_dim = heads_of(config)
    _, factor = rope_of(config, head_dim)
    scale = factor**2 * head_dim**-0.5  # the factor multiplies all features of both queries and keys
    if config.model_type == "gemma3_text":
        scale = config.query_pre_attn_scalar**-0.5
    return {
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "add_qkv_bias": FAMILIES[config.model_type].has(config, "qkv_bias"),
        "qk_layernorm": FAMILIES[config.model_type].has(config, "qk_norm"),
        "softmax_scale": None if scale == head_dim**-0.5 else scale,
    }


def _training(policy: PolicyConfig) -> dict[str, Any]:
    settings = policy.megatron_cfg
    dtype = DTYPES[policy.precision]
    recompute: dict[str, Any] = {}
    if settings.activation_checkpointing and settings.recompute_granularity == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": settings.recompute_modules}
    elif settings.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        **settings.model_dump(include=_SAME_KEYS),
        **recompute,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": settings.pipeline_model_parallel_size > 1,  # of micro-batches
        # Megatron's batches of messages mix up the two directions on two ranks with several stages each.
        "overlap_p2p_comm": settings.stages_per_rank > 1,
        "batch_p2p_comm": settings.stages_per_rank == 1,
        "batch_p2p_sync": False,  # a wait for the device, for old versions of torch
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # all weights come from the checkpoint
        "calculate_per_token_loss": True,  # the losses are already sums with the right divisor
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "attention_backend": AttnBackend[settings.attention_backend],
        "deterministic_mode": policy.deterministic,
    }


def _experts(config: PretrainedConfig, settings: MegatronConfig, moe_layers: list[int]) -> dict[str, Any]:
    router, experts = ROUTERS[config.model_type](config), FAMILIES[config.model_type].experts
    assert experts is not None
    if config.num_experts_per_tok == 1 and not router.get("moe_router_pre_softmax"):
        raise ValueError(
            f"config.json: num_experts_per_tok: 1 of a {config.model_type} model has no mapping to Megatron Core, "
            "which needs 2 or more, for the weight of one, normalised, is always 1; train it with dtensor_cfg"
        )
    return {
        "num_moe_experts": num_experts(config),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": expert_width(config),
        "moe_layer_freq": moe_layers,
        "moe_shared_expert_intermediate_size": experts.shared_width(config) or None,
        "moe_shared_expert_gate": experts.gated_shared_expert,
        **settings.model_dump(include=_EXPERT_KEYS),
        "moe_router_dtype": "fp32" if settings.moe_router_dtype == "float32" else settings.moe_router_dtype,
        **router,
    }


def _groups(config: Any) -> dict[str, Any]:
    return {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}


def _sigmoid_router(config: Any) -> dict[str, Any]:
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **_groups(config),
    }


ROUTERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    # A softmax over the chosen experts equals the softmax over all, normalised over the chosen.
    **dict.fromkeys(("qwen3_moe", "qwen3_next"), lambda config: {"moe_router_pre_softmax": not config.norm_topk_prob}),
    **dict.fromkeys(("mixtral", "gpt_oss", "qwen3_5_moe_text"), lambda config: {"moe_router_pre_softmax": False}),
    "deepseek_v2": lambda config: {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **({} if config.topk_method == "greedy" else _groups(config)),
    },
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), _sigmoid_router),
}
"""`model_type` -> Megatron's settings of the same router. `moe.PolicyRouter` chooses groups."""


# -- rotary embeddings (Su et al. 2021, arXiv 2104.09864)
#
# transformers computes the frequencies. Some kinds multiply cosine and sine by a factor (YaRN's attention factor, Peng
# et al. 2023, arXiv 2309.00071, section 3.4). If all features rotate, that is the same as a factor of the scores.


def rope_of(config: PretrainedConfig, head_dim: int, layer_type: str = "full_attention") -> tuple[torch.Tensor, float]:
    """Inverse frequencies of the features that rotate, float32 [R / 2], and the factor of their cosine and sine.

    `layer_type` counts if the configuration has parameters of each. `checks.check_rope` has refused kinds whose
    frequencies depend on the length of the sequence, and factors other than 1 for a part of the features or layers.
    """
    given = config.rope_parameters
    by_layer = {"layer_type": layer_type} if layer_type in given else {}
    given = given[layer_type] if by_layer else given
    kind = given["rope_type"]
    if kind == "default":
        rotated = int(head_dim * given.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / given["rope_theta"] ** exponents, 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **by_layer)


def _latent_attention(config: PretrainedConfig) -> dict[str, Any]:
    """Multi-head latent attention, where a part of each head's features rotates (arXiv 2405.04434, section 2.1).

    Raises:
        ValueError: YaRN without rounding, or with a factor that Megatron cannot express.
    """
    given, kind = config.rope_parameters, config.rope_parameters["rope_type"]
    _, attention_factor = rope_of(config, config.qk_rope_head_dim)
    factor, all_dim = (1.0, 0.0) if kind == "default" else (given["factor"], given.get("mscale_all_dim") or 0.0)
    values = {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": given["rope_theta"],
        "rotary_scaling_factor": factor,
        "mscale_all_dim": all_dim,
    }
    if kind != "yarn":
        return values
    for setting, is_wrong, fix in (
        ("truncate", not given.get("truncate", True), "true"),
        ("attention_factor", factor <= 1 and attention_factor != 1.0, "1"),
    ):
        if is_wrong:
            key = f"policy.hf_config_overrides.rope_parameters.{setting}"
            raise ValueError(
                f"{key}={given[setting]} of this {config.model_type} model is not known to the Megatron backend; train "
                f"it with dtensor_cfg, or {remedy(f'{key}={fix}')}"
            )
    # Megatron multiplies by (0.1 mscale log factor + 1) / (0.1 mscale_all_dim log factor + 1), or by 1 up to factor 1.
    unit = 0.1 * math.log(factor)
    return values | {
        "mscale": 1.0 if factor <= 1 else (attention_factor * (unit * all_dim + 1.0) - 1.0) / unit,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "original_max_position_embeddings": given["original_max_position_embeddings"],
    }


def set_frequencies(stage: Any, model: PretrainedConfig, device: torch.device) -> None:
    """Replace the frequencies that Megatron computed in a stage (a GPTModel) by transformers' frequencies."""
    is_latent = stage.config.multi_latent_attention
    rotated = stage.config.qk_pos_emb_head_dim if is_latent else stage.config.kv_channels
    frequencies = rope_of(model.get_text_config(), rotated)[0].to(device)
    attentions = [layer.self_attention for layer in stage.decoder.layers] if is_latent else [stage]
    for embedding in (module.rotary_pos_emb for module in attentions):
        if not isinstance(embedding, YarnRotaryEmbedding):  # which computes its own in every pass
            embedding.inv_freq = frequencies
    config = model.get_text_config()
    if "sliding_attention" not in config.rope_parameters:
        return
    local = copy(stage.rotary_pos_emb)
    local.inv_freq = rope_of(config, rotated, "sliding_attention")[0].to(device)

    def rotate_by_local(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"rotary_pos_emb": local(len(kwargs["rotary_pos_emb"]), packed_seq=True)}

    for layer in stage.decoder.layers:
        if config.layer_types[layer.layer_number - 1] == "sliding_attention":
            layer.self_attention.register_forward_pre_hook(rotate_by_local, with_kwargs=True)


# -- 8-bit floating point with Transformer Engine, from `policy.megatron_cfg.fp8_cfg`
#
# Weights stay in bfloat16 and float32; operands are quantised for each matrix product, so loading, sending and saving
# weights do not depend on FP8. Formats: Micikevicius et al. 2022, arXiv 2209.05433. One scale per block of 128:
# DeepSeek-V3, arXiv 2412.19437, section 3.3.


def _fp8(settings: Fp8Config, *, has_experts: bool) -> dict[str, Any]:
    if not settings.enabled:
        return {}
    padded = {"moe_router_padding_for_quantization": True} if has_experts else {}
    return {"fp8": settings.fp8, "fp8_recipe": settings.fp8_recipe, **padded}


def width_multiple(settings: MegatronConfig) -> int:
    """The width of a rank's rows must be a multiple of this; 1 without FP8.

    With sequence parallelism a rank's norms quantise its own part of the row.
    """
    if not settings.fp8_cfg.enabled:
        return 1
    shared_by = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
    # The tokens of a matrix product are a multiple of 16 or 32. Megatron's router pads the tokens of each expert.
    return (32 if settings.fp8_cfg.fp8_recipe == "mxfp8" else 16) * shared_by

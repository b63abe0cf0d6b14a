"""Small random models of every architecture that has a mapping to Megatron."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.unit.policy.models import SHAPE

VOCAB = 61  # odd: a rank's rows are padded
NUM_EXPERTS = 4

_SHAPE: dict[str, Any] = SHAPE | {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
_WINDOW: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_MOE, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": NUM_EXPERTS, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_SPARSE_DELTA_NET = _DELTA_NET | _MOE | {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 24}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": _MOE | {"head_dim": 16, "num_experts": NUM_EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": _LATENT | {"q_lora_rank": 16, "n_shared_experts": 1},
    "gemma3_text": _WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "qwen3_next": _SPARSE_DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _SPARSE_DELTA_NET,
    "gpt_oss": _WINDOW | {"head_dim": 16, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "glm4_moe": _MOE
    | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": NUM_EXPERTS}
    | {"n_shared_experts": 1, "first_k_dense_replace": 1},
}
"""`model_type` -> settings of its config.json beside the shape."""
MOE = [name for name, settings in FAMILIES.items() if "num_experts_per_tok" in settings]


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(name, **_SHAPE | FAMILIES[name] | changes)


def full_name(family: str, name: str) -> str:
    """The name of a tensor in the model that sees, of which Qwen3.5's text model saved alone is a part."""
    return name.replace("model.", "model.language_model.", 1) if family.startswith("qwen3_5") else name


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """In float32, with norms and biases of their own, so that nothing hides behind 0 or 1. `changes`: of its config."""
    torch.manual_seed(0)
    config = config_of(name, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.2)
    return model

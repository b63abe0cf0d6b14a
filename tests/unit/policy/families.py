"""Tiny random models of the families in docs/models.md, with every kind of layer that a family has."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.unit.policy.models import SHAPE, perturb

VOCAB = 300
"""Of `build_tiny_tokenizer`, rounded up."""

_SHAPE = SHAPE | {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
_SHAPE |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
# The engine's gated delta nets want heads of 128 features.
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_LATENT = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True, "head_dim": None},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        **_EXPERTS, **_LATENT,
    },
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gpt_oss": {
        **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 8,
        },
    },
    "glm4_moe": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "use_qk_norm": True, "attention_bias": True, **_EXPERTS,
    },
    "qwen3_next": {
        "num_experts": 4, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, **_EXPERTS, **_DELTA_NET,
    },
    "qwen3_5_text": {**_DELTA_NET},
    "qwen3_5_moe_text": {"num_experts": 4, "shared_expert_intermediate_size": 64, **_EXPERTS, **_DELTA_NET},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 64, **_EXPERTS,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
        "time_step_min": 1e-30,  # for transformers a limit of time steps, for vLLM and for training here none
    },
    "llama4_text": {
        "intermediate_size_mlp": 192, "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 4,
        "attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 4, "interleave_moe_layer_step": 2,
        "attention_bias": False,
    },
}  # fmt: skip
"""`model_type` -> settings of its config.json beside the shape."""


def family_config(family: str, **changes: Any) -> PretrainedConfig:
    settings = _SHAPE | FAMILIES[family] | changes
    return AutoConfig.for_model(family, **{key: value for key, value in settings.items() if value is not None})


def random_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Weights with every bias and norm perturbed, so that nothing hides behind 0 or 1."""
    torch.manual_seed(0)
    config = family_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    perturb(model, 0.05)
    return model.eval()


def save_random_model(
    family: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """The same model, with the tiny model's tokenizer in `directory`."""
    from nemo_rl.data.tiny_model import build_tiny_tokenizer

    model = random_model(family, dtype, **changes)
    model.save_pretrained(directory)
    build_tiny_tokenizer().save_pretrained(directory)
    return model

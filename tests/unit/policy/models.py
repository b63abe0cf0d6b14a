"""Small random models on disk, one per family that tests train."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97  # odd: shards are uneven

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
_CAPPED = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "deep": ("llama", {"num_hidden_layers": 4}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "gemma2": ("gemma2", _GEMMA | _CAPPED | {"sliding_window": 6}),
    "gemma3": ("gemma3_text", _GEMMA | _SLIDING),
    "phi3": ("phi3", {}),
    "phi": ("phi", {"qk_layernorm": True}),
    "qwen3-moe": ("qwen3_moe", _MOE | {"num_experts": 4, "norm_topk_prob": True, "head_dim": 16}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "gpt-oss": ("gpt_oss", _SLIDING | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", _MOE | _LATENT | _GROUPS | {"num_key_value_heads": 4}),
}
"""Name -> its `model_type`, and settings of its config.json beside the shape."""


class Models(dict[str, Path]):
    """The directory of each family, written when it is first asked for: for tests that only read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __missing__(self, family: str) -> Path:
        save_model(family, self.directory / family)
        return self.setdefault(family, self.directory / family)


def save_model(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> None:
    """In float32, with perturbed biases and norms, so that nothing hides behind 0 or 1. `changes`: of its shape."""
    torch.manual_seed(seed)
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **SHAPE | settings | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(model, 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer) * 0.2)
    model.save_pretrained(directory)


def as_torch_file(directory: Path) -> dict[str, torch.Tensor]:
    """Write the weights in the format of torch in place of safetensors. Returns them."""
    tensors = load_file(directory / "model.safetensors")
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    return tensors


def edit_json(file: Path, **changes: Any) -> None:
    """Replace values of the mapping in `file`, or add them."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@torch.no_grad()
def perturb(model: torch.nn.Module, by: float) -> None:
    """Add random numbers of size `by` to every parameter."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * by)

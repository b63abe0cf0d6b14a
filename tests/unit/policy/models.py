"""Small random models on disk, one per supported family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ["qwen2-tied", "llama", "qwen3"]
ALL_FAMILIES = [*FAMILIES, "mistral", "gemma3", "phi3", "phi"]
VOCAB = 97  # odd: shards are uneven


def save_random_model(family: str, directory: Path, *, seed: int = 0) -> None:
    """A two-layer model with perturbed biases and norms, so that nothing hides behind 0 or 1.

    gemma3 has a sliding window of 6 positions in its first layer, mistral one of 5 in both.
    """
    torch.manual_seed(seed)
    model = _MAKERS[family](
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        }
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)


def _gemma3(shape: dict[str, Any]) -> PreTrainedModel:
    layer_types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**shape, head_dim=32, query_pre_attn_scalar=32, sliding_window=6, layer_types=layer_types)
    return Gemma3ForCausalLM(config)


_MAKERS = {
    "qwen2-tied": lambda shape: Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
    "llama": lambda shape: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)),
    "qwen3": lambda shape: Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32, tie_word_embeddings=False)),
    "mistral": lambda shape: MistralForCausalLM(MistralConfig(**shape, sliding_window=5, tie_word_embeddings=False)),
    "gemma3": _gemma3,
    "phi3": lambda shape: Phi3ForCausalLM(Phi3Config(**shape, tie_word_embeddings=False)),
    "phi": lambda shape: PhiForCausalLM(PhiConfig(**shape, qk_layernorm=True, tie_word_embeddings=False)),
}

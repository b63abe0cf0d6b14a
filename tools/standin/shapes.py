"""The shapes of the models that our configurations name, as their config.json has them: no hub serves them here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from nemo_rl.config.sources import load_tree
from nemo_rl.models.policy.vision.families import sees_images

RECIPES = Path(__file__).parents[2] / "examples" / "configs" / "recipes"


def model(kind: Any, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int, positions: int, **more: Any):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": positions}
    return kind(**sizes, **attention, **{"tie_word_embeddings": False} | more)


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def _llama3(factor: float) -> dict[str, Any]:
    extended = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _rope(5e5, rope_type="llama3", original_max_position_embeddings=8192, **extended)


TIED = {"tie_word_embeddings": True}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
WIDE_EXPERTS = EXPERTS | {"moe_intermediate_size": 1536}
QWEN3 = {"head_dim": 128}


def _text(*sizes: int, **more: Any) -> dict[str, Any]:
    """The language model of a vision-language model, as a section of its config.json."""
    return model(dict, *sizes, **more)


MODELS: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B": model(LlamaConfig, 128256, 4096, 14336, 32, 32, 8, 131072, **_llama3(8.0)),
    "meta-llama/Llama-3.1-8B-Instruct": model(LlamaConfig, 128256, 4096, 14336, 32, 32, 8, 131072, **_llama3(8.0)),
    "meta-llama/Llama-3.2-1B": model(LlamaConfig, 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, **TIED,
                                     **_llama3(32.0)),
    "meta-llama/Llama-3.2-1B-Instruct": model(LlamaConfig, 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, **TIED,
                                              **_llama3(32.0)),
    "meta-llama/Llama-3.3-70B-Instruct": model(LlamaConfig, 128256, 8192, 28672, 80, 64, 8, 131072, **_llama3(8.0)),
    "Qwen/Qwen2.5-1.5B": model(Qwen2Config, 151936, 1536, 8960, 28, 12, 2, 131072, **TIED, **_rope(1e6)),
    "Qwen/Qwen2.5-1.5B-Instruct": model(Qwen2Config, 151936, 1536, 8960, 28, 12, 2, 32768, **TIED, **_rope(1e6)),
    "Qwen/Qwen2.5-7B": model(Qwen2Config, 152064, 3584, 18944, 28, 28, 4, 131072, **_rope(1e6)),
    "Qwen/Qwen2.5-7B-Instruct": model(Qwen2Config, 152064, 3584, 18944, 28, 28, 4, 32768, **_rope(1e6)),
    "Qwen/Qwen2.5-32B-Instruct": model(Qwen2Config, 152064, 5120, 27648, 64, 40, 8, 32768, **_rope(1e6)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": model(Qwen2Config, 151936, 1536, 8960, 28, 12, 2, 131072),
    "Qwen/Qwen3-1.7B-Base": model(Qwen3Config, 151936, 2048, 6144, 28, 16, 8, 32768, **QWEN3, **TIED, **_rope(1e6)),
    "Qwen/Qwen3-4B": model(Qwen3Config, 151936, 2560, 9728, 36, 32, 8, 40960, **QWEN3, **TIED, **_rope(1e6)),
    "Qwen/Qwen3-8B": model(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, 40960, **QWEN3, **_rope(1e6)),
    "Qwen/Qwen3-32B": model(Qwen3Config, 151936, 5120, 25600, 64, 64, 8, 40960, **QWEN3, **_rope(1e6)),
    "Qwen/Qwen3-30B-A3B": model(Qwen3MoeConfig, 151936, 2048, 6144, 48, 32, 4, 40960, **QWEN3, **EXPERTS,
                                **_rope(1e6)),
    "Qwen/Qwen3-235B-A22B": model(Qwen3MoeConfig, 151936, 4096, 12288, 94, 64, 4, 40960, **QWEN3, **WIDE_EXPERTS,
                                  **_rope(1e6)),
    "unsloth/DeepSeek-V3-bf16": DeepseekV3Config(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256, n_group=8,
        num_experts_per_tok=8, topk_group=4, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": Qwen2_5_VLConfig(
        text_config=_text(151936, 2048, 11008, 36, 16, 2, 128000, **TIED,
                          **_rope(1e6, mrope_section=[16, 24, 24])),
        vision_config={"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14,
                       "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        **TIED,
    ),
    "Qwen/Qwen3-VL-4B-Instruct": Qwen3VLConfig(
        text_config=_text(151936, 2560, 9728, 36, 32, 8, 262144, **QWEN3, **TIED,
                          **_rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True)),
        vision_config={"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "patch_size": 16,
                       "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]},
        **TIED,
    ),
    "google/gemma-3-4b-it": Gemma3Config(
        text_config=_text(262208, 2560, 10240, 34, 8, 4, 131072, head_dim=256, sliding_window=1024, **TIED),
        vision_config={"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16,
                       "intermediate_size": 4304, "image_size": 896, "patch_size": 14},
        **TIED,
    ),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": SmolVLMConfig(
        text_config=_text(49280, 2048, 8192, 24, 32, 32, 8192, head_dim=64, model_type="llama", **_rope(1.3e5)),
        vision_config={"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16,
                       "intermediate_size": 4304, "image_size": 384, "patch_size": 14},
        scale_factor=3,
    ),
}  # fmt: skip

_TINY_EXPERTS = EXPERTS | {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
_TINY = (512, 64, 128, 8, 8, 4, 4096)
MODELS |= {
    "tiny-llama": model(LlamaConfig, *_TINY),
    "tiny-qwen3": model(Qwen3Config, *_TINY, head_dim=16),
    "tiny-qwen3moe": model(Qwen3MoeConfig, *_TINY, head_dim=16, **_TINY_EXPERTS),
    "tiny-dsv3": DeepseekV3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, moe_intermediate_size=64, n_shared_experts=1, n_routed_experts=16, n_group=4,
        num_experts_per_tok=4, topk_group=2, first_k_dense_replace=2, kv_lora_rank=32, q_lora_rank=64,
        qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
"""By the name that configurations use. The tiny ones are nobody's: layouts of many ranks run with them in seconds."""


def published(name: str) -> str:
    """The name in `MODELS` of a model: of the run that a recipe continues, the model that this run began with.

    With `@4` after it, the model has only four layers.

    Raises:
        ValueError: the shape is not known.
    """
    if name.partition("@")[0] in MODELS:
        return name
    if found := re.match(r"results/([^/]+)/", name):
        for path in RECIPES.rglob(f"{found[1]}.yaml"):
            return published(load_tree(path).get(("policy", "model_name")))
    raise ValueError(f"{name}: its shape is not known here; add its config.json to MODELS in tools/standin/shapes.py")


def shape(name: str) -> PretrainedConfig:
    """The shape of a model by the name that `published` knows.

    Raises:
        ValueError: the shape is not known.
    """
    name, _, layers = published(name).partition("@")
    if not layers:
        return MODELS[name]
    config = MODELS[name]
    assert not sees_images(config), "a vision-language model has its layers one section deeper"
    return type(config)(**config.to_dict() | {"num_hidden_layers": int(layers), "layer_types": None})

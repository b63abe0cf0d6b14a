"""Generation configurations of the tests."""

from __future__ import annotations

from typing import Any

from nemo_rl.models.generation.config import GenerationConfig, VllmConfig


def generation_config(max_model_len: int = 128, **vllm_kwargs: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=32,
        val_temperature=1.0,
        val_top_p=1.0,
        val_top_k=None,
        vllm_cfg=VllmConfig(precision="float32", max_model_len=max_model_len),
        vllm_kwargs=vllm_kwargs,
    )

"""Training in 8-bit floating point with Transformer Engine, from `policy.megatron_cfg.fp8_cfg`.

Weights stay in bfloat16 and float32; what is multiplied is quantised for each product. So loading, sending and saving
weights know nothing of FP8. Formats: Micikevicius et al. 2022, arXiv 2209.05433; blocks of 128 with scales of their
own: DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

from nemo_rl.models.policy.megatron_config import MegatronConfig

_MULTIPLES = {"blockwise": 16, "tensorwise": 16, "delayed": 16, "mxfp8": 32}
"""Tokens of a product are a multiple of this (those of one expert too, which Megatron's router pads)."""


def fp8_fields(settings: MegatronConfig, *, has_experts: bool) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`; none where FP8 is off."""
    fp8 = settings.fp8_cfg
    if not fp8.enabled:
        return {}
    padded = {"moe_router_padding_for_quantization": True} if has_experts else {}
    return {"fp8": fp8.fp8, "fp8_recipe": fp8.fp8_recipe, **padded}


def width_multiple(settings: MegatronConfig) -> int:
    """What the width of a rank's rows has to be a multiple of; 1 where FP8 is off.

    With sequence parallelism a rank's norms quantise its own part of the row.
    """
    if not settings.fp8_cfg.enabled:
        return 1
    shared_by = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
    return _MULTIPLES[settings.fp8_cfg.fp8_recipe] * shared_by

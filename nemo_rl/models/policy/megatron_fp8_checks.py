"""What `policy.megatron_cfg.fp8_cfg` cannot be combined with. Free of torch, Megatron and Transformer Engine.

What the machine can do is asked elsewhere: whether there are GPUs (`megatron_device`), Transformer Engine and the
GPUs' compute capability (`megatron_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.models.policy.megatron_config import MegatronConfig

_RECOMPUTED_IN_FP8 = ("layernorm", "moe_act")


def fp8_problems(settings: MegatronConfig, precision: str) -> Iterator[tuple[str, str]]:
    """(key of `policy.megatron_cfg`, what would work) for training in FP8. `precision`: `policy.precision`."""
    fp8 = settings.fp8_cfg
    if not fp8.enabled:
        return
    if precision != "bfloat16":
        yield (
            "fp8_cfg.enabled",
            f"FP8 is for weights in bfloat16, and policy.precision is {precision}; set that to bfloat16",
        )
    if fp8.fp8_param:
        yield (
            "fp8_cfg.fp8_param",
            "not supported yet: weights that are FP8 themselves; set it to false, which still multiplies in FP8",
        )
    is_selective = settings.activation_checkpointing and settings.recompute_granularity == "selective"
    recomputed = [name for name in settings.recompute_modules if name in _RECOMPUTED_IN_FP8] if is_selective else []
    if fp8.fp8_recipe == "delayed" and recomputed:
        yield (
            "fp8_cfg.fp8_recipe",
            f"delayed scales do not go with recomputing {' and '.join(recomputed)}; leave that out of "
            "recompute_modules, or set tensorwise or blockwise",
        )
    if settings.moe_token_dispatcher_type == "allgather":
        yield (
            "moe_token_dispatcher_type",
            "allgather cannot pad the tokens of an expert, which products in FP8 need; set it to alltoall",
        )

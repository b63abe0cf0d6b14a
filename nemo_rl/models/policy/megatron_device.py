"""What of `policy.megatron_cfg` needs GPUs, or Transformer Engine on them. Free of torch.

Whether Transformer Engine is installed, and what the GPUs can do, is asked where a run starts (`megatron_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.models.policy.megatron_config import MegatronConfig

Problems = Iterator[tuple[str, str]]

_CPU = "cluster.gpus_per_node is 0"


def device_problems(settings: MegatronConfig, *, use_gpus: bool) -> Problems:
    """(key of `policy.megatron_cfg`, what would work) for what the kind of devices rules out."""
    needs_engine = list(engine_switches(settings))
    if not use_gpus:
        for key, value, neutral in (*needs_engine, *_gpu_switches(settings)):
            yield key, f"{value} runs on GPUs only, and {_CPU}; set it to {neutral}, or cluster.gpus_per_node above 0"
    elif settings.transformer_impl == "local":
        for key, value, neutral in needs_engine:
            yield (
                key,
                f"{value} is Transformer Engine's, and policy.megatron_cfg.transformer_impl is local; set it to "
                f"{neutral}, or that to transformer_engine",
            )


def engine_switches(settings: MegatronConfig) -> Iterator[tuple[str, str, str]]:
    """(key, value, value that does without) of everything that asks for Transformer Engine."""
    if settings.transformer_impl == "transformer_engine":
        yield "transformer_impl", "transformer_engine", "local"
    if settings.fp8_cfg.enabled:
        yield "fp8_cfg.enabled", "true", "false"
    if settings.optimizer.use_precision_aware_optimizer:
        yield "optimizer.use_precision_aware_optimizer", "true", "false"
    if settings.attention_backend in ("flash", "fused", "unfused"):
        yield "attention_backend", settings.attention_backend, "auto"
    switches = {
        "apply_rope_fusion": settings.apply_rope_fusion,
        "gradient_accumulation_fusion": settings.gradient_accumulation_fusion,
        "moe_grouped_gemm": settings.moe_grouped_gemm,
        "moe_permute_fusion": settings.moe_permute_fusion,
    }
    yield from ((key, "true", "false") for key, is_on in switches.items() if is_on)


def _gpu_switches(settings: MegatronConfig) -> Iterator[tuple[str, str, str]]:
    switches = {
        "optimizer.optimizer_cpu_offload": settings.optimizer.optimizer_cpu_offload,
        "bias_activation_fusion": settings.bias_activation_fusion,
        "moe_shared_expert_overlap": settings.moe_shared_expert_overlap,
    }
    yield from ((key, "true", "false") for key, is_on in switches.items() if is_on)

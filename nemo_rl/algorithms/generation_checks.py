"""What the backend of generation cannot be combined with, found before anything starts.

Each check yields (dotted key, message); the message says which values would work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl.models.policy.config import PolicyConfig

if TYPE_CHECKING:
    from nemo_rl.algorithms.rollout_config import RolloutMasterConfig

Problems = Iterator[tuple[str, str]]


def check_http_server(cfg: RolloutMasterConfig) -> Problems:
    """Whether there are engines that answer at any time."""
    generation, key = cfg.policy.generation, "policy.generation.vllm_cfg.expose_http_server"
    if not generation.vllm_cfg.expose_http_server:
        return
    if cfg.rollout.replay_from is not None:
        yield key, f"no engine is started with {cfg.section}.replay_from; set it to false"
    elif generation.is_by_policy:
        yield (
            key,
            "nobody answers while the policy trains where its own workers generate; set it to false, or "
            "policy.generation.backend=vllm",
        )
    elif cfg.cluster.use_gpus and generation.colocated.enabled:
        yield (
            key,
            "colocated engines sleep while the policy trains; set policy.generation.colocated.enabled=false and its "
            "resources, or this to false",
        )


def check_precision(cfg: RolloutMasterConfig) -> Problems:
    """Whether the engines' devices can do what is asked of them."""
    vllm = cfg.policy.generation.vllm_cfg
    if not cfg.cluster.use_gpus and not cfg.policy.generation.is_by_policy:
        for asked in vllm.gpu_only:
            key, _, value = asked.partition("=")
            works = f"policy.precision={cfg.policy.precision}" if key == "precision" else "auto"
            yield f"policy.generation.vllm_cfg.{key}", f"{value} runs on GPUs only; use {works}"


def check_router_replay(cfg: RolloutMasterConfig) -> Problems:
    """Whether the engines say which experts every token went through, where training takes these."""
    for model in cfg.further_models:
        if model.config.router_replay.enabled:
            yield f"{model.key}.router_replay.enabled", "its experts are not those that generated; set it to false"
    if not cfg.policy.router_replay.enabled or cfg.rollout.replay_from is not None:
        return
    generation, why = cfg.policy.generation, "asked for by policy.router_replay.enabled=true"
    if generation.is_by_policy:
        yield (
            "policy.router_replay.enabled",
            f"policy.generation.backend={generation.backend} does not say which experts a token went through; set it "
            "to false, or policy.generation.backend=vllm",
        )
        return
    vllm = generation.vllm_cfg
    if vllm.pipeline_parallel_size > 1:
        yield (
            "policy.generation.vllm_cfg.pipeline_parallel_size",
            f"{vllm.pipeline_parallel_size}: engines of one stage alone return the experts of tokens, {why}; set it "
            "to 1",
        )
    if cfg.cluster.use_gpus and not vllm.enable_prefix_caching:
        yield (
            "policy.generation.vllm_cfg.enable_prefix_caching",
            f"vLLM returns the experts of tokens, {why}, only with a prefix cache; set it to true",
        )


def check_backend(cfg: RolloutMasterConfig) -> Problems:
    """Whether the policy's layout, and everything that is set of generation, goes with the backend."""
    generation = cfg.policy.generation
    if not generation.is_by_policy:
        return
    backend, trains_with = generation.backend, cfg.policy.backend_key
    if trains_with != ("megatron_cfg" if backend == "megatron" else "dtensor_cfg"):
        wanted = "megatron_cfg" if backend == "megatron" else "dtensor_cfg"
        yield (
            "policy.generation.backend",
            f"{backend} is for a policy that trains with policy.{wanted}; set policy.{wanted}.enabled=true and "
            f"policy.{trains_with}.enabled=false, or policy.generation.backend=vllm",
        )
        return
    why = f"the policy's own workers generate (policy.generation.backend={backend})"
    yield from _check_layout(cfg.policy, why)
    if generation.vllm_cfg.precision != cfg.policy.precision:
        yield (
            "policy.generation.vllm_cfg.precision",
            f"{why}, in policy.precision={cfg.policy.precision}; remove the key, or set policy.generation.backend=vllm",
        )
    if generation.vllm_cfg.tensor_parallel_size != 1:
        name = "tensor_parallel_size" if backend == "hf" else "tensor_model_parallel_size"
        yield (
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{why}, cut as policy.{trains_with}.{name} says; remove the key",
        )
    if generation.vllm_kwargs:
        yield (
            "policy.generation.vllm_kwargs",
            f"{why}, which know none of {', '.join(generation.vllm_kwargs)}; remove them",
        )
    if not generation.colocated.enabled:
        yield (
            "policy.generation.colocated.enabled",
            f"{why}: they have no resources of their own; set it to true, or policy.generation.backend=vllm",
        )


def _check_layout(policy: PolicyConfig, why: str) -> Problems:
    """Whether the ranks that train can draw single tokens, each data-parallel rank for itself."""
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    if policy.backend_key == "megatron_cfg":
        sizes = {
            "pipeline_model_parallel_size": (megatron.pipeline_model_parallel_size, "pipeline stages"),
            "context_parallel_size": (megatron.context_parallel_size, "sequences cut over ranks"),
            "expert_model_parallel_size": (megatron.expert_model_parallel_size, "experts on different ranks"),
            "expert_tensor_parallel_size": (megatron.expert_tensor_parallel_size, "experts cut over ranks"),
        }
    else:
        sizes = {
            "pipeline_parallel_size": (dtensor.pipeline_parallel_size, "pipeline stages"),
            "context_parallel_size": (dtensor.context_parallel_size, "sequences cut over ranks"),
            "expert_parallel_size": (dtensor.expert_parallel_size, "experts on different ranks"),
        }
    for name, (size, what) in sizes.items():
        if size > 1:
            yield (
                f"policy.{policy.backend_key}.{name}",
                f"not supported yet: {what} where {why}; set it to 1, or policy.generation.backend=vllm",
            )
    if policy.backend_key == "megatron_cfg" and megatron.fp8_cfg.enabled:
        yield (
            "policy.megatron_cfg.fp8_cfg.enabled",
            f"not supported yet: products in FP8 where {why}; set it to false, or policy.generation.backend=vllm",
        )
    if policy.backend_cfg.sequence_parallel:
        yield (
            f"policy.{policy.backend_key}.sequence_parallel",
            f"single tokens cannot be cut over ranks, and {why}; set it to false, or policy.generation.backend=vllm",
        )

"""What the backend of generation cannot be combined with, found before anything starts.

Each check yields (dotted key, message); the message says which values would work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    elif generation.backend == "hf":
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


def check_backend(cfg: RolloutMasterConfig) -> Problems:
    """Whether the policy's layout, and everything that is set of generation, goes with the backend."""
    generation = cfg.policy.generation
    if generation.backend != "hf":
        return
    parallel, why = cfg.policy.dtensor_cfg, "the policy's own workers generate (policy.generation.backend=hf)"
    for size, name in (
        ("pipeline_parallel_size", "pipeline stages"),
        ("context_parallel_size", "sequences cut over ranks"),
        ("expert_parallel_size", "experts on different ranks"),
    ):
        if getattr(parallel, size) > 1:
            yield (
                f"policy.dtensor_cfg.{size}",
                f"not supported yet: {name} where {why}; set it to 1, or policy.generation.backend=vllm",
            )
    if parallel.sequence_parallel:
        yield (
            "policy.dtensor_cfg.sequence_parallel",
            f"single tokens cannot be cut over ranks, and {why}; set it to false, or policy.generation.backend=vllm",
        )
    if generation.vllm_cfg.precision != cfg.policy.precision:
        yield (
            "policy.generation.vllm_cfg.precision",
            f"{why}, in policy.precision={cfg.policy.precision}; remove the key, or set policy.generation.backend=vllm",
        )
    if generation.vllm_cfg.tensor_parallel_size != 1:
        yield (
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{why}, cut as policy.dtensor_cfg.tensor_parallel_size says; remove the key",
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

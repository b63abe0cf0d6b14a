"""The arrangement of a policy's ranks, whichever backend trains. Free of torch, for checks of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron_sizes import MegatronSizes, megatron_problems
from nemo_rl.models.policy.parallel_sizes import ParallelSizes, layout_problems


def training_sizes(policy: PolicyConfig, world_size: int) -> ParallelSizes:
    """How many of `world_size` ranks lie along each axis. ValueError when they do not divide."""
    for key, message in training_problems(policy, world_size):
        raise ValueError(f"policy.{key}: {message}")
    if policy.megatron_cfg.enabled:
        return MegatronSizes.of_megatron(policy.megatron_cfg, world_size)
    return ParallelSizes.of(policy.dtensor_cfg, world_size)


def training_problems(policy: PolicyConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """(key of `policy`, what would work) when the sizes do not fit `world_size` ranks."""
    if policy.megatron_cfg.enabled:
        problems = megatron_problems(policy.megatron_cfg, world_size)
    else:
        problems = layout_problems(policy.dtensor_cfg, world_size)
    for key, message in problems:
        yield f"{policy.backend_key}.{key}", message

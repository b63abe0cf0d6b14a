"""How many ranks lie along each axis of a policy's mesh. Free of torch: the configuration is checked with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.config import DTensorConfig


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """How many ranks lie along each axis."""

    pipeline_parallel: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    @classmethod
    def of(cls, config: DTensorConfig, world_size: int) -> ParallelSizes:
        """The sizes of `policy.dtensor_cfg` on `world_size` ranks. ValueError when they do not divide."""
        for key, message in layout_problems(config, world_size):
            raise ValueError(f"policy.dtensor_cfg.{key}: {message}")
        return cls(
            pipeline_parallel=config.pipeline_parallel_size,
            dp_replicate=config.dp_replicate_size,
            dp_shard=world_size // (config.model_parallel_size * config.dp_replicate_size),
            context_parallel=config.context_parallel_size,
            tensor_parallel=config.tensor_parallel_size,
            expert_parallel=config.expert_parallel_size,
        )

    @property
    def data_parallel(self) -> int:
        """Ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pipeline_parallel * self.data_parallel * self.context_parallel * self.tensor_parallel

    def describe(self) -> str:
        """`FSDP2 over 4 rank(s) x tensor 2`, for people."""
        shards = self.dp_shard * self.context_parallel
        parts = [f"FSDP2 over {shards} rank(s)"]
        counts = {
            "context": self.context_parallel,
            "experts": self.expert_parallel,
            "copies": self.dp_replicate,
            "tensor": self.tensor_parallel,
            "pipeline": self.pipeline_parallel,
        }
        within = [f"{name} {count}" for name, count in list(counts.items())[:2] if count > 1]
        if within:
            parts[0] += f" (of these {', '.join(within)})"
        parts += [f"{name} {count}" for name, count in list(counts.items())[2:] if count > 1]
        return " x ".join(parts)

    def sharding(self) -> NamedSharding:
        """Which rank sits where, for the controller: data-parallel ranks get different rows, the others the same."""
        shape = (self.pipeline_parallel, self.data_parallel, self.context_parallel, self.tensor_parallel)
        names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
        return NamedSharding(np.arange(self.world_size).reshape(shape), names)


def layout_problems(config: DTensorConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """(key of `policy.dtensor_cfg`, what would work) when the sizes do not fit `world_size` ranks."""
    model_parallel = config.model_parallel_size
    if world_size % model_parallel:
        sizes = {
            "tensor_parallel_size": config.tensor_parallel_size,
            "context_parallel_size": config.context_parallel_size,
            "pipeline_parallel_size": config.pipeline_parallel_size,
        }
        product = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
        largest = max(sizes, key=lambda key: sizes[key])
        yield largest, f"{product} does not divide the {world_size} training ranks; the product must be a divisor of it"
        return
    data_parallel = world_size // model_parallel
    if data_parallel % config.dp_replicate_size:
        works = _divisors(data_parallel)
        yield (
            "dp_replicate_size",
            f"{config.dp_replicate_size} does not divide the {data_parallel} data-parallel ranks; these would: {works}",
        )
        return
    shards = data_parallel // config.dp_replicate_size * config.context_parallel_size
    if shards % config.expert_parallel_size:
        yield (
            "expert_parallel_size",
            f"{config.expert_parallel_size} does not divide the {shards} ranks that shard the parameters (data x "
            f"context parallel); these would: {_divisors(shards)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)

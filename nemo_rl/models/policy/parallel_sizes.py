"""How many ranks lie along each axis of a policy's mesh. Free of torch: the configuration is checked with it."""

from __future__ import annotations

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
        model_parallel = config.model_parallel_size
        if world_size % (model_parallel * config.dp_replicate_size):
            raise ValueError(
                f"policy.dtensor_cfg: tensor_parallel_size={config.tensor_parallel_size} x context_parallel_size="
                f"{config.context_parallel_size} x pipeline_parallel_size={config.pipeline_parallel_size} x "
                f"dp_replicate_size={config.dp_replicate_size} = {model_parallel * config.dp_replicate_size} does not "
                f"divide the {world_size} ranks of the cluster"
            )
        dp_shard = world_size // (model_parallel * config.dp_replicate_size)
        shards = dp_shard * config.context_parallel_size
        if shards % config.expert_parallel_size:
            works = ", ".join(str(size) for size in range(1, shards + 1) if shards % size == 0)
            raise ValueError(
                f"policy.dtensor_cfg.expert_parallel_size={config.expert_parallel_size} does not divide the {shards} "
                f"ranks that shard the parameters (data x context parallel); these would: {works}"
            )
        return cls(
            pipeline_parallel=config.pipeline_parallel_size,
            dp_replicate=config.dp_replicate_size,
            dp_shard=dp_shard,
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

    def sharding(self) -> NamedSharding:
        """Which rank sits where, for the controller: data-parallel ranks get different rows, the others the same."""
        shape = (self.pipeline_parallel, self.data_parallel, self.context_parallel, self.tensor_parallel)
        names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
        return NamedSharding(np.arange(self.world_size).reshape(shape), names)

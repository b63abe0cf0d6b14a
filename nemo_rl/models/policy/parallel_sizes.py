"""How many ranks lie along each axis of a policy's mesh. Free of torch: the configuration is checked with it."""

from __future__ import annotations

import math
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
        """`8 data x 2 context x 2 tensor`, for people: what the ranks share among them."""
        counts = {
            "pipeline": self.pipeline_parallel,
            "data": self.data_parallel,
            "context": self.context_parallel,
            "tensor": self.tensor_parallel,
        }
        return " x ".join(f"{count} {axis}" for axis, count in counts.items() if count > 1 or axis == "data")

    def describe_shards(self) -> str:
        """Over how many ranks a parameter is spread, for people."""
        shards = self.dp_shard * self.context_parallel
        kinds = [f"{self.pipeline_parallel} stages"] * (self.pipeline_parallel > 1)
        kinds += [f"tensor {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        if shards > 1 or kinds:
            kinds.append(f"FSDP2 over {shards}")
        text = " x ".join(kinds) if kinds else "whole"
        if self.expert_parallel > 1:
            text += f"; experts over groups of {self.expert_parallel}, then FSDP2 over {shards // self.expert_parallel}"
        return text + (f"; {self.dp_replicate} copies (HSDP)" if self.dp_replicate > 1 else "")

    def place(self, rank: int) -> dict[str, int]:
        """Index of `rank` along every axis on which there is more than one, by the axis' short name."""
        coordinates = self.sharding().get_worker_coords(rank)
        data, context = coordinates["data_parallel"], coordinates["context_parallel"]
        shard = data % self.dp_shard * self.context_parallel + context
        axes = {
            "stage": (self.pipeline_parallel, coordinates["pipeline_parallel"]),
            "copy": (self.dp_replicate, data // self.dp_shard),
            "data": (self.data_parallel, data),
            "context": (self.context_parallel, context),
            "tensor": (self.tensor_parallel, coordinates["tensor_parallel"]),
            "experts": (self.expert_parallel, shard % self.expert_parallel),
        }
        return {name: index for name, (size, index) in axes.items() if size > 1}

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
        yield not_dividing(sizes, world_size)
        return
    data_parallel = world_size // model_parallel
    if data_parallel % config.dp_replicate_size:
        works = divisor_list(data_parallel)
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
            f"context parallel); these would: {divisor_list(shards)}",
        )


def not_dividing(sizes: dict[str, int], world_size: int) -> tuple[str, str]:
    """(the key of `sizes` to change, what would work) when their product does not divide the ranks."""
    used = {key: size for key, size in sizes.items() if size > 1}
    if len(used) == 1:
        [(key, size)] = used.items()
        return key, f"{size} does not divide the {world_size} training ranks; these would: {divisor_list(world_size)}"
    total = math.prod(used.values())
    fixes = {}
    for key, size in used.items():
        if world_size % (total // size) == 0:
            others = ", ".join(f"{name}={value}" for name, value in used.items() if name != key)
            fixes[key] = f"with {others}, {key} may be {divisor_list(world_size // (total // size))}"
    key = max(fixes or used, key=lambda key: used[key])
    works = "; ".join(fixes.values()) or f"the product may be {divisor_list(world_size)}"
    product = " x ".join(f"{name}={size}" for name, size in used.items())
    return key, (f"{product} = {total} does not divide the {world_size} training ranks; {works}")


def divisor_list(number: int) -> str:
    """`1, 2, 3, 6`."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)

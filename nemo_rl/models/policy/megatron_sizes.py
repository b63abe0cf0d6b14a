"""How many ranks lie along each axis when Megatron Core trains. Free of torch: the configuration is checked with it.

Ranks are numbered as Megatron's order `tp-cp-ep-dp-pp` does: tensor-parallel ranks are neighbours, stages lie furthest
apart. Experts live on a second arrangement of each stage's ranks: (expert data) x (expert) x (expert tensor).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl.models.policy.megatron_config import MegatronConfig
from nemo_rl.models.policy.parallel_sizes import ParallelSizes, divisor_list, not_dividing


@dataclass(frozen=True, kw_only=True)
class MegatronSizes(ParallelSizes):
    """How many ranks lie along each axis; `dp_shard` are the data-parallel ranks."""

    expert_tensor_parallel: int = 1
    stages_per_rank: int = 1
    shards_optimizer: bool = True

    @classmethod
    def of_megatron(cls, config: MegatronConfig, world_size: int) -> MegatronSizes:
        """The sizes of `policy.megatron_cfg` on `world_size` ranks, which they fit (`megatron_problems`)."""
        return cls(
            pipeline_parallel=config.pipeline_model_parallel_size,
            dp_shard=world_size // config.model_parallel_size,
            context_parallel=config.context_parallel_size,
            tensor_parallel=config.tensor_model_parallel_size,
            expert_parallel=config.expert_model_parallel_size,
            expert_tensor_parallel=config.expert_tensor_parallel_size,
            stages_per_rank=config.stages_per_rank,
            shards_optimizer=config.optimizer.shards_optimizer,
        )

    def describe_shards(self) -> str:
        """Over how many ranks a parameter is spread, for people."""
        stages = self.pipeline_parallel * self.stages_per_rank
        per_rank = f" ({self.stages_per_rank} per rank)" if self.stages_per_rank > 1 else ""
        kinds = [f"{stages} stages{per_rank}"] * (stages > 1) + [f"tensor {self.tensor_parallel}"] * (
            self.tensor_parallel > 1
        )
        return "Megatron Core, " + (" x ".join(kinds) if kinds else "whole")

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same part of the same experts."""
        per_stage = self.world_size // self.pipeline_parallel
        return per_stage // (self.expert_parallel * self.expert_tensor_parallel)

    def place(self, rank: int) -> dict[str, int]:
        axes = super().place(rank)
        if self.expert_parallel > 1:
            axes["experts"] = rank // self.expert_tensor_parallel % self.expert_parallel
        if self.expert_tensor_parallel > 1:
            axes["expert tensor"] = rank % self.expert_tensor_parallel
        return axes


def megatron_problems(config: MegatronConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """(key of `policy.megatron_cfg`, what would work) when the sizes do not fit `world_size` ranks."""
    if world_size % config.model_parallel_size:
        sizes = {
            "tensor_model_parallel_size": config.tensor_model_parallel_size,
            "context_parallel_size": config.context_parallel_size,
            "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        }
        yield not_dividing(sizes, world_size)
        return
    per_stage = world_size // config.pipeline_model_parallel_size
    experts = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    if per_stage % experts:
        sizes = {
            "expert_model_parallel_size": config.expert_model_parallel_size,
            "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
        }
        used = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        key = max(sizes, key=lambda key: sizes[key])
        yield (
            key,
            f"{used} does not divide the {per_stage} ranks of a pipeline stage (data x context x tensor parallel); "
            f"these would: {divisor_list(per_stage)}",
        )

"""Megatron's process groups under the names that the rest of a worker uses."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as megatron_state
from megatron.core import tensor_parallel

from nemo_rl.models.policy.layout import MegatronSizes
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.mapping import ParallelRanks

parallel_state: Any = megatron_state  # its types say int | None, also of values that are always set


class MegatronMesh:
    """Creates the process groups of Megatron and names the groups of this rank. Collective.

    `ranks`: this rank's coordinates in what splits single parameters. The other attributes are as in `ParallelMesh`.
    """

    def __init__(self, config: MegatronConfig, seed: int) -> None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            distributed_timeout_minutes=60,
        )
        # Megatron keeps a second generator, for what tensor-parallel ranks must draw differently.
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.sizes = MegatronSizes.of_megatron(config, dist.get_world_size())
        self.data_group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        self.data_rank: int = self.data_group.rank()
        self.context_rank: int = parallel_state.get_context_parallel_rank()
        self.tensor_group = _unless_single(parallel_state.get_tensor_model_parallel_group())
        self.context_group = _unless_single(parallel_state.get_context_parallel_group())
        self.pipeline_group = _unless_single(parallel_state.get_pipeline_model_parallel_group())
        self.ranks = ParallelRanks(
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
            ep_size=parallel_state.get_expert_model_parallel_world_size(),
            etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        )
        stage: int = parallel_state.get_pipeline_model_parallel_rank()
        is_first = self.ranks.tp_rank == self.context_rank == 0
        self.is_first_of_data_rank = is_first and stage == 0
        self.is_first_of_last_stage = is_first and stage == config.pipeline_model_parallel_size - 1

    def close(self) -> None:
        """Destroy the groups."""
        parallel_state.destroy_model_parallel()


def _unless_single(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None

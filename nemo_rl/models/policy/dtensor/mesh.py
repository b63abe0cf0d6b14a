"""The ranks of a policy on named axes, and the groups that the parts of training communicate in.

    arange(world).reshape(pipeline_parallel, dp_replicate, dp_shard, context_parallel, tensor_parallel)

Axes with more traffic vary faster, so that their ranks are neighbors: tensors, then sequences, then parameters, then
pipeline stages. Experts use a second arrangement of the same ranks, in which the ranks that shard parameters
(dp_shard x context_parallel) are (expert_shard x expert_parallel).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.models.policy.layout import ParallelSizes

AXES = ("pipeline_parallel", "dp_replicate", "dp_shard", "context_parallel", "tensor_parallel")
EXPERT_AXES = ("pipeline_parallel", "dp_replicate", "expert_shard", "expert_parallel", "tensor_parallel")


class ParallelMesh:
    """This rank's coordinates, and the meshes and groups of its neighbors. Construction is a collective.

    Attributes:
        fsdp: ranks that shard each parameter, 1-D (dp_shard x context_parallel), or 2-D after the copies (HSDP).
        tensor, context, pipeline: 1-D meshes, or None if the size is 1.
        pipeline_group, context_group, tensor_group: their ranks, or None.
        expert: 1-D mesh of the ranks that share experts, or None.
        expert_fsdp: ranks that shard each expert's parameters, 1-D, or 2-D after the copies; without `expert`: `fsdp`.
        data_group: the ranks that hold different samples and have equal coordinates otherwise.
        is_first_of_data_rank: whether this is the first of the ranks that work on the same samples.
        is_first_of_last_stage: whether this is the first of the ranks that get the outputs of the same samples.
    """

    def __init__(self, device_type: str, sizes: ParallelSizes) -> None:
        assert sizes.world_size == dist.get_world_size()
        self.sizes = sizes
        self.world = init_device_mesh(device_type, tuple(getattr(sizes, axis) for axis in AXES), mesh_dim_names=AXES)
        # Context ranks hold other positions of the same samples. Their gradients are summed like gradients of other
        # samples, so parameters are sharded over both.
        shard = self.world["dp_shard", "context_parallel"]._flatten("fsdp_shard")
        copies = self.world["dp_replicate"]
        # Copies outside of the shards: gathers, which are frequent, stay among neighboring ranks.
        self.fsdp = shard if sizes.dp_replicate == 1 else DeviceMesh._concatenate([copies, shard])
        # Without context ranks, which work on the same samples.
        data = self.world["dp_replicate", "dp_shard"]._flatten("data_parallel")
        self.data_group = data.get_group()
        self.data_rank: int = data.get_local_rank()
        meshes = [self.world[f"{axis}_parallel"] for axis in ("pipeline", "context", "tensor")]
        self.pipeline, self.context, self.tensor = (mesh if mesh.size() > 1 else None for mesh in meshes)
        self.pipeline_group, self.context_group, self.tensor_group = (
            mesh.get_group() if mesh.size() > 1 else None for mesh in meshes
        )
        stage, self.context_rank, tensor_rank = (mesh.get_local_rank() for mesh in meshes)
        is_first = self.context_rank == tensor_rank == 0
        self.is_first_of_data_rank = is_first and stage == 0
        self.is_first_of_last_stage = is_first and stage == sizes.pipeline_parallel - 1
        self.expert, self.expert_fsdp = None, self.fsdp
        # The same ranks in another arrangement: the ranks that share experts see different tokens, so they come out of
        # the axes that shard parameters elsewhere.
        if sizes.expert_parallel > 1:
            expert_shard = sizes.dp_shard * sizes.context_parallel // sizes.expert_parallel
            front = (sizes.pipeline_parallel, sizes.dp_replicate)
            shape = (*front, expert_shard, sizes.expert_parallel, sizes.tensor_parallel)
            experts = init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES)
            self.expert = experts["expert_parallel"]
            axes = ("expert_shard",) if sizes.dp_replicate == 1 else ("dp_replicate", "expert_shard")
            self.expert_fsdp = experts[axes]

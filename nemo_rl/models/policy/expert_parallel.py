"""Experts spread over ranks: tokens go to where their experts are, and come back.

    rows of this rank's tokens, sorted by expert [T x K, H]
    -> all-to-all over the ranks that share experts -> rows of all their tokens for this rank's experts
    -> experts -> all-to-all back -> weighted sum [T, H]

(Lepikhin et al. 2020, arXiv 2006.16668, without capacity: no token is dropped.) The ranks see different tokens; the
gradient of an expert is complete on the rank that holds it, for the tokens of all of them. Tensor-parallel ranks, which
see the same tokens, each do the same work in a group of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nemo_rl.models.policy.mesh import ParallelMesh
from nemo_rl.models.policy.moe import (
    check_experts,
    choose_implementation,
    count_sorted,
    expert_modules,
    keep_float32_buffers,
    local,
    permute,
    run_experts,
    unpermute,
    weighted_sum,
)

EXPERT_PARALLEL = "nemo_rl_expert_parallel"
"""Name of `spread_experts` among transformers' implementations of experts."""


def apply_expert_parallel(hf: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Choose how experts compute, and keep on every rank its own experts of each layer only.

    In place, on the meta device, before `shard_experts`. The experts' parameters become DTensors sharded by expert over
    `mesh.expert`; without one they stay whole. What routers keep in float32 is put there.

    Raises:
        ValueError: for a dense model, or one whose number of experts the ranks do not divide.
    """
    keep_float32_buffers(hf)
    if mesh.expert is None:
        choose_implementation(hf, mesh.world.device_type)
        return
    check_experts(hf.config, mesh.expert.size())
    for _, module in expert_modules(hf):
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert parameter.is_meta
            part = parameter.detach().chunk(mesh.expert.size())[mesh.expert.get_local_rank()]
            spread = DTensor.from_local(part, mesh.expert, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    hf.set_experts_implementation(EXPERT_PARALLEL)


class _AllToAll(torch.autograd.Function):
    """Rows [sum(sent), H] -> [sum(received), H]; gradients travel the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received, group = ctx.splits
        return _exchange(grads[0], received, sent, group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The first sent[0] rows go to rank 0 of the group, the next sent[1] to rank 1, ...; theirs come, in rank order."""
    out = _AllToAll.apply(rows, sent, received, group)
    assert isinstance(out, torch.Tensor)
    return out


@torch.compiler.disable
def spread_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts of one layer over all ranks of its mesh: hidden states [T, H], indices and weights [T, K] -> [T, H].

    T differs by rank and may be 0. Waits for the device once, to learn how many rows come and go. Collective, in the
    backward pass too.
    """
    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    assert isinstance(gate_up, DTensor)
    group, ranks = gate_up.device_mesh.get_group(), gate_up.device_mesh.size()
    ids, order = top_k_index.reshape(-1).sort(stable=True)
    counts = count_sorted(ids, gate_up.shape[0])
    theirs = torch.empty_like(counts)  # [ranks x own experts]: rows that each rank has for each expert of this one
    dist.all_to_all_single(theirs, counts, group=group)
    theirs = theirs.view(ranks, -1)
    sent, received = torch.stack([counts.view(ranks, -1).sum(dim=1), theirs.sum(dim=1)]).tolist()

    rows = all_to_all(permute(hidden_states, order, top_k_index.shape[1]), sent, received, group)
    own = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks)
    by_expert = own.repeat_interleave(theirs.flatten(), output_size=len(rows)).argsort(stable=True)
    out = run_experts(module, local(gate_up), local(down), permute(rows, by_expert), theirs.sum(dim=0))
    back = all_to_all(unpermute(out, by_expert), received, sent, group)
    return weighted_sum(unpermute(back, order), top_k_weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERT_PARALLEL, spread_experts)

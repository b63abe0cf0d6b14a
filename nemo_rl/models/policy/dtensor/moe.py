"""Mixture-of-experts layers of transformers: how they compute, how they are sharded, how busy their experts are.

    hidden states [T, H] -> router -> indices, weights [T, K] -> rows sorted by expert [T x K, H] -> experts -> [T, H]

A layer is a router (`gate`) beside a module of fused experts with the parameters `gate_up_proj` [E, 2I, H], or
`up_proj` [E, I, H] if they have no gate, and `down_proj` [E, H, I]. With expert parallelism an all-to-all over the
ranks that share experts carries the sorted rows to their experts, and a second one carries the results back (Lepikhin
et al. 2020, arXiv 2006.16668, without capacity: no token is dropped). The ranks see different tokens. The gradient of
an expert is complete on the rank that holds it. Tensor-parallel ranks, which see the same tokens, each do the same
work in a group of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nemo_rl.config.rules import divisors, remedy
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.experts import (
    LOAD_METRICS,
    ExpertNames,
    choice_counts,
    count_sorted,
    layer_values,
    num_experts,
)
from nemo_rl.models.policy.weight_loading import local_part

GROUPED = "nemo_rl_grouped"
"""Name of `grouped_experts` among transformers' implementations of experts."""

EXPERT_PARALLEL = "nemo_rl_expert_parallel"
"""Name of `parallel_experts` among transformers' implementations of experts."""


def check_experts(config: PretrainedConfig, settings: DTensorConfig) -> None:
    """ValueError, saying what would work, unless the experts can be spread over `expert_parallel_size` ranks."""
    ep_size = settings.expert_parallel_size
    if ep_size == 1:
        return
    key, model_type = f"{settings.key('expert_parallel_size')}={ep_size}", config.get_text_config().model_type
    count, fix = num_experts(config), remedy(f"{settings.key('expert_parallel_size')}=1")
    if count == 0:
        raise ValueError(f"{key}: {model_type!r} is a dense model and has no experts to spread; {fix}")
    if not ExpertNames(model_type).has_fused:
        raise ValueError(
            f"{key}: the experts of {model_type!r} are not laid out as in Qwen3-MoE, Mixtral or DeepSeek-V3, for "
            f"which expert parallelism is written; {fix}"
        )
    if count % ep_size:
        raise ValueError(
            f"{key} does not divide the {count} experts of {model_type!r}; these would: {divisors(count, ep_size)}"
        )


def expert_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the fused experts of every layer, in the model's order."""
    for name, module in root.named_modules():
        fused = {key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3}
        if "down_proj" in fused and fused & {"gate_up_proj", "up_proj"}:
            yield name, module


# -- computing
#
# Every parameter gets a gradient in every backward pass, zeros for experts without tokens, so that all ranks take part
# in the same collectives.


class _Permute(torch.autograd.Function):
    """Row i of the result is row `order[i] // copies`. The gradient sums copies in a fixed order.

    Autograd's own backward of indexing adds with atomics, whose order, and so rounding, varies from run to run.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies] if copies > 1 else rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[-1]).sum(dim=1)
        return grad, None, None, None


def permute(rows: torch.Tensor, order: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Rows [N, H], each repeated `copies` times, brought into `order`, a permutation int64 [N x copies]."""
    return cast(torch.Tensor, _Permute.apply(rows, order, _inverse(order), copies))


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _grouped_linear(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The first counts[0] rows times weight[0], the next counts[1] times weight[1], and so on: [N, C] -> [N, R]."""
    rows = rows.to(weight.dtype)
    if rows.is_cuda and len(rows):  # the kernel refuses zero rows
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    groups = rows.split(counts.tolist())
    return torch.cat([F.linear(group, matrix) for group, matrix in zip(groups, weight.unbind(0), strict=True)])


def run_experts(module: nn.Module, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The MLP of each expert of this rank on its rows: `rows` [N, H] sorted by expert, `counts` int64 [E] -> [N, H]."""
    has_gate = "gate_up_proj" in module._parameters
    names = "gate_up_proj" if has_gate else "up_proj", "down_proj"
    up, down = (local_part(module.get_parameter(name)) for name in names)
    activate: Any = module._apply_gate if has_gate else module.act_fn
    return _grouped_linear(activate(_grouped_linear(rows, up, counts)), down, counts)


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Outputs of each token's experts, [T x K, H], weighted by the router, [T, K] -> [T, H]."""
    return (rows * weights.reshape(-1, 1)).view(*weights.shape, rows.shape[-1]).sum(dim=1)


def grouped_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts of one layer on this rank: hidden states [T, H], indices and weights [T, K] -> [T, H]."""
    ids, order = top_k_index.reshape(-1).sort(stable=True)
    rows = permute(hidden_states, order, top_k_index.shape[1])
    out = run_experts(module, rows, count_sorted(ids, len(module.get_parameter("down_proj"))))
    return _weighted_sum(permute(out, _inverse(order)), top_k_weights).to(hidden_states.dtype)


@torch.compiler.disable
def parallel_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts of one layer over all ranks of its mesh: hidden states [T, H], indices and weights [T, K] -> [T, H].

    T differs by rank and may be 0. Waits for the device once, for the number of rows to send and receive. Collective,
    in the backward pass too.
    """
    down = module.get_parameter("down_proj")
    assert isinstance(down, DTensor)
    group, ranks = down.device_mesh.get_group(), down.device_mesh.size()
    ids, order = top_k_index.reshape(-1).sort(stable=True)
    counts = count_sorted(ids, len(down))
    incoming = torch.empty_like(counts)  # [ranks x own experts]: rows of each rank for each expert of this one
    dist.all_to_all_single(incoming, counts, group=group)
    incoming = incoming.view(ranks, -1)
    sent, received = torch.stack([counts.view(ranks, -1).sum(dim=1), incoming.sum(dim=1)]).tolist()

    rows = permute(hidden_states, order, top_k_index.shape[1])
    rows = funcol.all_to_all_single_autograd(rows, received, sent, group)
    # Rows arrive sorted by rank, then by expert; the grouped product needs them sorted by expert.
    own = torch.arange(incoming.shape[1], device=rows.device).repeat(ranks)
    by_expert = own.repeat_interleave(incoming.flatten(), output_size=len(rows)).argsort(stable=True)
    out = run_experts(module, permute(rows, by_expert), incoming.sum(dim=0))
    back = funcol.all_to_all_single_autograd(permute(out, _inverse(by_expert)), sent, received, group)
    return _weighted_sum(permute(back, _inverse(order)), top_k_weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)
ALL_EXPERTS_FUNCTIONS.register(EXPERT_PARALLEL, parallel_experts)


# -- preparing a model


def apply_expert_parallel(hf: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Choose how experts compute, and keep on every rank only its own experts of each layer.

    In place, on the meta device, before `shard_experts`. The experts' parameters become DTensors sharded by expert over
    `mesh.expert`; without that mesh they stay whole. Buffers that routers need in float32 get that dtype.
    """
    # DeepSeek-V3 chooses experts by scores plus `e_score_correction_bias`, whose small differences decide.
    in_float32 = set(hf._keep_in_fp32_modules_strict or ())
    for module in hf.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in in_float32:
                module._buffers[name] = buffer.float()
    if mesh.expert is None:
        # On GPUs transformers' grouped matmul computes; elsewhere one matmul per expert that has tokens is faster.
        if mesh.world.device_type != "cuda" and ExpertNames(hf.config.get_text_config().model_type).has_fused:
            hf.set_experts_implementation(GROUPED)
        return
    for _, module in expert_modules(hf):
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert parameter.is_meta
            part = parameter.detach().chunk(mesh.expert.size())[mesh.expert.get_local_rank()]
            spread = DTensor.from_local(part, mesh.expert, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    hf.set_experts_implementation(EXPERT_PARALLEL)


def shard_experts(root: nn.Module, mesh: ParallelMesh, mp_policy: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    """`fully_shard` every layer's experts on their own, before the blocks around them.

    The mesh is `mesh.expert_fsdp`. If the ranks do not divide the experts, the rows of each expert are sharded instead,
    so that every rank holds the same amount. Inputs are not cast: the routing weights stay in float32 where the model
    computes them so.
    """
    ranks = mesh.expert_fsdp.size(mesh.expert_fsdp.ndim - 1)
    policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)

    def place(parameter: nn.Parameter) -> Shard:
        by_rows = local_part(parameter).shape[0] % ranks and parameter.shape[1] % ranks == 0
        return Shard(1) if parameter.ndim == 3 and by_rows else Shard(0)

    for _, module in expert_modules(root):
        fully_shard(module, mesh=mesh.expert_fsdp, mp_policy=policy, shard_placement_fn=place, offload_policy=offload)


class RouterLoad:
    """Counts, while training, how many tokens each expert of each layer gets.

    Reads nothing from the device before `read`. Recomputed activations and passes without gradients do not count.
    `leave_padding_out` comes before each forward pass.
    """

    def __init__(self, root: nn.Module) -> None:
        self.token_mask: torch.Tensor | None = None  # bool [R, W]
        self._counts: dict[int, torch.Tensor] = {}  # by layer, see `choice_counts`
        self._recorded: list[list[torch.Tensor]] | None = None
        self._num_layers = 0
        for name, _ in expert_modules(root):
            router = dict(root.get_submodule(name.rpartition(".")[0]).named_children()).get("gate")
            if router is not None:  # None: another layout, whose router outputs are not known
                router.register_forward_hook(functools.partial(torch.compiler.disable(self._count), self._num_layers))
                self._num_layers += 1

    def leave_padding_out(self, stage: nn.Module, args: tuple[ModelBatch, *tuple[Any, ...]]) -> None:
        """A forward pre-hook for a model whose first argument is a `ModelBatch`."""
        self.token_mask = args[0].is_token

    @contextlib.contextmanager
    def recording(self) -> Generator[list[list[torch.Tensor]]]:
        """The chosen experts of the passes inside the block: by layer and micro-batch, int64 [R * W, K] on the CPU."""
        self._recorded = recorded = [[] for _ in range(self._num_layers)]
        try:
            yield recorded
        finally:
            self._recorded = None

    def _count(self, layer: int, router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        if self._recorded is not None:
            self._recorded[layer].append(output[2].cpu())
        in_backward = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and not in_backward:
            assert self.token_mask is not None
            logits = output[0].detach().view(-1, output[0].shape[-1])
            is_independent = "e_score_correction_bias" in router._buffers
            counts = choice_counts(logits, output[2], self.token_mask.view(-1), is_independent=is_independent)
            self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts

    def read(self, mesh: ParallelMesh) -> dict[str, float]:
        """Metrics of the micro-batches since the last call, over all ranks. Collective; waits for the device.

        They are `LOAD_METRICS` under `moe/`, means over layers.
        """
        assert len(self._counts) == self._num_layers, "no forward pass in training since the last call"
        sums = torch.zeros(5, dtype=torch.float64)
        if self._num_layers:
            counts = torch.stack([self._counts[layer] for layer in range(self._num_layers)])
            for axis in range(mesh.fsdp.ndim):  # all ranks that pass different tokens through the same layers
                dist.all_reduce(counts, group=mesh.fsdp.get_group(axis))
            values = layer_values(counts)
            sums = torch.cat([values.sum(dim=0), values.new_full((1,), len(values))])
        if mesh.pipeline_group is not None:
            sums = sums.to(mesh.fsdp.device_type)
            dist.all_reduce(sums, group=mesh.pipeline_group)
        self._counts.clear()
        *totals, num_layers = sums.tolist()
        if num_layers == 0:
            return {}
        return {f"moe/{name}": total / num_layers for name, total in zip(LOAD_METRICS, totals, strict=True)}

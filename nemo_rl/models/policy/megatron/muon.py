"""Muon for Megatron's layers: matrices move along their orthogonalised momentum, everything else follows Adam.

K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024). Written here because Megatron's
own needs a package that no registry has. A matrix that is cut over tensor-parallel ranks is gathered first, so that
the update does not depend on the layout; queries, keys and values of a fused projection are matrices of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    _get_param_groups,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.process_groups_config import ProcessGroupCollection

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


@dataclass(frozen=True)
class QkvShape:
    """Rows of one query group in a fused projection: its queries, its keys, its values."""

    rows: tuple[int, int, int]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; decoupled weight decay.

    A parameter's `partition_dim` says along which dimension it is cut over its group's ranks (-1: not). Parameter
    groups may have `split_qkv` (fused projections) and `is_expert_parallel` (cut over `expert_group`).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        num_steps: int,
        scale_mode: ScaleMode,
        qkv: QkvShape,
        tensor_group: dist.ProcessGroup,
        expert_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.momentum, self.num_steps, self.qkv = momentum, num_steps, qkv
        self.scale_mode: ScaleMode = scale_mode
        self.tensor_group, self.expert_group = tensor_group, expert_group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            cut_over = self.expert_group if group.get("is_expert_parallel") else self.tensor_group
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = momentum_of(self, parameter)
                average.lerp_(parameter.grad, 1 - self.momentum)
                parts = self._matrices(average) if group.get("split_qkv") else [average]
                moved = [self._orthogonal(part, parameter, cut_over) for part in parts]
                update = self._joined(moved, average) if group.get("split_qkv") else moved[0]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])

    def _matrices(self, fused: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values of [G * (q + k + v), H], whose rows lie by query group."""
        by_group = fused.view(-1, sum(self.qkv.rows), fused.shape[1])
        return [part.reshape(-1, fused.shape[1]) for part in by_group.split(self.qkv.rows, dim=1)]

    def _joined(self, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        num_groups = like.shape[0] // sum(self.qkv.rows)
        return torch.cat([part.view(num_groups, -1, like.shape[1]) for part in parts], dim=1).view(like.shape)

    def _orthogonal(self, matrix: torch.Tensor, owner: Any, group: dist.ProcessGroup) -> torch.Tensor:
        """This rank's part of the whole matrix's update. Collective where it is cut."""
        dim = owner.partition_dim if group.size() > 1 and owner.tensor_model_parallel else -1
        if dim < 0:
            return scaled(orthogonalized(matrix, self.num_steps), self.scale_mode)
        parts = [torch.empty_like(matrix) for _ in range(group.size())]
        dist.all_gather(parts, matrix.contiguous(), group=group)
        # Rows and columns of the whole may come in another order: the same then holds for the result.
        whole = scaled(orthogonalized(torch.cat(parts, dim=dim), self.num_steps), self.scale_mode)
        return whole.chunk(group.size(), dim=dim)[group.rank()]


def momentum_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's running mean of gradients, zero at first."""
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state["momentum_buffer"]


def orthogonalized(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """`matrix` [M, N] with all singular values near 1, by Newton-Schulz steps in float32."""
    a, b, c = _COEFFICIENTS
    x = matrix.float()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        squares = x @ x.mT
        x = a * x + (b * squares + c * squares @ squares) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def scaled(update: torch.Tensor, mode: ScaleMode) -> torch.Tensor:
    """`update` [M, N] for a learning rate that suits all shapes: spectral sqrt(max(M, N)), unit_rms_norm sqrt(M / N),
    shape_scaling sqrt(max(1, M / N))."""
    rows, columns = update.shape
    factors = {
        "spectral": max(rows, columns),
        "unit_rms_norm": rows / columns,
        "shape_scaling": max(1.0, rows / columns),
    }
    return update * factors[mode] ** 0.5


def build_muon(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], *, is_distributed: bool
) -> MegatronOptimizer:
    """Muon over the matrices of `chunks` that are neither embedding nor head, Adam over the rest.

    `config.optimizer` is adam. With `is_distributed` each data-parallel rank has the state of some parameters, updates
    these and sends them to the others; otherwise all have all of it.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and not hasattr(p, "is_embedding_or_output_parameter")]
    chosen = set(matrices)
    overrides: Any = {
        **get_standard_config_overrides(config),
        ParamKey(name="*linear_qkv.weight"): {"split_qkv": True},
    }
    with _frozen([p for p in trained if p not in chosen]):
        found: list[dict[str, Any]] = _get_param_groups(list(chunks), config, overrides)
    model: Any = chunks[0].config
    per_group = model.num_attention_heads // model.num_query_groups * model.kv_channels
    if model.attention_output_gate or model.multi_latent_attention:
        assert not any(group.get("split_qkv") for group in found), "a fused projection with other parts"

    def muon(groups_of: list[dict[str, Any]]) -> Muon:
        return Muon(
            groups_of,
            lr=config.lr or 0.0,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            num_steps=config.muon_num_ns_steps,
            scale_mode=config.muon_scale_mode,  # pyright: ignore[reportArgumentType]
            qkv=QkvShape((per_group, model.kv_channels, model.kv_channels)),
            tensor_group=groups.tp,
            expert_group=groups.expt_tp,
        )

    whole = replace(config, bf16=False) if is_distributed else config  # there main weights are made after the split
    dense = [group for group in found if not group["is_expert_parallel"]]
    experts = [group for group in found if group["is_expert_parallel"]]
    parts = [
        _wrapped(muon(own), whole, stats) for own, stats in ((dense, groups.mp), (experts, groups.tp_ep_pp)) if own
    ]
    with _frozen(matrices):
        others: Any = get_megatron_optimizer(whole, list(chunks))
    parts += others.chained_optimizers
    if not is_distributed:
        return ChainedOptimizer(parts)
    starts = [_init_momentum] * (len(parts) - len(others.chained_optimizers))
    starts += [part.init_state_fn for part in others.chained_optimizers]
    return LayerWiseDistributedOptimizer(parts, config, groups, init_state_fn_list=starts)


def _wrapped(optimizer: Muon, config: OptimizerConfig, stats_group: dist.ProcessGroup) -> MegatronOptimizer:
    wrapped: Any
    if config.bf16:
        wrapped = Float16OptimizerWithFloat16Params(optimizer, config, None, _init_momentum)  # pyright: ignore
    else:
        wrapped = FP32Optimizer(optimizer, config, _init_momentum)
    wrapped.grad_stats_parallel_group = stats_group
    wrapped.tp_group = optimizer.tensor_group
    return wrapped


def _init_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """State as after a step, for checkpoints to be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            momentum_of(optimizer, parameter)


@contextlib.contextmanager
def _frozen(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)

"""Megatron's optimizers and schedules from `policy.megatron_cfg`, Muon, and the optimizer state for checkpoints."""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    _get_param_groups,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.pretrained import DTYPES

_MOMENT_DTYPES = {**DTYPES, "uint8": torch.uint8}  # uint8: FP8 with one scale per tensor

_SAME_KEYS = {
    "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "muon_momentum", "muon_num_ns_steps",
    "muon_scale_mode", "muon_nesterov", "muon_extra_scale_factor", "use_precision_aware_optimizer",
    "optimizer_cpu_offload", "optimizer_offload_fraction",
}  # fmt: skip
"""Keys that `policy.megatron_cfg.optimizer` and Megatron have in common."""


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """Megatron's form of `policy.megatron_cfg.optimizer`."""
    settings, ddp = policy.megatron_cfg.optimizer, policy.megatron_cfg.distributed_data_parallel_config
    fp8 = policy.megatron_cfg.fp8_cfg
    return OptimizerConfig(
        **settings.model_dump(include=_SAME_KEYS),
        optimizer="sgd" if settings.optimizer == "sgd" else "adam",  # Adam also updates what Muon does not
        min_lr=settings.lr if settings.min_lr is None else settings.min_lr,
        bf16=policy.precision == "bfloat16",
        params_dtype=DTYPES[policy.precision],
        fp8_recipe=fp8.fp8_recipe if fp8.enabled else None,
        use_distributed_optimizer=settings.shards_optimizer,
        store_param_remainders=False,  # checkpoints hold main parameters, not the bits that bfloat16 weights lack
        main_params_dtype=DTYPES[settings.params_dtype],
        exp_avg_dtype=_MOMENT_DTYPES[settings.exp_avg_dtype],
        exp_avg_sq_dtype=_MOMENT_DTYPES[settings.exp_avg_sq_dtype],
        overlap_param_gather=ddp.overlap_param_gather,
        clip_grad=policy.max_grad_norm or 0.0,
    )


def build_optimizer(policy: PolicyConfig, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer of `policy.megatron_cfg.optimizer` over the stages of this rank. Collective."""
    config, name = optimizer_config(policy), policy.megatron_cfg.optimizer.optimizer
    if name in ("muon", "dist_muon"):
        return _build_muon(config, chunks, is_distributed=name == "dist_muon")
    return get_megatron_optimizer(config, list(chunks), _overrides(config))


_STACKED_BIAS = "_bias"
"""End of the names of GPT-OSS's biases: vectors, although those of all experts are one parameter [E, N]."""


def _overrides(config: OptimizerConfig) -> dict[ParamKey, Any]:
    """Settings of single groups of parameters: vectors have no weight decay."""
    return {**get_standard_config_overrides(config), ParamKey(name=f"*{_STACKED_BIAS}"): {"wd_mult": 0.0}}


def build_scheduler(policy: PolicyConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of `policy.megatron_cfg.scheduler` at its beginning. With a warm-up, the first step has
    `lr_warmup_init`."""
    settings, rates = policy.megatron_cfg.scheduler, policy.megatron_cfg.optimizer
    decays = (settings.start_weight_decay, settings.end_weight_decay)
    start, end = (rates.weight_decay if value is None else value for value in decays)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=rates.lr,
        min_lr=rates.lr if rates.min_lr is None else rates.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=settings.lr_decay_iters,
        wd_incr_style=settings.weight_decay_incr_style,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )


@torch.no_grad()
def clip_gradients(optimizer: MegatronOptimizer, max_norm: float | None) -> float:
    """Prepare the gradients and clip them. Returns their norm over all ranks, not finite if a gradient is not finite.

    Gradients are multiplied by min(1, max_norm / (norm + 1e-6)), as in the PyTorch backend.
    """
    if optimizer.prepare_grads():
        return float("inf")
    norm: Any = optimizer.get_grad_norm()
    for leaf in leaf_optimizers(optimizer):
        if max_norm is not None and (parameters := leaf.get_parameters()):
            # All parts take the norm over all of them: each by its own would change the direction of the update.
            decoupled = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, max_norm, norm, use_decoupled_grad=decoupled)
    return float(norm)


@torch.no_grad()
def take_step(optimizer: MegatronOptimizer) -> None:
    """Update the weights with the gradients that `clip_gradients` has prepared. Collective."""
    optimizer.step_with_ready_grads()


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Learning rate of the next step, equal on every rank: ranks without parameters have empty groups."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    assert rate is not None
    return rate


# -- the state that a rank's optimizer keeps of each parameter, whatever the optimizer
#
# distributed              a range of the flat parameter: one rank's share of a gradient buffer
#   with host offload      the same; the main parameter is on the host or the GPU, with the optimizer that updates it
# not distributed          all of the parameter's shard; for a bfloat16 parameter also a float32 main parameter

STEP = "step"
_MOMENTUM = "momentum_buffer"
_MAIN_OF_OFFLOAD = "master_param"  # `main` itself, which the offloading optimizer also keeps in its state


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """The optimizer's state for one parameter, or for the elements `flat` of it that this rank updates."""

    owner: Any
    inner: Any  # the torch optimizer that updates `main`
    parameter: torch.Tensor
    main: torch.Tensor  # the updated tensor; in float32 training the parameter itself or a view of it
    flat: range | None

    @property
    def is_scaled(self) -> bool:
        """Whether the optimizer keeps main parameter and moments in other dtypes and returns converted copies."""
        return (
            isinstance(self.owner, DistributedOptimizer)
            and self.owner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            and not isinstance(self.owner.optimizer, HybridDeviceOptimizer)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """`main_param` if it differs from the parameter, and the state in the shape of `main`: references, or copies in
        host memory if `is_scaled`."""
        if self.is_scaled:
            shown = self.owner._get_main_param_and_optimizer_states(self.parameter)
            return {"main_param" if key == "param" else key: value.cpu() for key, value in shown.items()}
        state = self.inner.state.get(self.main, {})
        found = {"main_param": self.main} if self.main.dtype != self.parameter.dtype else {}
        for key, value in state.items():
            if key not in (STEP, _MAIN_OF_OFFLOAD) and value is not None:
                assert value.shape == self.main.shape, f"{key} has shape {tuple(value.shape)}"
                found[key] = value
        return found

    def is_of_muon(self, keys: set[str]) -> bool:
        """Whether Adam updates the parameter, and `keys` are of a checkpoint in which Muon did."""
        return _MOMENTUM in keys and (_counts_per_parameter(self.inner) or _counts_per_group(self.inner))

    def allocate(self, keys: set[str]) -> None:
        """Allocate the state `keys`, with any values, and drop all other state."""
        state = self.inner.state
        if self.is_scaled:
            if keys and not state[self.main]:
                self.inner.initialize_state(self.main, self.owner.config.store_param_remainders)
            return
        state.pop(self.main, None)
        if keys:
            state[self.main] = {key: torch.zeros_like(self.main) for key in sorted(keys)}

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use the values that were loaded into `tensors()`."""
        if self.is_scaled:
            device = self.main.device
            renamed = {"param" if key == "main_param" else key: value.to(device) for key, value in tensors.items()}
            self.owner._set_main_param_and_optimizer_states(self.parameter, renamed)


def leaf_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that update parameters on this rank; several with experts or Muon."""
    leaves: list[Any] = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [leaf for leaf in leaves if not leaf.is_stub_optimizer]


def parameter_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """The state of all parameters that the optimizer updates on this rank."""
    for leaf in leaf_optimizers(optimizer):
        inner = leaf.optimizer
        if isinstance(leaf, DistributedOptimizer):
            updates = optimizers_by_main(inner)
            for parameter, (group, order) in leaf.model_param_group_index_map.items():
                held = leaf._get_model_param_range_map(parameter)["param"]
                flat = range(held.start, held.end)
                main = inner.param_groups[group]["params"][order]
                if isinstance(inner, HybridDeviceOptimizer):
                    main = inner.param_to_inner_param[main]
                yield ParameterState(owner=leaf, inner=updates[main], parameter=parameter, main=main, flat=flat)
            continue
        if isinstance(leaf, Float16OptimizerWithFloat16Params):
            groups = [*leaf.float16_groups, *leaf.fp32_from_fp32_groups]
            main_groups = [*leaf.fp32_from_float16_groups, *leaf.fp32_from_fp32_groups]
        else:
            groups = main_groups = [group["params"] for group in inner.param_groups]
        for parameter, main in zip(chain(*groups), chain(*main_groups), strict=True):
            yield ParameterState(owner=leaf, inner=inner, parameter=parameter, main=main, flat=None)


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers in it: with host offload several, one of them on the GPU."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def optimizers_by_main(optimizer: Any) -> dict[torch.Tensor, Any]:
    """Main parameter -> the torch optimizer that updates it."""
    inners = _inner_optimizers(optimizer)
    return {main: inner for inner in inners for group in inner.param_groups for main in group["params"]}


def _counts_per_parameter(inner: Any) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _counts_per_group(inner: Any) -> bool:
    """Whether it is Transformer Engine's or APEX's Adam."""
    return not _counts_per_parameter(inner) and "Adam" in type(inner).__name__


def steps_taken(optimizer: MegatronOptimizer) -> int | None:
    """Number of Adam's updates; None for optimizers that do not count, and before the first step."""
    for leaf in leaf_optimizers(optimizer):
        for inner in _inner_optimizers(leaf.optimizer):
            counted = inner.state.values() if _counts_per_parameter(inner) else inner.param_groups
            for values in counted:
                if STEP in values:
                    return int(values[STEP])
    return None


def set_steps_taken(optimizer: MegatronOptimizer, steps: int | None) -> None:
    """Inverse of `steps_taken`. The state must be allocated."""
    if steps is None:
        return
    for leaf in leaf_optimizers(optimizer):
        for inner in _inner_optimizers(leaf.optimizer):
            if _counts_per_parameter(inner):
                for state in inner.state.values():
                    state[STEP] = torch.tensor(float(steps))
            elif _counts_per_group(inner):
                for group in inner.param_groups:
                    group[STEP] = steps
        if isinstance(leaf.optimizer, HybridDeviceOptimizer):
            leaf.optimizer._sync_sub_optimizers_state_to_hdo()


# -- Muon: matrices move along their orthogonalised momentum, everything else follows Adam
#
# K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024). Megatron's own implementation
# needs a package that no registry has. A matrix that tensor-parallel ranks share is gathered first, so that the update
# does not depend on the layout; queries, gates, keys and values of a fused projection are separate matrices.

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum with decoupled weight decay.

    A parameter's `partition_dim` is the dimension that the ranks of its group share (-1: none). Parameter groups may
    have `split_qkv` (fused projections) and `is_expert_parallel` (shared by `expert_group`). `qkv_rows`: rows of one
    query group in a fused projection: its queries, their gates if there are any, its keys, its values.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        *,
        qkv_rows: tuple[int, ...],
        tensor_group: dist.ProcessGroup,
        expert_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self.momentum, self.num_steps, self.qkv_rows = config.muon_momentum, config.muon_num_ns_steps, qkv_rows
        self.scale_mode: ScaleMode = config.muon_scale_mode  # pyrefly: ignore[bad-assignment]  (annotated str)
        self.is_nesterov, self.extra_scale = config.muon_nesterov, config.muon_extra_scale_factor
        self.tensor_group, self.expert_group = tensor_group, expert_group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]  (never with a closure)
        for group in self.param_groups:
            shared_by = self.expert_group if group.get("is_expert_parallel") else self.tensor_group
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = momentum_of(self, parameter)
                average.lerp_(parameter.grad, 1 - self.momentum)
                momentum = parameter.grad.lerp(average, self.momentum) if self.is_nesterov else average
                update = self._update(momentum, parameter, shared_by, is_fused=group.get("split_qkv", False))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * self.extra_scale)

    def _update(self, matrix: torch.Tensor, owner: Any, group: dist.ProcessGroup, *, is_fused: bool) -> torch.Tensor:
        """This rank's shard of the whole matrix's update. Collective if `group` shares the matrix."""
        dim = owner.partition_dim if group.size() > 1 and owner.tensor_model_parallel else -1
        if dim >= 0:  # singular values belong to the whole matrix, not to a shard
            shards = [torch.empty_like(matrix) for _ in range(group.size())]
            dist.all_gather(shards, matrix.contiguous(), group=group)
            matrix = torch.cat(shards, dim=dim)
        # Split after the gather, because with more ranks than query groups a rank has only a part of a group.
        rows = self.qkv_rows if is_fused else (len(matrix),)
        parts = matrix.view(-1, sum(rows), matrix.shape[1]).split(rows, dim=1)
        whole = (orthogonalized(part.flatten(0, 1), self.num_steps) for part in parts)
        moved = [scaled(own, self.scale_mode).view(part.shape) for own, part in zip(whole, parts, strict=True)]
        update = torch.cat(moved, dim=1).view(matrix.shape)
        # The gathered rows or columns may be permuted. The update is permuted in the same way, and `chunk` undoes it.
        return update if dim < 0 else update.chunk(group.size(), dim=dim)[group.rank()]


def momentum_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's running mean of gradients, zero at first."""
    state = optimizer.state[parameter]
    if _MOMENTUM not in state:
        state[_MOMENTUM] = torch.zeros_like(parameter)
    return state[_MOMENTUM]


def orthogonalized(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """`matrix` [M, N] with all singular values near 1, by Newton-Schulz steps in float32."""
    # Each step applies the polynomial a s + b s^3 + c s^5 to every singular value s, which drives it towards 1. It
    # needs s <= 1 at the start (the Frobenius norm bounds all s) and is cheapest with the smaller side as rows.
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.float()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        squares = x @ x.mT
        x = a * x + (b * squares + c * squares @ squares) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def scaled(update: torch.Tensor, mode: ScaleMode) -> torch.Tensor:
    """`update` [M, N] times a factor that makes one learning rate suit all shapes: spectral sqrt(max(M, N)),
    unit_rms_norm sqrt(M / N), shape_scaling sqrt(max(1, M / N))."""
    rows, columns = update.shape
    ratio = rows / columns
    squares = {"spectral": max(rows, columns), "unit_rms_norm": ratio, "shape_scaling": max(1.0, ratio)}
    return update * squares[mode] ** 0.5


def _build_muon(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], *, is_distributed: bool
) -> MegatronOptimizer:
    """Muon for the matrices of `chunks` other than embedding and head, Adam (`config.optimizer`) for the rest.

    With `is_distributed` each data-parallel rank has the state of some parameters, updates them and broadcasts them;
    otherwise every rank has the whole state.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    trained = {p: name for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad}
    matrices = [
        p
        for p, name in trained.items()
        if p.ndim == 2 and not name.endswith(_STACKED_BIAS) and not hasattr(p, "is_embedding_or_output_parameter")
    ]
    chosen = set(matrices)
    overrides: Any = {**_overrides(config), ParamKey(name="*linear_qkv.weight"): {"split_qkv": True}}
    with _frozen([p for p in trained if p not in chosen]):
        found: list[dict[str, Any]] = _get_param_groups(list(chunks), config, overrides)
    model: Any = chunks[0].config
    queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
    gates = (queries,) if model.attention_output_gate else ()
    rows = (queries, *gates, model.kv_channels, model.kv_channels)
    whole = replace(config, bf16=False) if is_distributed else config  # main weights are then made after the split
    parts: list[MegatronOptimizer] = []
    for is_expert, stats_group in ((False, groups.mp), (True, groups.tp_ep_pp)):
        if own := [group for group in found if group["is_expert_parallel"] == is_expert]:
            muon = Muon(own, config, qkv_rows=rows, tensor_group=groups.tp, expert_group=groups.expt_tp)
            part: Any = FP32Optimizer(muon, whole, _init_momentum)
            if whole.bf16:
                part = Float16OptimizerWithFloat16Params(muon, whole, None, _init_momentum)  # pyrefly: ignore[bad-argument-type]  (no scaler)
            # The norm of the gradient is summed over the ranks that hold other parameters, or other shards of them.
            part.grad_stats_parallel_group = stats_group
            parts.append(part)
    starts: list[Any] = [_init_momentum] * len(parts)
    with _frozen(matrices):
        others: Any = get_megatron_optimizer(whole, list(chunks), _overrides(whole))
    parts += others.chained_optimizers
    if is_distributed:
        starts += [part.init_state_fn for part in others.chained_optimizers]
        given: Any = [part.optimizer for part in parts] if config.bf16 else parts  # Megatron adds main weights
        chain = LayerWiseDistributedOptimizer(given, config, groups, init_state_fn_list=starts)
    else:
        chain = ChainedOptimizer(parts)
    for part in chain.chained_optimizers:
        part.tp_group, part.expert_tp_group = groups.tp, groups.expt_tp  # pyrefly: ignore[missing-attribute]  (which Megatron reads)
    return chain


def _init_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Allocate the state, for checkpoints to be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            momentum_of(optimizer, parameter)


@contextlib.contextmanager
def _frozen(parameters: Sequence[torch.nn.Parameter]) -> Generator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)

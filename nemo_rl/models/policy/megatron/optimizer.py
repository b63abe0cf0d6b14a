"""Megatron's optimizers and schedules from `policy.megatron_cfg`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron.muon import build_muon
from nemo_rl.models.policy.megatron.transformer_config import DTYPES

_MOMENT_DTYPES = {**DTYPES, "uint8": torch.uint8}  # uint8: FP8 with a scale of each tensor


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """`policy.megatron_cfg.optimizer` as Megatron takes it."""
    settings, ddp = policy.megatron_cfg.optimizer, policy.megatron_cfg.distributed_data_parallel_config
    fp8 = policy.megatron_cfg.fp8_cfg
    return OptimizerConfig(
        optimizer="sgd" if settings.optimizer == "sgd" else "adam",  # Muon's vectors follow Adam
        lr=settings.lr,
        min_lr=settings.lr if settings.min_lr is None else settings.min_lr,
        weight_decay=settings.weight_decay,
        bf16=policy.precision == "bfloat16",
        params_dtype=DTYPES[policy.precision],
        fp8_recipe=fp8.fp8_recipe if fp8.enabled else None,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        sgd_momentum=settings.sgd_momentum,
        muon_momentum=settings.muon_momentum,
        muon_num_ns_steps=settings.muon_num_ns_steps,
        muon_scale_mode=settings.muon_scale_mode,
        use_distributed_optimizer=settings.shards_optimizer,
        use_precision_aware_optimizer=settings.use_precision_aware_optimizer,
        store_param_remainders=False,  # checkpoints hold main parameters, not the bits that bfloat16 weights lack
        main_params_dtype=DTYPES[settings.params_dtype],
        exp_avg_dtype=_MOMENT_DTYPES[settings.exp_avg_dtype],
        exp_avg_sq_dtype=_MOMENT_DTYPES[settings.exp_avg_sq_dtype],
        optimizer_cpu_offload=settings.optimizer_cpu_offload,
        optimizer_offload_fraction=settings.optimizer_offload_fraction,
        overlap_param_gather=ddp.overlap_param_gather,
        clip_grad=policy.max_grad_norm or 0.0,
    )


def build_optimizer(policy: PolicyConfig, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer of `policy.megatron_cfg.optimizer` over the stages of this rank. Collective."""
    config, name = optimizer_config(policy), policy.megatron_cfg.optimizer.optimizer
    if name in ("muon", "dist_muon"):
        return build_muon(config, chunks, is_distributed=name == "dist_muon")
    return get_megatron_optimizer(config, list(chunks))


def build_scheduler(policy: PolicyConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of `policy.megatron_cfg.scheduler`, at its beginning: the first step has `lr_warmup_init` where
    there is a warm-up."""
    settings, rates = policy.megatron_cfg.scheduler, policy.megatron_cfg.optimizer
    start, end = (
        rates.weight_decay if value is None else value
        for value in (settings.start_weight_decay, settings.end_weight_decay)
    )
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
    """Make the gradients ready and clip them; returns their norm over all ranks, not finite if one of them is not.

    The formula is that of `grad_norm`: gradients times min(1, max_norm / (norm + 1e-6)).
    """
    if optimizer.prepare_grads():
        return float("inf")
    norm: Any = optimizer.get_grad_norm()
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        parameters: Any = part.get_parameters()
        if max_norm is not None and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=max_norm,
                total_norm=norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    return float(norm)


@torch.no_grad()
def take_step(optimizer: MegatronOptimizer) -> None:
    """Update the weights by gradients that `clip_gradients` has made ready. Collective."""
    optimizer.step_with_ready_grads()
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        optimizer.broadcast_params()  # its own `step` gathers: gloo refuses the parts, which are not of one size


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """That of the next step, the same on every rank: ranks without parameters have empty groups."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    assert rate is not None
    return rate


# -- What a rank's Megatron optimizer keeps of each parameter, whichever optimizer it is.
#
# distributed         a stretch of the parameter, laid out flat: one rank's share of a gradient buffer
#   with an offload   likewise; the main parameter is on the host, or on the GPU, with the optimizer that updates it
# there otherwise           all of the parameter's shard; of a bfloat16 parameter the main parameter besides

STEP = "step"
_MAIN_OF_OFFLOAD = "master_param"  # `main` itself, in its own state


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """The state of one parameter, or of the elements `flat` of it that this rank updates."""

    owner: Any
    inner: Any  # the torch optimizer that has the state of `main`
    parameter: torch.Tensor
    main: torch.Tensor  # what is updated; the parameter itself, or a view of it, in float32 training
    flat: range | None

    @property
    def is_scaled(self) -> bool:
        """Whether the optimizer keeps main parameter and moments in other dtypes and shows copies of them."""
        return (
            isinstance(self.owner, DistributedOptimizer)
            and self.owner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            and not isinstance(self.owner.optimizer, HybridDeviceOptimizer)
        )

    @property
    def has_main(self) -> bool:
        """Whether there is a main parameter beside the parameter."""
        return self.is_scaled or self.main.dtype != self.parameter.dtype

    def tensors(self) -> dict[str, torch.Tensor]:
        """`main_param` where there is one, and the state of `main`'s shape: references, or copies in host memory if
        `is_scaled`."""
        if self.is_scaled:
            shown = self.owner._get_main_param_and_optimizer_states(self.parameter)
            return {"main_param" if key == "param" else key: value.cpu() for key, value in shown.items()}
        state = self.inner.state.get(self.main, {})
        found = {"main_param": self.main} if self.has_main else {}
        for key, value in state.items():
            if key not in (STEP, _MAIN_OF_OFFLOAD) and value is not None:
                assert value.shape == self.main.shape, f"{key} has shape {tuple(value.shape)}"
                found[key] = value
        return found

    def allocate(self, keys: set[str]) -> None:
        """Make the state `keys`, of any value, and no other."""
        state = self.inner.state
        if self.is_scaled:
            if keys and not state[self.main]:
                self.inner.initialize_state(self.main, self.owner.config.store_param_remainders)
            return
        state.pop(self.main, None)
        if keys:
            state[self.main] = {key: torch.zeros_like(self.main) for key in sorted(keys)}

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what was loaded into `tensors()`."""
        if self.is_scaled:
            device = self.main.device
            renamed = {"param" if key == "main_param" else key: value.to(device) for key, value in tensors.items()}
            self.owner._set_main_param_and_optimizer_states(self.parameter, renamed)


def leaf_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that update something on this rank: with experts, or Muon, there are several."""
    leaves: list[Any] = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [leaf for leaf in leaves if not leaf.is_stub_optimizer]


def optimizer_parts(optimizer: MegatronOptimizer) -> Iterator[OptimizerPart]:
    """Of all parameters that the optimizer updates on this rank."""
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf, DistributedOptimizer):
            groups = leaf.optimizer.param_groups
            updates = holders(leaf.optimizer)
            for parameter, (group, order) in leaf.model_param_group_index_map.items():
                held = leaf._get_model_param_range_map(parameter)["param"]
                flat = range(held.start, held.end)
                main = groups[group]["params"][order]
                if isinstance(leaf.optimizer, HybridDeviceOptimizer):
                    main = leaf.optimizer.param_to_inner_param[main]
                yield OptimizerPart(owner=leaf, inner=updates[main], parameter=parameter, main=main, flat=flat)
        elif isinstance(leaf, Float16OptimizerWithFloat16Params):
            for parameters, mains in (
                *zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True),
                *zip(leaf.fp32_from_fp32_groups, leaf.fp32_from_fp32_groups, strict=True),
            ):
                for parameter, main in zip(parameters, mains, strict=True):
                    yield OptimizerPart(owner=leaf, inner=leaf.optimizer, parameter=parameter, main=main, flat=None)
        else:
            for group in leaf.optimizer.param_groups:
                for parameter in group["params"]:
                    yield OptimizerPart(
                        owner=leaf, inner=leaf.optimizer, parameter=parameter, main=parameter, flat=None
                    )


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Those that update: with an offload several, one of them on the GPU."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def holders(optimizer: Any) -> dict[torch.Tensor, Any]:
    """Of each main parameter, the torch optimizer that updates it."""
    inners = _inner_optimizers(optimizer)
    return {main: inner for inner in inners for group in inner.param_groups for main in group["params"]}


def _counts_per_parameter(inner: Any) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def steps_taken(optimizer: MegatronOptimizer) -> int | None:
    """How often Adam has updated its parameters; None for optimizers that do not count, and before the first step."""
    for leaf in leaf_optimizers(optimizer):
        for inner in _inner_optimizers(leaf.optimizer):
            counted = inner.state.values() if _counts_per_parameter(inner) else inner.param_groups
            for values in counted:
                if STEP in values:
                    return int(values[STEP])
    return None


def set_steps_taken(optimizer: MegatronOptimizer, steps: int | None) -> None:
    """Inverse of `steps_taken`, after the state was allocated."""
    if steps is None:
        return
    for leaf in leaf_optimizers(optimizer):
        for inner in _inner_optimizers(leaf.optimizer):
            if _counts_per_parameter(inner):
                for state in inner.state.values():
                    state[STEP] = torch.tensor(float(steps))
            elif "Adam" in type(inner).__name__:
                for group in inner.param_groups:
                    group[STEP] = steps
        if isinstance(leaf.optimizer, HybridDeviceOptimizer):
            leaf.optimizer._sync_sub_optimizers_state_to_hdo()

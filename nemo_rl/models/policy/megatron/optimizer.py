"""Megatron's optimizers and schedules from `policy.megatron_cfg`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
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

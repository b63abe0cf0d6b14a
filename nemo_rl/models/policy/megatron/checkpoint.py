"""Megatron's distributed checkpoints of a policy.

policy/weights/     the model, as Megatron's sharded tensors
policy/optimizer/   the optimizer's state, likewise, and scheduler.pt
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel


def sharded_model(stages: Sequence[PolicyGPTModel]) -> dict[str, Any]:
    """The sharded tensors of the stages of this rank."""
    return {f"model{number}": stage.sharded_state_dict() for number, stage in enumerate(stages)}


def save(
    directory: Path,
    stages: Sequence[PolicyGPTModel],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """Write this rank's part of `weights/` and, with an optimizer, `optimizer/`. Collective."""
    model = sharded_model(stages)
    _save(model, directory / "weights")
    if optimizer is not None and scheduler is not None:
        state = {"optimizer": optimizer.sharded_state_dict(model), "scheduler": scheduler.state_dict()}
        _save(state, directory / "optimizer")


def _save(state: dict[str, Any], directory: Path) -> None:
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(directory))


def load(
    directory: Path,
    stages: Sequence[PolicyGPTModel],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """Inverse of `save`, also on another layout. Collective."""
    model = sharded_model(stages)
    loaded: Any = dist_checkpointing.load(model, str(directory / "weights"))
    for number, stage in enumerate(stages):
        stage.load_state_dict(loaded[f"model{number}"])
    if optimizer is not None and scheduler is not None:
        wanted = {
            "optimizer": optimizer.sharded_state_dict(sharded_model(stages), is_loading=True),
            "scheduler": scheduler.state_dict(),
        }
        state: Any = dist_checkpointing.load(wanted, str(directory / "optimizer"))
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

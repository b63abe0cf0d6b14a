"""The state of an optimizer by parameter name, so that it can be saved on one set of ranks and loaded on another.

    <parameter>.<state>      e.g. model.norm.weight.exp_avg: sharded like the parameter, or a number all ranks share
    OptimizerSettings        hyperparameters of the groups and the scheduler's counters, equal on all ranks

A rank names the parameters it holds: pipeline stages name different ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl.utils.checkpoint import CheckpointError


def optimizer_tensors(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`<parameter>.<state>` -> value for every trained parameter that has state. Values are tensors or numbers.

    `parameters` may name more than the optimizer holds, and must name all that it holds.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        f"{names[id(parameter)]}.{key}": value
        for parameter in _parameters(optimizer)
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def as_tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Numbers become tensors without dimensions; what is neither number nor tensor cannot be saved."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor | int | float):
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} as {name}, which cannot be saved; use another "
                "policy.optimizer, or set checkpointing.save_optimizer=false"
            )
    return {name: value if isinstance(value, torch.Tensor) else torch.tensor(value) for name, value in values.items()}


def optimizer_settings(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Learning rates, betas, ... of each group, and the scheduler's counters: plain values, copied."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    counters = None if scheduler is None else scheduler.state_dict()
    return copy.deepcopy({"class": _class_name(optimizer), "param_groups": groups, "scheduler": counters})


def load_optimizer_settings(
    settings: Mapping[str, Any], optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
) -> None:
    """Inverse of `optimizer_settings`. Raises CheckpointError when they are of another optimizer or schedule."""
    if settings["class"] != _class_name(optimizer):  # Adam and AdamW, say, keep the same state and differ in a setting
        raise CheckpointError(
            f"the checkpoint was saved by {settings['class']}, this run has {_class_name(optimizer)}: {_PUT_BACK}"
        )
    groups: Sequence[Mapping[str, Any]] = settings["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} groups of parameters, this run's "
            f"{len(optimizer.param_groups)}: {_PUT_BACK}"
        )
    if (settings["scheduler"] is None) != (scheduler is None):
        which = "without a scheduler, this run has one" if scheduler is not None else "with a scheduler, this has none"
        raise CheckpointError(f"the checkpoint was saved by a run {which}: put policy.scheduler back")
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    if scheduler is not None:
        scheduler.load_state_dict(settings["scheduler"])


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


_PUT_BACK = "put policy.optimizer back to what the checkpoint's config.yaml says"


def prepare_state(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, saved_names: Sequence[str] | set[str]
) -> None:
    """Give the optimizer the state tensors that were saved, and no others; their values are to be loaded.

    A parameter that had no gradient before the checkpoint has no state in it. Raises CheckpointError when the state of
    a parameter is that of another optimizer.
    """
    _allocate_state(optimizer)
    saved: dict[str, set[str]] = {}
    for full_name in saved_names:
        parameter_name, _, key = full_name.rpartition(".")
        saved.setdefault(parameter_name, set()).add(key)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for parameter in list(_parameters(optimizer)):
        name = names[id(parameter)]
        if name not in saved:
            optimizer.state.pop(parameter, None)
            continue
        keys = set(optimizer.state[parameter]) if parameter in optimizer.state else set()
        if keys != saved[name]:
            raise CheckpointError(
                f"the checkpoint keeps {_listed(saved[name])} of {name}, {type(optimizer).__name__} needs "
                f"{_listed(keys)}: {_PUT_BACK}"
            )


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) if keys else "nothing"


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    # Optimizers make their state in the first step. With no gradient and no learning rate it changes no parameter.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in _parameters(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad)

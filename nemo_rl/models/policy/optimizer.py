"""Any `torch.optim` optimizer and any chain of schedulers, by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl.models.policy.config import OptimizerConfig, SchedulerConfig


def import_class(path: str, base: type, key: str) -> type:
    """The class at dotted `path`. ValueError when there is none or it is not a `base`."""
    module_name, _, name = path.rpartition(".")
    try:
        found = vars(importlib.import_module(module_name))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise ValueError(
            f"{key}: cannot import {path!r} ({error}); give a full path such as torch.optim.AdamW"
        ) from error
    if found is ReduceLROnPlateau:
        raise ValueError(f"{key}: {path!r} needs a metric at every step, which there is none of; use another scheduler")
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ValueError(f"{key}: {path!r} is not a {base.__module__}.{base.__name__}")
    return found


def construct(cls: type, key: str, *args: Any, **kwargs: Any) -> Any:
    """`cls(*args, **kwargs)`; what the class does not take or refuses is reported under its YAML key."""
    accepted = inspect.signature(cls).parameters
    unknown = sorted(set(kwargs) - set(accepted))
    if unknown:
        options = ", ".join(name for name in accepted if name not in ("params", "optimizer", "self"))
        raise ValueError(f"{key}.kwargs: {cls.__name__} does not take {', '.join(unknown)}; it takes: {options}")
    try:
        return cls(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}.kwargs: {cls.__name__} refuses {kwargs}: {error}") from error


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `policy.optimizer`."""
    cls = import_class(config.name, torch.optim.Optimizer, "policy.optimizer.name")
    return construct(cls, "policy.optimizer", parameters, **config.kwargs)


def build_scheduler(configs: list[SchedulerConfig], optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """One scheduler, or a SequentialLR when the list ends in `{milestones: [...]}`; None for an empty list."""
    parts = [
        construct(import_class(c.name, LRScheduler, "policy.scheduler.name"), "policy.scheduler", optimizer, **c.kwargs)
        for c in configs
        if c.name is not None
    ]
    milestones = [c.milestones for c in configs if c.milestones is not None]
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return SequentialLR(optimizer, parts, milestones=list(milestones[0]))

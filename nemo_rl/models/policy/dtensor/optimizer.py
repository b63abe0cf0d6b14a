"""Any `torch.optim` optimizer and any chain of schedulers, by name; clipping by the gradient's norm over all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.weight_loading import local_part
from nemo_rl.utils.registry import import_object

_FEW_NUMBERS = 1 << 20  # up to here, one call per parameter takes longer than its arithmetic; beyond, memory counts


def build_optimizer(config: PolicyConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `config.optimizer`."""
    chosen, parameters = config.optimizer, list(parameters)
    assert chosen is not None
    optimizer = _construct(chosen.name, torch.optim.Optimizer, config.key("optimizer"), parameters, **chosen.kwargs)
    places = {(p.device.type, p.device_mesh if isinstance(p, DTensor) else None) for p in parameters}
    is_small = len(places) == 1 and sum(map(torch.numel, parameters)) <= _FEW_NUMBERS
    if isinstance(optimizer, torch.optim.Adam) and is_small and parameters[0].device.type == "cpu":
        for group in optimizer.param_groups:
            if group["foreach"] is None:  # torch would choose one parameter at a time, which gives the same bits
                group["foreach"] = not group["fused"]
    return optimizer


def build_scheduler(config: PolicyConfig, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """One scheduler, or a SequentialLR if the list ends in `{milestones: [...]}`; None for an empty list."""
    key = config.key("scheduler")
    parts = [
        _construct(c.name, LRScheduler, key, optimizer, **c.kwargs) for c in config.scheduler if c.name is not None
    ]
    milestones = [c.milestones for c in config.scheduler if c.milestones is not None]
    if len(parts) > 1:
        return SequentialLR(optimizer, parts, milestones=list(milestones[0]))
    return parts[0] if parts else None


def own_schedule(config: PolicyConfig, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler | None:
    """The schedule of `config.scheduler` after `steps` steps, over the hyperparameters of `config.optimizer`.

    `optimizer` has the hyperparameters of a checkpoint, and gets those that it was constructed with.
    """
    arguments = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            if name in arguments and value is not None:  # None: chosen by torch, or by `build_optimizer`
                group[name] = value
        group.pop("initial_lr", None)  # the scheduler notes it
    scheduler = build_scheduler(config, optimizer)
    if scheduler is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has made these steps before the checkpoint
            for _ in range(steps):
                scheduler.step()
    return scheduler


def _construct(path: str, base: type, key: str, *args: Any, **kwargs: Any) -> Any:
    """An object of the class at the import path. ValueError, under its YAML key, for arguments that it refuses."""
    try:
        cls = import_object(path, f"{key}.name")
    except (ImportError, ValueError) as error:
        raise ValueError(f"{error}; give a full path such as torch.optim.AdamW") from error
    if cls is ReduceLROnPlateau:
        raise ValueError(f"{key}.name: {path!r} needs a metric at every step, which does not exist; use another one")
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ValueError(f"{key}.name: {path!r} is not a {base.__module__}.{base.__name__}")
    accepted = inspect.signature(cls).parameters
    if unknown := sorted(set(kwargs) - set(accepted)):
        options = ", ".join(name for name in accepted if name not in ("params", "optimizer", "self"))
        raise ValueError(f"{key}.kwargs: {cls.__name__} does not take {', '.join(unknown)}; it takes: {options}")
    try:
        return cls(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}.kwargs: {cls.__name__} refuses {kwargs}: {error}") from error


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | None, *, pipeline_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale the gradients in place to a 2-norm of at most `max_norm`; returns the norm before. Collective.

    Every element of a gradient counts once: shards are summed over the ranks that share them, over any mesh and axes,
    and copies are not. Plain gradients count as copies. Does not wait for the device. Does not change the gradients if
    the norm is not finite or `max_norm` is None.

    Args:
        parameters: all of this rank's, in the same order on the ranks of one pipeline stage. The gradient of a
            parameter on a device mesh (FSDP, tensor or expert parallelism) is a DTensor.
        pipeline_group: ranks that hold other layers.

    Returns:
        float32 [], equal on every rank.
    """
    parameters = list(parameters)
    assert parameters, "nothing is trained on this rank"
    gradients: list[torch.Tensor] = []
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient, found = parameter.grad, ()
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                # Under tensor parallelism without FSDP a gradient may be a partial sum, which is done here.
                whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
                gradient = parameter.grad = gradient.redistribute(placements=whole)
            sharded = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            found = tuple(gradient.device_mesh.get_group(axis) for axis in sharded)
        gradients.append(local_part(gradient))
        by_groups.setdefault(found, []).append(gradients[-1])
    # float32, because squares of bfloat16 gradients would lose most of their digits in the sum
    squares = {
        found: torch.stack(torch._foreach_norm(local, 2, dtype=torch.float32)).square().sum()
        for found, local in by_groups.items()
    }
    # Gradients sharded over the same groups share their all-reduces; a gradient may be sharded over several groups,
    # then its sum of squares is reduced over one after the other.
    for group in dict.fromkeys(group for found in squares for group in found):
        shared = [found for found in squares if group in found]
        reduced = torch.stack([squares[found] for found in shared])
        dist.all_reduce(reduced, group=group)
        squares |= dict(zip(shared, reduced.unbind(), strict=True))
    total = torch.stack([torch.zeros((), device=parameters[0].device), *squares.values()]).sum()
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    norm = total.sqrt()
    if max_norm is not None and gradients:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # A scale of 1 for a norm that is not finite, decided on the device: asking the host would wait for it.
        torch._foreach_mul_(gradients, torch.where(norm.isfinite(), scale, 1.0))
    return norm

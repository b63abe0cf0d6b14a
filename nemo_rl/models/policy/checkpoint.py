"""Weights and optimizer of a sharded policy on disk.

`weights/` and `optimizer/` are torch distributed checkpoints (resharded on load), parameters under their Hugging Face
names. `weights/consolidated/` is a Hugging Face model directory, written when asked for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl.models.policy.logprobs import LogprobModel

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 4 << 30


def hf_parameters(model: LogprobModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter), tied parameters once, in the model's order."""
    for name, parameter in model.hf.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective for a DTensor), contiguous: gloo garbles strided tensors."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def save_weights(model: LogprobModel, directory: Path) -> None:
    """Every rank writes its shards."""
    dcp.save({name: p.detach() for name, p in hf_parameters(model)}, checkpoint_id=str(directory))


def load_weights(model: LogprobModel, directory: Path) -> None:
    """Read shards in place, resharding where the number of ranks differs."""
    dcp.load({name: p.detach() for name, p in hf_parameters(model)}, checkpoint_id=str(directory))


def save_optimizer(
    model: LogprobModel, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, directory: Path
) -> None:
    """Optimizer state by parameter name, and the scheduler's counters."""
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=str(directory))
    if dist.get_rank() == 0 and scheduler is not None:
        torch.save(scheduler.state_dict(), directory / "scheduler.pt")


def load_optimizer(
    model: LogprobModel, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, directory: Path
) -> None:
    """Inverse of `save_optimizer`."""
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(directory))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(torch.load(directory / "scheduler.pt", weights_only=True))


def save_consolidated(model: LogprobModel, directory: Path) -> None:
    """A Hugging Face model directory in the parameters' dtype, gathered one parameter at a time. Collective."""
    is_writer = dist.get_rank() == 0
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
        model.hf.config.save_pretrained(directory)
        if model.hf.can_generate():
            model.hf.generation_config.save_pretrained(directory)
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    num_files = total = 0

    def flush() -> None:
        nonlocal num_files
        num_files += 1
        file = f"model-{num_files:05d}.safetensors"
        save_file(pending, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, file))
        pending.clear()

    for name, parameter in hf_parameters(model):
        whole = full_tensor(parameter.detach())
        if not is_writer:
            continue
        pending[name] = whole.cpu().clone()
        total += whole.nbytes
        if sum(t.nbytes for t in pending.values()) > _MAX_FILE_BYTES:
            flush()
    if is_writer:
        flush()
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    dist.barrier()

"""Weights and optimizer of a sharded policy on disk.

`weights/` and `optimizer/` are torch distributed checkpoints (resharded on load), parameters under their Hugging Face
names. `weights/consolidated/` is a Hugging Face model directory, written when asked for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl.models.policy.logprobs import LogprobModel
from nemo_rl.models.policy.parallelize import named_parameters

logger = logging.getLogger(__name__)

ModelSaveFormat = Literal["torch_save", "safetensors"]

_MAX_FILE_BYTES = 4 << 30


def hf_parameters(model: LogprobModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter), tied parameters once, in the model's order."""
    yield from named_parameters(model.hf)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective for a DTensor), contiguous: gloo garbles strided tensors."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def save_weights(model: LogprobModel, directory: Path, model_save_format: ModelSaveFormat) -> None:
    """Every rank writes its shards, with torch's own files or with safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: parameter.detach() for name, parameter in hf_parameters(model)}
    if model_save_format == "safetensors":
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=str(directory), save_distributed=True))
    else:
        dcp.save(state, checkpoint_id=str(directory))


def load_weights(model: LogprobModel, directory: Path) -> None:
    """Read shards of either format in place, resharding where the number of ranks differs."""
    load_tensors({name: parameter.detach() for name, parameter in hf_parameters(model)}, directory)


def load_tensors(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Fill `state` (Hugging Face name -> tensor or DTensor) from a `weights/` directory."""
    if (directory / ".metadata").exists():
        dcp.load(state, checkpoint_id=str(directory))
    else:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path=str(directory)))


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
    whole = ((name, full_tensor(parameter.detach())) for name, parameter in hf_parameters(model))
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        model.hf.config.save_pretrained(directory)
        if model.hf.can_generate():
            model.hf.generation_config.save_pretrained(directory)
        write_safetensors(whole, directory)
    else:
        for _ in whole:  # take part in the gathers
            pass
    dist.barrier()


def write_safetensors(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
    """Files of at most 4 GiB and their index, holding no more than one file's tensors at a time."""
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    sizes: list[int] = []

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(pending, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, file))
        pending.clear()

    for name, tensor in tensors:
        if sum(t.nbytes for t in pending.values()) + tensor.nbytes > _MAX_FILE_BYTES and pending:
            flush()
        pending[name] = tensor.cpu().clone()
        sizes.append(tensor.nbytes)
    flush()
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))

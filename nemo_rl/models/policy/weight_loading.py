"""Weights of a Hugging Face checkpoint -> the parameters and buffers that a rank holds, in any placement.

Each rank reads the slices it owns straight from safetensors, so no rank ever holds the whole model. Rank 0 reads a
checkpoint in another format, or under other names, and broadcasts it one tensor at a time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from zipfile import is_zipfile

import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

logger = logging.getLogger(__name__)

SAMPLED_BYTES = 1 << 20  # at the beginning and at the end of each weight file


# -- tensors on disk


class StoredTensor(Protocol):
    """A tensor on disk, read by slices."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class StoredModel(ExitStack):
    """The safetensors files of a model directory or hub model, open for reading inside the `with` block.

    `names` is None if the model is not stored as safetensors. `rename`: the name on disk -> the name in the model.
    `torch_files`: read `pytorch_model*.bin` if there are no safetensors. Experts in MXFP4 have the names of ordinary
    tensors and are read as such.
    """

    def __init__(
        self, model_path: str, rename: Callable[[str], str] | None = None, *, torch_files: bool = False
    ) -> None:
        super().__init__()
        self.model_path = model_path
        self.files = checkpoint_files(model_path)
        if self.files is None and torch_files:
            self.files = checkpoint_files(model_path, WEIGHTS_NAME)
        self._on_disk: dict[str, str] = {}
        if rename is not None and self.files is not None:
            self._on_disk = {rename(name): name for name in self.files}
            self.files = {rename(name): file for name, file in self.files.items()}
        blocks, scales = ({n.removesuffix(part) for n in self.files or () if n.endswith(part)} for part in _MXFP4_PARTS)
        self._packed = blocks & scales
        self._opened: dict[str, Any] = {}

    @property
    def names(self) -> set[str] | None:
        if self.files is None:
            return None
        packed = {f"{name}{part}" for name in self._packed for part in _MXFP4_PARTS}
        return (self.files.keys() - packed) | self._packed

    def tensor(self, name: str) -> StoredTensor:
        assert self.files is not None
        if name in self._packed:
            return _Mxfp4(*(self.tensor(f"{name}{part}") for part in _MXFP4_PARTS))
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = self.enter_context(open_tensors(file))
        return self._opened[file].get_slice(self._on_disk.get(name, name))


class _InMemory:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def open_tensors(file: str) -> Any:
    """The tensors of a file of safetensors or torch, for a `with` block."""
    if not file.endswith(".bin"):
        return safe_open(file, framework="pt")
    # Mapped into memory, unless torch before 1.6 wrote it. Nothing in the file is executed.
    tensors = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
    return nullcontext(SimpleNamespace(keys=tensors.keys, get_slice=lambda name: _InMemory(tensors[name])))


# GPT-OSS's experts are stored in MXFP4 (microscaling formats, OCP 2023): 32 numbers of four bits share a scale, a power
# of two of eight bits.
#
#     NAME_blocks uint8 [E, out, in / 32, 16], two numbers per byte, the first in the lower half
#     NAME_scales uint8 [E, out, in / 32], exponents with an offset of 127
#     -> NAME [E, in, out], which is how transformers holds these matrices

_MXFP4_PARTS = ("_blocks", "_scales")
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _Mxfp4:
    """Matrices [E, in, out] as ordinary numbers, in bfloat16, which holds them exactly."""

    def __init__(self, blocks: StoredTensor, scales: StoredTensor) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, columns, groups = self._scales.get_shape()
        return [experts, 32 * groups, columns]

    def __getitem__(self, index: Any) -> torch.Tensor:
        experts, rows, columns = (*index, slice(None), slice(None))[:3]
        values = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
        matrices = []
        for expert in range(self.get_shape()[0])[experts]:  # one after the other: float32 takes eight times the bytes
            blocks, scales = self._blocks[expert, columns], self._scales[expert, columns]
            numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
            whole = torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)
            matrices.append(whole.T[rows].bfloat16())
        return torch.stack(matrices)


def checkpoint_files(model_path: str, name: str = SAFE_WEIGHTS_NAME) -> dict[str, str] | None:
    """Tensor name -> file of a directory or hub model; None if it is not stored in files of this `name`."""
    index = cached_file(model_path, f"{name}.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        by_name = {Path(file).name: file for file in get_checkpoint_shard_files(model_path, index)[0] or ()}
        return {tensor: by_name[file] for tensor, file in json.loads(Path(index).read_text())["weight_map"].items()}
    single = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
    if single is None:
        return None
    with open_tensors(single) as file:
        return dict.fromkeys(file.keys(), single)


def weights_identity(name: str, model_path: str, model: PretrainedConfig) -> str:
    """For a directory a digest of the sizes, beginnings and ends of its weight files; for a hub model its revision."""
    directory = Path(model_path)
    if not directory.is_dir():
        return f"{name}@{model._commit_hash}"
    digest = xxhash.xxh3_128()
    for file in sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(SAMPLED_BYTES))
            handle.seek(max(0, size - SAMPLED_BYTES))
            digest.update(handle.read(SAMPLED_BYTES))
    return digest.hexdigest()


# -- tensors of a model


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter, without the prefixes that module wrappers add."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, parameter or persistent buffer), tied ones once, in the model's order."""
    for name, parameter in model.named_parameters():
        yield hf_name(name), parameter
    transient = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if id(buffer) not in transient:
            yield hf_name(name), buffer


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, whose gradient is complete on this rank; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_index(tensor: torch.Tensor) -> tuple[slice, ...] | None:
    """The position of `local_part` in the whole tensor; None if this rank holds nothing of it."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in shape:
        return None
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


@torch.no_grad()
def copy_whole(parameter: torch.Tensor, whole: torch.Tensor | StoredTensor) -> None:
    """Copy this rank's part of `whole`, in memory or on disk, into `parameter`. No communication."""
    index = local_index(parameter)
    if index is not None:
        local_part(parameter).copy_(whole[index if parameter.ndim else ...])


def check_shape(stored: StoredTensor, shape: Sequence[int], name: str, model_path: str) -> None:
    """ValueError if `stored` has another shape."""
    if tuple(stored.get_shape()) != tuple(shape):
        raise ValueError(
            f"{model_path}: tensor {name} has shape {tuple(stored.get_shape())}, the model's config.json says "
            f"{tuple(shape)}; the weights and config.json do not belong together"
        )


def copy_slice(tensor: torch.Tensor, stored: StoredTensor, name: str, model_path: str) -> None:
    """Read this rank's part of `stored`. ValueError if the shapes differ."""
    check_shape(stored, tensor.shape, name, model_path)
    copy_whole(tensor, stored)


# -- loading


def load_weights(
    tensors: Mapping[str, torch.Tensor],
    model_path: str,
    special: Callable[[str, torch.Tensor, StoredModel], bool],
    *,
    auto_class: Any = AutoModelForCausalLM,
    fresh: Mapping[str, Callable[[torch.Tensor], None]] | None = None,
    rename: Callable[[str], str] | None = None,
) -> list[str]:
    """Fill `tensors` (Hugging Face name -> parameter, DTensor or buffer of this rank) from `model_path`. Collective.

    Args:
        special: fills a tensor whose name or shape on disk differs (fused experts); returns False for other tensors.
        auto_class: the class of transformers that loads a checkpoint that cannot be read here.
        fresh: tensors that the checkpoint may lack, with a function that then fills them.
        rename: see `StoredModel`.

    Returns:
        Names of the tensors that the checkpoint lacks.

    Raises:
        ValueError: a shape on disk differs from config.json.
    """
    fresh = fresh or {}
    with StoredModel(model_path, rename) as stored:
        names = stored.names
        absent = [name for name in tensors if name not in (names or ())]
        is_readable = names is not None and all(
            special(name, tensors[name], stored) for name in absent if name not in fresh
        )
        # All ranks take the same way, because the other one is a collective.
        unreadable = torch.tensor([0.0 if is_readable else 1.0])
        dist.all_reduce(unreadable)  # on the CPU: gloo, even where devices use NCCL
        if unreadable.item() == 0:
            for name, tensor in tensors.items():
                if name not in absent:
                    copy_slice(tensor, stored.tensor(name), name, model_path)
    if unreadable.item() > 0:
        logger.info("%s holds no safetensors of these names: rank 0 loads it whole and broadcasts it", model_path)
        absent = _broadcast_from_rank_zero(tensors, model_path, auto_class)
        if lost := [name for name in absent if name not in fresh]:
            raise ValueError(
                f"{model_path} has no weights for {', '.join(lost[:8])}; it is not the model of config.json"
            )
    drawn = [name for name in absent if name in fresh]
    for name in drawn:
        fresh[name](tensors[name])
    return drawn


@torch.no_grad()
def _broadcast_from_rank_zero(tensors: Mapping[str, torch.Tensor], model_path: str, auto_class: Any) -> list[str]:
    """Returns the names of this rank's tensors that the checkpoint lacks."""
    whole: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        labels = {"num_labels": 1} if auto_class is AutoModelForSequenceClassification else {}
        loaded: Any = auto_class.from_pretrained(model_path, dtype="auto", output_loading_info=True, **labels)
        model, loading = loaded
        drawn = loading["missing_keys"]  # transformers drew them at random
        whole = {name: tensor for name, tensor in model.state_dict().items() if name not in drawn}
    described: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in whole.items()]]
    dist.broadcast_object_list(described, src=0)
    for name, shape, dtype in described[0]:
        tensor = whole[name].contiguous() if name in whole else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, src=0)
        if name in tensors:
            copy_whole(tensors[name], tensor)
    return sorted(set(tensors) - {name for name, _, _ in described[0]})

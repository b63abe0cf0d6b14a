"""Directories of saved tensors: names and shapes from their headers, and reading them.

    .metadata + *.distcp         torch.distributed.checkpoint with its own files
    shard-*.safetensors          torch.distributed.checkpoint with safetensors: each file holds the parts of one rank
    *.safetensors                whole tensors, as in a Hugging Face model directory

Reading executes no code from the files.
"""

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nemo_rl.config.errors import some_of
from nemo_rl.utils.checkpoint.manager import CheckpointError

METADATA_NAME = ".metadata"

_PATHS = {"Path", "PosixPath", "PurePosixPath"}
_PATHS_OF_313 = "pathlib._local"  # where Python 3.13 has them: its pickles name it, and 3.12 has no such module

# Everything torch writes into a .metadata file. A pickle could name any other function to call.
_ALLOWED_GLOBALS = {
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    _PATHS_OF_313: _PATHS,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


# What the unpickler raises for bytes that are no pickle: lengths that no memory has, operations without operands.
_DAMAGED_PICKLE = (
    pickle.UnpicklingError, ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError,
    MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class DamagedTensorsError(CheckpointError):
    """The header of saved tensors cannot be read."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        is_dtype = module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype)
        is_size = (module_name, global_name) == ("torch", "Size")
        if module_name == _PATHS_OF_313 and sys.version_info < (3, 13):
            raise CheckpointError("Python 3.13 saved these tensors, and 3.12 cannot read them: continue with 3.13")
        if is_dtype or is_size or global_name in _ALLOWED_GLOBALS.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no checkpoint needs")


def holds_tensors(directory: Path) -> bool:
    """Whether `directory` itself holds saved tensors of a known format."""
    return (directory / METADATA_NAME).is_file() or any(directory.glob("*.safetensors"))


def saved_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    """`size` and `properties.dtype` of each tensor saved in `directory`, by name.

    Raises:
        CheckpointError: there are no tensors.
        DamagedTensorsError: a header is damaged, or torch did not write it.
    """
    path = directory / METADATA_NAME
    if not holds_tensors(directory):
        raise CheckpointError(
            f"{directory} holds no saved tensors: neither {METADATA_NAME} (torch.distributed.checkpoint) nor "
            "*.safetensors is there"
        )
    try:
        if path.is_file():
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it is no metadata of torch.distributed.checkpoint")
        else:
            metadata = HuggingFaceStorageReader(path=str(directory)).read_metadata()
        return {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    except CheckpointError:  # of another Python; one is a RuntimeError
        raise
    except (SafetensorError, *_DAMAGED_PICKLE) as error:
        name = path.name if path.is_file() else "a safetensors file"
        raise DamagedTensorsError(f"{directory}: {name} is damaged ({error}); restore it from a copy") from error


def check_checkpoint_fits(
    directory: Path, names_and_shapes: Mapping[str, Sequence[int]], *, is_all: bool = True
) -> None:
    """Check that `directory` has the tensors `names_and_shapes`, and with `is_all` no others. Reads headers only.

    Raises:
        CheckpointError: the missing, unexpected and differently shaped tensors; or as `saved_tensors`.
    """
    shapes = {name: tuple(tensor.size) for name, tensor in saved_tensors(directory).items()}
    missing, differing = shape_differences(shapes, names_and_shapes)
    unknown = [name for name in shapes if name not in names_and_shapes] if is_all else []
    lists = {"missing there": missing, "unknown to the model": unknown, "of another shape": differing}
    lines = "\n".join(f"  {len(names)} {what}: {some_of(names)}" for what, names in lists.items() if names)
    if lines:
        raise CheckpointError(
            f"the tensors in {directory} belong to a model of another architecture:\n{lines}\n"
            "Use the model they were saved from (model_name, hf_config_overrides, and dtensor_cfg.lora_cfg or "
            "megatron_cfg.peft for adapters), or another checkpoint"
        )


def shape_differences(
    found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> tuple[list[str], list[str]]:
    """Name -> shape of tensors: the names that `found` lacks, and the names with another shape, with both shapes."""
    differing = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return [name for name in wanted if name not in found], differing


def load_tensors(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Fill `tensors` (name -> tensor or DTensor) in place from a directory that `save_tensors` wrote, or from the
    safetensors files of a Hugging Face model. Collective.

    Values are cast to the dtype of the tensor.

    Raises:
        CheckpointError: tensors are missing or have another shape; all of them are listed.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_checkpoint_fits(directory, shapes, is_all=False)  # a rank has a part of the tensors
    state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        if (directory / METADATA_NAME).exists():
            dcp.load(state, checkpoint_id=str(directory))
        else:
            dcp.load(state, storage_reader=HuggingFaceStorageReader(path=str(directory)))
    except CheckpointException as error:
        raise CheckpointError(f"{directory} could not be read: {error}") from error

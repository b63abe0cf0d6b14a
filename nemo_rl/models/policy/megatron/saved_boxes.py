"""What a rank holds of Hugging Face tensors, as boxes that torch.distributed.checkpoint writes and reads.

    Megatron parameter, or rows a to b of it laid out flat  ->  (Hugging Face name, offset in that tensor, view)

Under Hugging Face names a checkpoint knows nothing of the layout it was saved on, so any layout reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nemo_rl.models.policy.megatron.mapping import MappedTensor
from nemo_rl.models.policy.megatron.shard_layout import Shape, ShardPlace


@dataclass(kw_only=True)
class Boxes:
    """Parts of a tensor of `shape`, by offset: views of what they are saved from and loaded into.

    Speaks the protocol by which torch.distributed.checkpoint takes objects for sharded tensors. Several ranks may hold
    the same box; it is written once. Boxes that overlap otherwise are refused when they are saved.
    """

    shape: Shape
    dtype: torch.dtype
    parts: dict[Shape, torch.Tensor] = field(default_factory=dict)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape) for offset, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]

    def on_host(self) -> Boxes:
        """Copies in host memory."""
        copies = {offset: part.detach().to("cpu", copy=True) for offset, part in self.parts.items()}
        return Boxes(shape=self.shape, dtype=self.dtype, parts=copies)


class BoxSavePlanner(DefaultSavePlanner):
    """Finds the boxes again that it planned to write."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of a box."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Likewise for reading. What it is given is flat already, and has memory."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take over `state_dict`, names and `Boxes`."""
        self.flatten_state_dict = False
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """What a box is read into."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def add_boxes(
    boxes: dict[str, Boxes],
    entry: MappedTensor,
    place: ShardPlace,
    values: torch.Tensor,
    *,
    flat: range | None = None,
    suffix: str = "",
) -> None:
    """Add to `boxes` what `values` are of the Hugging Face tensors of `entry`, under their names and `suffix`.

    `values`: this rank's shard, or, with `flat`, these elements of it in a row [stop - start]. Rows that pad the
    vocabulary are left out.
    """
    rank, size = entry.rank_and_size(place)
    shape = entry.shard_shape(size)
    for start, part in _stretch(shape, values.detach(), flat):
        for piece in entry.pieces(rank, size):
            low = max(piece.at, start[piece.dim])
            high = min(piece.at + piece.length, start[piece.dim] + part.shape[piece.dim])
            if low >= high:
                continue
            source = entry.sources[piece.source]
            name = source.name + suffix
            offset = list(start)
            offset[piece.dim] = low - piece.at + piece.start
            held = boxes.setdefault(name, Boxes(shape=source.shape, dtype=values.dtype))
            assert tuple(offset) not in held.parts, f"{name} is held twice from {offset} on"
            held.parts[tuple(offset)] = part.narrow(piece.dim, low - start[piece.dim], high - low)


def _stretch(shape: Shape, values: torch.Tensor, flat: range | None) -> Iterator[tuple[Shape, torch.Tensor]]:
    """(where it begins in a shard of `shape`, view) of the boxes that make up elements `flat` of it: at most three."""
    if flat is None:
        assert tuple(values.shape) == shape, f"{tuple(values.shape)} is not {shape}"
        yield (0,) * len(shape), values
        return
    assert values.shape == (len(flat),), f"{tuple(values.shape)} is not {len(flat)} elements"
    if len(shape) == 1:
        yield (flat.start,), values
        return
    _, columns = shape
    at = 0
    while at < len(values):
        row, column = divmod(flat.start + at, columns)
        left = len(values) - at
        is_part = column > 0 or left < columns
        rows, width = (1, min(left, columns - column)) if is_part else (left // columns, columns)
        yield (row, column), values[at : at + rows * width].view(rows, width)
        at += rows * width


def on_host(boxes: Mapping[str, Boxes]) -> dict[str, Boxes]:
    """Copies in host memory, which later steps do not change."""
    return {name: box.on_host() for name, box in boxes.items()}

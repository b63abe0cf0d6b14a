"""A batch by name: tensors whose first dimension is the batch, and lists of the same length.

This library plans batches from lengths alone (`algorithms.plan.batch`) and moves no rows between ranks. Dividing rows
over shards, as scripts written for NeMo RL do, is here, too.
"""

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
import torch.distributed as dist

from nemo_rl.distributed.packing import get_packer


class BatchedDataDict[DictT: Mapping[str, Any]](UserDict[str, Any]):
    """Tensors and lists that share their batch size."""

    micro_batch_indices: list[list[list[int]]] | None = None
    """Micro-batches of shards that `shard_by_batch_size` made with dynamic batching or packing: by global batch their
    row ranges [start, end), counted in that batch."""

    micro_batch_lengths: list[list[int]] | None = None
    """Likewise the padded length of each micro-batch, in tokens."""

    elem_counts_per_gb: list[int] | None = None
    """Likewise the rows of each global batch on this shard."""

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Concatenate batches on the batch dimension, with sorted keys. Tensors [B, S, ...] are right-padded on dim 1.

        The padding is `pad_value_dict[key]`, or 0.

        Raises:
            ValueError: if the batches have different keys.
            NotImplementedError: for a value that is neither a list nor a tensor.
        """
        if not batches:
            return cls()
        keys = sorted(batches[0])
        for batch in batches:
            if sorted(batch) != keys:
                raise ValueError(f"batches to be joined have different keys: {keys} and {sorted(batch)}")
        pads = pad_value_dict or {}
        return cls({key: join(key, [batch[key] for batch in batches], pads.get(key, 0)) for key in keys})

    @property
    def size(self) -> int:
        """Number of samples; 0 without keys. Raises ValueError if the values disagree."""
        sizes = {key: len(value) for key, value in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"values of a batch have different sizes: {sizes}")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, end: int) -> Self:
        """Samples `start` to `end` (exclusive), as a new batch."""
        return type(self)({key: value[start:end] for key, value in self.data.items()})

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The samples at `indices`, in that order, as a new batch.

        Raises TypeError for a value that is neither a list nor a tensor.
        """
        wanted = torch.as_tensor(indices, dtype=torch.int64)
        selected: dict[str, Any] = {}
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                selected[key] = value[wanted.to(value.device)]
            elif isinstance(value, list):
                selected[key] = [value[i] for i in wanted.tolist()]
            else:
                raise TypeError(
                    f"cannot select samples of {key!r}: it is a {type(value).__name__}, not a tensor or list"
                )
        return type(self)(selected)

    def reorder_data(self, indices: Sequence[int]) -> None:
        """Move row i to position `indices[i]`, in place: undoes the order of `shard_by_batch_size`."""
        self.data = self.select_indices(torch.as_tensor(indices).argsort()).data

    def chunk(self, rank: int, chunks: int) -> Self:
        """Part number `rank` of `chunks` equal parts. ValueError if they cannot be equal."""
        size = _equal_parts(self.size, chunks, "rows in", "chunks")
        return self.slice(rank * size, (rank + 1) * size)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row; items of lists are copied deeply."""
        return type(self)(
            {
                key: value.repeat_interleave(num_repeats, dim=0)
                if isinstance(value, torch.Tensor)
                else [copy.deepcopy(item) for item in value for _ in range(num_repeats)]
                for key, value in self.data.items()
            }
        )

    def truncate_tensors(self, dim: int, length: int) -> None:
        """Keep the first `length` entries of dimension `dim` of the tensors that have it, in place."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, min(length, value.shape[dim]))

    def all_gather(self, group: dist.ProcessGroup | None = None) -> Self:
        """The rows of all ranks of `group`, in their order, on the devices of this rank's; batches are right-padded."""
        devices = {key: value.device for key, value in self.data.items() if isinstance(value, torch.Tensor)}
        parts: list[Any] = [None] * dist.get_world_size(group)
        own = {key: value.cpu() if key in devices else value for key, value in self.data.items()}
        dist.all_gather_object(parts, own, group=group)
        whole = self.from_batches(parts)
        for key, device in devices.items():
            whole[key] = whole[key].to(device)
        return whole

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Mapping[str, Any] | None = None,
        sequence_packing_args: Mapping[str, Any] | None = None,
    ) -> Any:
        """Global batches of `batch_size` rows (None: all), each divided over the shards; shard i has its part of each.

        Plain parts are contiguous. Dynamic batching deals out rows sorted by length, and all shards have micro-batches
        of the same rows and lengths; packing deals out bins. Both give (shards, row of this batch at each position of
        the joined shards), and `micro_batch_indices` of each shard.

        Args:
            dynamic_batching_args: `max_tokens_per_microbatch`, `sequence_length_round`, `input_key`,
                `input_lengths_key`.
            sequence_packing_args: `max_tokens_per_microbatch`, `algorithm`, `input_key`, `input_lengths_key`,
                `sequence_length_pad_multiple`.

        Raises:
            ValueError: for sizes that do not divide, arguments that exclude each other, or a row longer than a
                micro-batch.
        """
        if batch_size is not None and allow_uneven_shards:
            raise ValueError("give batch_size or allow_uneven_shards=True, not both")
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("give dynamic_batching_args or sequence_packing_args, not both")
        size = self.size if batch_size is None else batch_size
        num_batches = _equal_parts(self.size, size, "rows in batches of", "rows") if size else 0
        if not allow_uneven_shards and sequence_packing_args is None:
            _equal_parts(size, shards, "rows of a batch on", "shards")
        rows: list[list[int]] = [[] for _ in range(shards)]
        indices: list[list[list[list[int]]]] = [[] for _ in range(shards)]
        lengths: list[list[list[int]]] = [[] for _ in range(shards)]
        for start in range(0, num_batches * size, max(1, size)):
            batch = range(start, start + size)
            if dynamic_batching_args is not None:
                parts = _dynamic(self, batch, shards, **dynamic_batching_args)
            elif sequence_packing_args is not None:
                parts = _packed(self, batch, shards, **sequence_packing_args)
            else:
                longest = -(-size // shards)
                parts = [([*batch[i * longest : (i + 1) * longest]], [], []) for i in range(shards)]
            for shard, (part, ranges, longest) in enumerate(parts):
                rows[shard] += part
                indices[shard].append(ranges)
                lengths[shard].append(longest)
        sharded = [SlicedDataDict(self.select_indices(own).data) for own in rows]
        if dynamic_batching_args is None and sequence_packing_args is None:
            return sharded
        for shard, ranges, longest in zip(sharded, indices, lengths, strict=True):
            shard.micro_batch_indices, shard.micro_batch_lengths = ranges, longest
            shard.elem_counts_per_gb = [batch[-1][1] for batch in ranges]
        return sharded, [row for own in rows for row in own]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> Self:
        """Global batch number `batch_idx` of a shard: of `batch_size` rows, or of its own number of rows."""
        if self.micro_batch_indices is None or self.micro_batch_lengths is None or self.elem_counts_per_gb is None:
            size = self.size if batch_size is None else batch_size
            return self.slice(batch_idx * size, (batch_idx + 1) * size)
        start, size = sum(self.elem_counts_per_gb[:batch_idx]), self.elem_counts_per_gb[batch_idx]
        found = self.slice(start, start + size)
        found.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        found.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        found.elem_counts_per_gb = [size]
        return found

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Micro-batches of `microbatch_size` rows. ValueError if the rows do not divide."""
        number = _equal_parts(self.size, microbatch_size, "rows in micro-batches of", "rows")
        return (self.slice(i * microbatch_size, (i + 1) * microbatch_size) for i in range(number))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        """The micro-batches of a global batch, cut to their lengths on `sequence_dim`."""
        for rows, [_, length] in self._of_one_batch():
            rows.truncate_tensors(sequence_dim, length)
            yield rows

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Number of these micro-batches."""
        return len(self._of_one_batch())

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        """The rows of each bin of a global batch, not packed yet."""
        return (rows for rows, _ in self._of_one_batch())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Number of bins, and tokens of the fullest."""
        found = self._of_one_batch()
        return len(found), max(length for _, [_, length] in found)

    def _of_one_batch(self) -> list[tuple[Self, tuple[int, int]]]:
        """Each micro-batch with its (number, length)."""
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None or len(indices) != 1:
            raise ValueError("give one global batch of a shard: get_batch(i) of what shard_by_batch_size returned")
        pairs = zip(indices[0], enumerate(lengths[0]), strict=True)
        return [(self.slice(start, end), length) for (start, end), length in pairs]

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors, in place."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """A plain dictionary with the same values."""
        return dict(self.data)


def join(key: str, values: list[Any], pad: int | float = 0) -> Any:
    """Lists joined, or tensors of one dtype concatenated on dimension 0, right-padded with `pad` on dimension 1.

    Raises:
        ValueError: for tensors of several dtypes.
        NotImplementedError: for a value that is neither a list nor a tensor.
    """
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise NotImplementedError(f"cannot join {key!r}: {sorted({type(value).__name__ for value in values})}")
    if len(dtypes := {value.dtype for value in values}) > 1:
        raise ValueError(f"tensors of {key!r} have different dtypes: {', '.join(sorted(map(str, dtypes)))}; cast them")
    if values[0].ndim < 2:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    below = (0, 0) * (values[0].ndim - 2)
    return torch.cat([torch.nn.functional.pad(v, (*below, 0, width - v.shape[1]), value=pad) for v in values])


class SlicedDataDict(BatchedDataDict[Any]):
    """A shard of a batch."""


def _equal_parts(number: int, parts: int, of: str, what: str) -> int:
    if number % parts:
        raise ValueError(f"{number} {of} {parts} {what}: {number} is no multiple of {parts}")
    return number // parts


# -- a global batch: of each shard its rows, and the ranges and lengths of its micro-batches

Part = tuple[list[int], list[list[int]], list[int]]


def _row_lengths(batch: BatchedDataDict[Any], rows: Sequence[int], key: str, multiple: int, limit: int) -> list[int]:
    """Lengths of `rows`, rounded up. ValueError for one above `limit`."""
    lengths = [-(-int(batch[key][row]) // multiple) * multiple for row in rows]
    if (longest := max(lengths, default=0)) > limit:
        raise ValueError(f"a row of {longest} tokens does not fit: raise max_tokens_per_microbatch above {limit}")
    return lengths


def _dynamic(
    batch: BatchedDataDict[Any],
    rows: Sequence[int],
    shards: int,
    *,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    input_key: str,
    input_lengths_key: str,
) -> list[Part]:
    width = batch[input_key].shape[1]
    _row_lengths(batch, rows, input_lengths_key, 1, max_tokens_per_microbatch)
    in_order = sorted(rows, key=lambda row: int(batch[input_lengths_key][row]))
    parts = [in_order[i::shards] for i in range(shards)]
    ranges: list[list[int]] = []
    lengths: list[int] = []
    for position, together in enumerate(zip(*parts, strict=True)):
        longest = max(int(batch[input_lengths_key][row]) for row in together)
        longest = min(width, -(-longest // sequence_length_round) * sequence_length_round)
        if ranges and (position + 1 - ranges[-1][0]) * longest <= max_tokens_per_microbatch:
            ranges[-1][1], lengths[-1] = position + 1, longest
        else:
            ranges.append([position, position + 1])
            lengths.append(longest)
    return [(part, copy.deepcopy(ranges), list(lengths)) for part in parts]


def _packed(
    batch: BatchedDataDict[Any],
    rows: Sequence[int],
    shards: int,
    *,
    max_tokens_per_microbatch: int,
    algorithm: str,
    input_key: str,
    input_lengths_key: str,
    sequence_length_pad_multiple: int,
) -> list[Part]:
    lengths = _row_lengths(batch, rows, input_lengths_key, sequence_length_pad_multiple, max_tokens_per_microbatch)
    packer = get_packer(algorithm, max_tokens_per_microbatch, min_bin_count=shards, bin_count_multiple=shards)
    bins = packer.pack(lengths)
    parts = []
    for shard in range(shards):
        own = bins[shard::shards]
        ends = accumulate(map(len, own))
        ranges = [[end - len(bin_), end] for end, bin_ in zip(ends, own, strict=True)]
        parts.append(([rows[i] for bin_ in own for i in bin_], ranges, [sum(lengths[i] for i in bin_) for bin_ in own]))
    return parts

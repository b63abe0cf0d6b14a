"""Tables of which rank has which part of which tensor, as arrays with a row per part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl.distributed.pack_layout import TensorMeta

Ints = np.ndarray  # int64


@dataclass(frozen=True)
class Shards:
    """Parts of tensors and who has (or wants) them: row i is part lo[i] to hi[i] of dimension dim[i] of a tensor.

    All columns int64 [N]; `tensor` numbers the list of tensors, `rank` the members of the group. A scalar is taken as
    one row of one element. Where receivers want parts, the order of a rank's rows is the order in its buckets.
    """

    rank: Ints
    tensor: Ints
    dim: Ints
    lo: Ints
    hi: Ints

    @classmethod
    def whole(cls, tensors: Sequence[TensorMeta], rank: Ints, tensor: Ints) -> Shards:
        """Rows of uncut tensors: `tensor[i]` on `rank[i]`."""
        first = np.array([meta.shape[0] if meta.shape else 1 for meta in tensors], dtype=np.int64)
        tensor = np.asarray(tensor, dtype=np.int64)
        zeros = np.zeros(len(tensor), dtype=np.int64)
        return cls(np.asarray(rank, dtype=np.int64), tensor, zeros, zeros, first[tensor])

    @classmethod
    def concatenate(cls, parts: Sequence[Shards]) -> Shards:
        """The rows of all `parts`, in order."""
        columns = zip(*((p.rank, p.tensor, p.dim, p.lo, p.hi) for p in parts), strict=True)
        return cls(*(np.concatenate(column).astype(np.int64) for column in columns))


@dataclass(frozen=True)
class TensorTable:
    names: Sequence[TensorMeta]
    shape: Ints  # [T, D], filled up with ones
    itemsize: Ints  # [T]

    @classmethod
    def of(cls, metas: Sequence[TensorMeta]) -> TensorTable:
        if any(meta.adapts is not None for meta in metas):
            raise ValueError("adapters do not travel by a plan of shards; merge them into their weights")
        width = max((len(meta.shape) for meta in metas), default=0) or 1
        shape = np.array([(*m.shape, *(1,) * (width - len(m.shape))) for m in metas], dtype=np.int64)
        sizes = {meta.dtype: meta.torch_dtype.itemsize for meta in {m.dtype: m for m in metas}.values()}
        itemsize = np.array([sizes[meta.dtype] for meta in metas], dtype=np.int64)
        return cls(metas, shape.reshape(len(metas), width), itemsize)

    def checked(self, shards: Shards, what: str) -> Shards:
        """The rows, those of whole tensors with dimension 0. ValueError for parts outside their tensor."""
        bad_tensor = (shards.tensor < 0) | (shards.tensor >= len(self.names))
        if bad_tensor.any():
            raise ValueError(f"tensor number {shards.tensor[bad_tensor][0]} is {what}; there are {len(self.names)}")
        if ((shards.dim < 0) | (shards.dim >= self.shape.shape[1])).any():
            raise ValueError(f"a part is {what} of a dimension that no tensor has")
        full = self.shape[shards.tensor, shards.dim]
        bad = (shards.lo < 0) | (shards.lo > shards.hi) | (shards.hi > full)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{self.names[shards.tensor[row]].name}: {shards.lo[row]} to {shards.hi[row]} of dimension "
                f"{shards.dim[row]} is {what}, which has {full[row]}"
            )
        is_whole = (shards.lo == 0) & (shards.hi == full)
        first = self.shape[shards.tensor, 0]
        return Shards(
            shards.rank,
            shards.tensor,
            np.where(is_whole, 0, shards.dim),
            shards.lo,
            np.where(is_whole, first, shards.hi),
        )

    def offsets_of(self, shards: Shards) -> Ints:
        """[N, D]: first index of each part."""
        offsets = np.zeros((len(shards.tensor), self.shape.shape[1]), dtype=np.int64)
        offsets[np.arange(len(shards.tensor)), shards.dim] = shards.lo
        return offsets

    def shapes_of(self, shards: Shards) -> Ints:
        """[N, D]: shape of each part."""
        shape = self.shape[shards.tensor].copy()
        shape[np.arange(len(shards.tensor)), shards.dim] = shards.hi - shards.lo
        return shape

    def strides_of(self, shards: Shards) -> Ints:
        """[N, D]: strides of each part when it is contiguous."""
        shape = self.shapes_of(shards)
        ones = np.ones((len(shape), 1), dtype=np.int64)
        return np.concatenate([np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1], ones], axis=1)


@dataclass(frozen=True)
class HeldBoxes:
    """The distinct parts, by tensor (`of_tensor[t]` to `of_tensor[t + 1]`), and the sets of ranks that hold them."""

    origin: Ints  # [B, D]
    end: Ints  # [B, D]
    of_tensor: Ints  # [T + 1]
    set_of: Ints  # [B]
    sets: list[Ints]  # ranks, ascending

    @classmethod
    def of(cls, table: TensorTable, sources: Shards) -> HeldBoxes:
        refuse_repeats(table, sources, "holds")
        order = np.lexsort((sources.rank, sources.hi, sources.lo, sources.dim, sources.tensor))
        rows = take_rows(sources, order)
        starts = run_starts(rows.tensor, rows.dim, rows.lo, rows.hi)
        parts = take_rows(rows, starts)
        counts = np.bincount(parts.tensor, minlength=len(table.names))
        of_tensor = np.append(0, np.cumsum(counts))
        _check_tiling(table, parts)
        holders = np.zeros((len(starts), int(rows.rank.max(initial=0)) + 1), dtype=bool)
        holders[np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(order)))), rows.rank] = True
        packed = np.packbits(holders, axis=1)
        keys = np.ascontiguousarray(packed).view(np.dtype((np.void, packed.shape[1]))).reshape(-1)
        _, example, set_of = np.unique(keys, return_index=True, return_inverse=True)
        sets = [np.flatnonzero(holders[index]) for index in example.tolist()]
        origin = table.offsets_of(parts)
        return cls(origin, origin + table.shapes_of(parts), of_tensor, set_of.reshape(-1), sets)


def refuse_repeats(table: TensorTable, shards: Shards, verb: str) -> None:
    """ValueError when a rank has two parts of a tensor."""
    order = np.lexsort((shards.tensor, shards.rank))
    rank, tensor = shards.rank[order], shards.tensor[order]
    twice = np.flatnonzero((rank[1:] == rank[:-1]) & (tensor[1:] == tensor[:-1]))
    if len(twice):
        row = int(twice[0])
        raise ValueError(f"rank {rank[row]} {verb} two parts of {table.names[tensor[row]].name}; one is possible")


def _check_tiling(table: TensorTable, parts: Shards) -> None:
    """`parts` are distinct and sorted: those of a tensor must follow one another from its begin to its end."""
    same = parts.tensor[1:] == parts.tensor[:-1]
    full = table.shape[parts.tensor, parts.dim]
    begins, ends = np.append(True, ~same)[: len(parts.tensor)], np.append(~same, True)[: len(parts.tensor)]
    follows = (parts.dim[1:] == parts.dim[:-1]) & (parts.lo[1:] == parts.hi[:-1])
    bad = (begins & (parts.lo != 0)) | (ends & (parts.hi != full))
    bad[1:] |= same & ~follows
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        of_same = np.flatnonzero(parts.tensor == parts.tensor[row])
        listed = ", ".join(f"{parts.lo[i]} to {parts.hi[i]} of dimension {parts.dim[i]}" for i in of_same[:8].tolist())
        raise ValueError(
            f"{table.names[parts.tensor[row]].name} {list(table.names[parts.tensor[row]].shape)}: the parts that ranks "
            f"hold do not follow one another from its begin to its end: {listed}"
        )


# -- arrays


def take_rows(shards: Shards, rows: Ints) -> Shards:
    return Shards(shards.rank[rows], shards.tensor[rows], shards.dim[rows], shards.lo[rows], shards.hi[rows])


def run_starts(*columns: Ints) -> Ints:
    """First rows of runs of equal rows."""
    if len(columns[0]) == 0:
        return np.empty(0, dtype=np.int64)
    changes = np.zeros(len(columns[0]) - 1, dtype=bool)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return np.append(0, np.flatnonzero(changes) + 1)


def sums_by(key: Ints, values: Ints, size: int) -> Ints:
    """Sum of `values` by `key`, in integers."""
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, key, values)
    return sums


def round_up(nbytes: Ints, alignment: int) -> Ints:
    return -(-nbytes // alignment) * alignment

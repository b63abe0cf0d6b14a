"""Where a rank's part of a Megatron tensor lies in the Hugging Face tensors that it is made of.

    linear_fc1.weight of rank 1 of 2  =  rows I/2..I of gate_proj.weight, then rows I/2..I of up_proj.weight

A layout lists such pieces. Cutting copies them one way, joining the other way, so each undoes the other to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ShardPlace:
    """Where a rank stands in what cuts single tensors: tensor, expert and expert tensor parallelism."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class Piece:
    """`start` to `stop` of dimension `dim` of Hugging Face tensor number `source`; it lies at `at` of a shard."""

    source: int
    dim: int
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """How far it reaches along `dim`."""
        return self.stop - self.start


class Layout(ABC):
    """How `size` ranks share a Megatron tensor, as a function of the shapes of its Hugging Face tensors."""

    dim = 0

    @abstractmethod
    def pieces(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Piece]:
        """What rank `rank` holds, in the order of its shard."""

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        """Shape of every rank's shard. ValueError when the tensor cannot be cut evenly."""
        whole = sum(shape[self.dim] for shape in shapes)
        return _with_dim(shapes[0], self.dim, _even_share(whole, size))


class Replicated(Layout):
    """Every rank holds the whole of one tensor."""

    def pieces(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Piece]:
        """One piece, whatever the rank."""
        return [Piece(0, 0, 0, shapes[0][0], 0)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        """That of the tensor."""
        return shapes[0]


class Column(Layout):
    """A column parallel linear layer: its output features, rows of the weight, are shared out.

    With several tensors (the gate and up projections of an MLP) a rank holds its rows of the first, then of the next.
    """

    def pieces(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Piece]:
        """One per tensor."""
        pieces, at = [], 0
        for source, shape in enumerate(shapes):
            rows = _even_share(shape[0], size)
            pieces.append(Piece(source, 0, rank * rows, (rank + 1) * rows, at))
            at += rows
        return pieces


class Row(Layout):
    """A row parallel linear layer: its input features, columns of the weight, are shared out."""

    dim = 1

    def pieces(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Piece]:
        """One."""
        columns = _even_share(shapes[0][1], size)
        return [Piece(0, 1, rank * columns, (rank + 1) * columns, 0)]


class Vocabulary(Layout):
    """Rows are tokens, shared out after padding with zeros to a multiple of the ranks (`padded_vocabulary`)."""

    def pieces(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Piece]:
        """One."""
        vocabulary = shapes[0][0]
        rows = padded_vocabulary(vocabulary, size) // size
        return [Piece(0, 0, rank * rows, min((rank + 1) * rows, vocabulary), 0)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        """[padded vocabulary / size, H]."""
        return _with_dim(shapes[0], 0, padded_vocabulary(shapes[0][0], size) // size)


@dataclass(frozen=True)
class QueryGroups(Layout):
    """Query, key and value projections as Megatron keeps them: per group its query heads, its key, its value head.

    The rows of a rank are a stretch of that order even where there are more ranks than groups (Megatron then gathers
    the projections).
    """

    heads: int
    groups: int
    head_dim: int

    def pieces(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Piece]:
        """Three per group that the rank's rows touch."""
        rows = self.shard_shape(shapes, size)[0]
        first, last = rank * rows, (rank + 1) * rows
        pieces, offset = [], 0
        for source, start, stop in self._in_order():
            low, high = max(first, offset), min(last, offset + stop - start)
            if low < high:
                pieces.append(Piece(source, 0, start + low - offset, start + high - offset, low - first))
            offset += stop - start
        return pieces

    def _in_order(self) -> Iterator[tuple[int, int, int]]:
        queries = self.heads // self.groups * self.head_dim
        for group in range(self.groups):
            yield 0, group * queries, (group + 1) * queries
            for source in (1, 2):
                yield source, group * self.head_dim, (group + 1) * self.head_dim


def padded_vocabulary(vocabulary: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that holds `vocabulary` tokens.

    Raises:
        ValueError: all rows of the last rank would be padding, which only happens below tp_size squared tokens.
    """
    rows = -(-vocabulary // tp_size)
    if rows * (tp_size - 1) >= vocabulary:
        raise ValueError(
            f"a vocabulary of {vocabulary} tokens leaves the last of {tp_size} tensor-parallel ranks none; lower "
            "policy.megatron_cfg.tensor_model_parallel_size"
        )
    return rows * tp_size


def _even_share(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} rows or columns cannot be shared by {size} ranks evenly")
    return length // size


def _with_dim(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])

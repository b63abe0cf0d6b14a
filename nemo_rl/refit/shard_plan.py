"""Plans which bytes of which rank's shards travel where, so that every receiver gets the tensors it wants.

Sources hold shards: a tensor is split along one dimension, and each shard is held by one rank or by several (replicas).
Different tensors may be split differently or live on few ranks only (experts, pipeline stages). Receivers want whole
tensors, in an order of their own, in the buckets of a `PackLayout`. A source sends at most one message per bucket.

    plan = build_plan(metas, sources, wants, nodes=nodes, bucket_bytes=...)   # once, equal on every rank
    local = plan.for_rank(rank)                                               # this rank's messages

Everything that grows with the number of tensors is done on numpy arrays, all int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from nemo_rl.refit.layout import PackLayout, TensorMeta

TRAILER_BYTES = 16  # at the end of a message: the fingerprint of the rest, and room to stay aligned
_MOVE_ALIGNMENT = 16

Ints = np.ndarray  # int64
Slice = tuple[Sequence[int], Sequence[int]]  # first index, end


class Shards(NamedTuple):
    """Shards and who holds them: row i is lo[i] to hi[i] of dimension dim[i] of tensor[i], on rank[i].

    All columns are int64 [N]; `tensor` numbers the list of tensors, `rank` the members of the group. A scalar counts as
    one row with one element.
    """

    rank: Ints
    tensor: Ints
    dim: Ints
    lo: Ints
    hi: Ints


# -- the plan


class Move(NamedTuple):
    """A slice of a tensor to copy from a shard to a bucket.

    It begins at `local` (index per dimension) of the source's shard and has `size` elements per dimension. In its
    message it is contiguous from byte `at`. In the receiver's bucket its first element is at byte `offset`, and
    `strides` (in elements) describe the receiver's tensor.
    """

    tensor: int
    local: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    offset: int
    strides: tuple[int, ...]


class Message(NamedTuple):
    """The message of one source to one receiver for one bucket: `nbytes` with the trailer, and its slices."""

    peer: int
    nbytes: int
    moves: tuple[Move, ...]


class Round(NamedTuple):
    """One rank's part in an exchange between all ranks. `sends` and `receives` are in order of peers."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class LocalShardPlan:
    """One rank's part: `rounds[bucket]`, and the moves within the rank, which need no message.

    `layout` places the tensors in the rank's buckets. Ranks with fewer buckets than others take part in the exchanges
    of the later buckets too.
    """

    tensors: tuple[TensorMeta, ...]
    rank: int
    world_size: int
    layout: PackLayout
    rounds: tuple[tuple[Round, ...], ...]
    within: tuple[tuple[Move, ...], ...]

    @property
    def send_bytes(self) -> int:
        """Maximum number of bytes that leave this rank in one exchange."""
        return max((sum(m.nbytes for m in one.sends) for bucket in self.rounds for one in bucket), default=0)

    @property
    def receive_bytes(self) -> int:
        """Maximum number of bytes that reach this rank in one exchange."""
        return max((sum(m.nbytes for m in one.receives) for bucket in self.rounds for one in bucket), default=0)


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The whole plan: messages, ordered by bucket, round, source and receiver, and the moves in them.

    What stays within a rank has a message too, of 0 bytes.
    """

    tensors: tuple[TensorMeta, ...]
    layouts: tuple[PackLayout, ...]  # of each rank's buckets; empty if it receives nothing
    num_rounds: Ints  # of each bucket
    bucket: Ints  # of each message, like the following
    round: Ints
    source: Ints
    receiver: Ints
    nbytes: Ints
    first: Ints  # message m has the moves first[m] to first[m + 1], in the order of the receiver's bucket
    tensor: Ints  # of each move, like the following
    local: Ints  # [moves, dimensions]
    size: Ints  # [moves, dimensions]
    at: Ints
    offset: Ints
    strides: Ints  # [moves, dimensions]

    @property
    def world_size(self) -> int:
        """Number of members of the group."""
        return len(self.layouts)

    def for_rank(self, rank: int) -> LocalShardPlan:
        """The messages that `rank` sends and receives, and its copies within itself."""
        rounds: list[list[tuple[list[Message], list[Message]]]]
        rounds = [[([], []) for _ in range(count)] for count in self.num_rounds.tolist()]
        within: list[tuple[Move, ...]] = [() for _ in rounds]
        for index in np.flatnonzero((self.source == rank) | (self.receiver == rank)).tolist():
            bucket, number = int(self.bucket[index]), int(self.round[index])
            source, receiver = int(self.source[index]), int(self.receiver[index])
            moves = self._moves(int(self.first[index]), int(self.first[index + 1]))
            if source == receiver:
                within[bucket] = moves
            else:
                sends, receives = rounds[bucket][number]
                peer, messages = (receiver, sends) if source == rank else (source, receives)
                messages.append(Message(peer, int(self.nbytes[index]), moves))
        fixed = tuple(tuple(Round(tuple(sends), tuple(into)) for sends, into in bucket) for bucket in rounds)
        return LocalShardPlan(self.tensors, rank, self.world_size, self.layouts[rank], fixed, tuple(within))

    def _moves(self, first: int, stop: int) -> tuple[Move, ...]:
        rows = slice(first, stop)
        columns = (self.tensor, self.local, self.size, self.at, self.offset, self.strides)
        moves = []
        for tensor, local, size, at, offset, strides in zip(*(c[rows].tolist() for c in columns), strict=True):
            dims = slice(len(self.tensors[tensor].shape))  # arrays have the columns of the tensor with most dimensions
            moves.append(Move(tensor, tuple(local[dims]), tuple(size[dims]), at, offset, tuple(strides[dims])))
        return tuple(moves)


def build_plan(
    tensors: Sequence[TensorMeta],
    sources: Shards,
    wants: Mapping[int, Sequence[int]],
    *,
    nodes: Sequence[int],
    bucket_bytes: int,
) -> ShardPlan:
    """The plan. The same arguments give the same plan on every rank.

    `wants[rank]`: numbers of the tensors that a receiver wants, in the order of its buckets. `nodes[rank]` is the node
    of each member of the group. Among replicas, a receiver prefers itself, then ranks on its node, then the rank that
    has least to send. It takes all shards with the same set of holders from one of them, so that the choice adds no
    messages. A bucket of all receivers is sent in one round, or in several if the messages of a source would otherwise
    need more memory than two buckets.

    Raises:
        ValueError: the shards of a tensor do not tile it, ranks split it differently, or a rank holds two shards of it.
    """
    table = _TensorTable.of(tensors)
    held = _HeldShards.of(table, sources)
    lists = [tuple(wants.get(rank, ())) for rank in range(len(nodes))]
    # Receivers often want the same tensors: each distinct list is placed once.
    placed = {w: PackLayout.build([tensors[number] for number in w], bucket_bytes) for w in set(lists)}
    layouts = tuple(placed[wanted] for wanted in lists)
    units = _units(table, layouts, wants)
    pairs = _intersect(table, held, units)
    receiver = units.receiver[pairs.unit]
    chosen = _choose_sources(held, pairs, receiver, np.asarray(nodes, dtype=np.int64))
    messages, rows = _group(pairs, units, chosen, receiver, world=len(nodes), limit=2 * layouts[0].bucket_bytes)
    pairs = _Pairs(*(column[rows] for column in pairs))
    tensor = units.tensor[pairs.unit]
    strides = table.strides[tensor]
    return ShardPlan(
        **messages,
        tensors=tuple(tensors),
        layouts=layouts,
        tensor=tensor,
        local=pairs.lo - held.origin[pairs.shard],
        size=pairs.hi - pairs.lo,
        strides=strides,
        offset=units.base[pairs.unit] + (pairs.lo * strides).sum(axis=1) * table.itemsize[tensor],
    )


# -- tables of tensors and of the shards that ranks hold


class _TensorTable(NamedTuple):
    metas: Sequence[TensorMeta]
    shape: Ints  # [T, D], padded with ones
    strides: Ints  # [T, D], of contiguous tensors
    itemsize: Ints  # [T]

    @classmethod
    def of(cls, metas: Sequence[TensorMeta]) -> _TensorTable:
        width = max((len(meta.shape) for meta in metas), default=0) or 1
        shape = np.array([(*m.shape, *(1,) * (width - len(m.shape))) for m in metas], dtype=np.int64)
        shape = shape.reshape(len(metas), width)
        ones = np.ones((len(metas), 1), dtype=np.int64)
        strides = np.concatenate([np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1], ones], axis=1)
        return cls(metas, shape, strides, np.array([meta.torch_dtype.itemsize for meta in metas], dtype=np.int64))


class _HeldShards(NamedTuple):
    """The S distinct shards, by tensor (`of_tensor[t]` to `of_tensor[t + 1]`), and the sets of ranks that hold them."""

    origin: Ints  # [S, D]
    end: Ints  # [S, D]
    of_tensor: Ints  # [T + 1]
    set_of: Ints  # [S]
    sets: list[Ints]  # ranks, ascending

    @classmethod
    def of(cls, table: _TensorTable, sources: Shards) -> _HeldShards:
        keys, counts = np.unique(sources.rank * len(table.metas) + sources.tensor, return_counts=True)
        for key in keys[counts > 1].tolist():
            rank, tensor = divmod(key, len(table.metas))
            raise ValueError(f"rank {rank} holds two shards of {table.metas[tensor].name}; one is possible")
        # A whole tensor counts as cut along dimension 0, however its holder describes it.
        is_whole = (sources.lo == 0) & (sources.hi == table.shape[sources.tensor, sources.dim])
        whole_hi = np.where(is_whole, table.shape[sources.tensor, 0], sources.hi)
        sources = sources._replace(dim=np.where(is_whole, 0, sources.dim), hi=whole_hi)
        order = np.lexsort((sources.rank, sources.hi, sources.lo, sources.dim, sources.tensor))
        rows = Shards(*(column[order] for column in sources))
        starts = _run_starts(rows.tensor, rows.dim, rows.lo, rows.hi)
        parts = Shards(*(column[starts] for column in rows))
        _check_tiling(table, parts)
        of_tensor = np.append(0, np.cumsum(np.bincount(parts.tensor, minlength=len(table.metas))))
        ranks, bounds = rows.rank.tolist(), [*starts.tolist(), len(order)]
        holders = [tuple(ranks[first:stop]) for first, stop in pairwise(bounds)]
        numbers = {ranks: number for number, ranks in enumerate(dict.fromkeys(holders))}
        set_of = np.array([numbers[ranks] for ranks in holders], dtype=np.int64)
        each, end = np.arange(len(starts)), table.shape[parts.tensor]
        origin = np.zeros_like(end)
        origin[each, parts.dim], end[each, parts.dim] = parts.lo, parts.hi
        return cls(origin, end, of_tensor, set_of, [np.array(ranks, dtype=np.int64) for ranks in numbers])


def _check_tiling(table: _TensorTable, parts: Shards) -> None:
    """`parts` are distinct and sorted: the parts of a tensor must cover it from begin to end without gaps."""
    begins = np.diff(parts.tensor, prepend=-1) != 0
    ends = np.append(begins[1:], True)[: len(begins)]
    bad = parts.lo != np.where(begins, 0, np.roll(parts.hi, 1))
    bad |= ~begins & (parts.dim != np.roll(parts.dim, 1))
    bad |= ends & (parts.hi != table.shape[parts.tensor, parts.dim])
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        of_same = np.flatnonzero(parts.tensor == parts.tensor[row])
        listed = ", ".join(f"{parts.lo[i]} to {parts.hi[i]} of dimension {parts.dim[i]}" for i in of_same[:8].tolist())
        raise ValueError(
            f"{table.metas[parts.tensor[row]].name} {list(table.metas[parts.tensor[row]].shape)}: the shards of the "
            f"ranks do not tile it from begin to end: {listed}"
        )


# -- the slices that receivers want, by bucket


class _Units(NamedTuple):
    """Slices of wanted tensors that lie in one bucket: nearly always the whole tensor.

    Element x of the tensor is at byte `base` + (flat index of x) x itemsize of the bucket.
    """

    receiver: Ints
    tensor: Ints
    bucket: Ints
    base: Ints
    lo: Ints  # [U, D]
    hi: Ints


def _units(table: _TensorTable, layouts: Sequence[PackLayout], wants: Mapping[int, Sequence[int]]) -> _Units:
    """The units of all receivers, in the order of their buckets."""
    shapes, itemsizes, width = table.shape.tolist(), table.itemsize.tolist(), table.shape.shape[1]
    known: dict[int, list[list[int]]] = {}  # by layout, which receivers share
    columns: list[Ints] = []
    for receiver, numbers in wants.items():
        layout = layouts[receiver]
        if id(layout) not in known:
            rows = known[id(layout)] = []
            for bucket, piece in ((bucket, piece) for bucket, pieces in enumerate(layout.buckets) for piece in pieces):
                tensor = int(numbers[piece.tensor])
                first, stop = piece.start // itemsizes[tensor], (piece.start + piece.nbytes) // itemsizes[tensor]
                for lo, hi in slices_of_range(shapes[tensor], first, stop):
                    rows.append([tensor, bucket, piece.offset - piece.start, *lo, *hi])
        units = np.array(known[id(layout)], dtype=np.int64).reshape(-1, 3 + 2 * width)
        columns.append(np.insert(units, 0, receiver, axis=1))
    table_of = np.concatenate(columns)
    return _Units(*table_of[:, :4].T, lo=table_of[:, 4 : 4 + width], hi=table_of[:, 4 + width :])


def slices_of_range(shape: Sequence[int], start: int, stop: int) -> list[Slice]:
    """Elements `start` to `stop` of a contiguous tensor as slices, in order: at most 2 len(shape) - 1."""
    if start >= stop:
        return []
    if stop - start == prod(shape):
        return [([0] * len(shape), shape)]
    if len(shape) == 1:
        return [([start], [stop])]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return [([last, *lo], [last + 1, *hi]) for lo, hi in slices_of_range(shape[1:], start % row, stop - last * row)]
    head = slices_of_range(shape[1:], start % row, row) if start % row else []
    tail = slices_of_range(shape[1:], 0, stop % row)
    slices: list[Slice] = [([first - 1, *lo], [first, *hi]) for lo, hi in head]
    if first < last:
        slices.append(([first, *(0 for _ in shape[1:])], [last, *shape[1:]]))
    return slices + [([last, *lo], [last + 1, *hi]) for lo, hi in tail]


# -- which source sends which slice, in which message


class _Pairs(NamedTuple):
    """Intersections of units with held shards."""

    unit: Ints
    shard: Ints
    lo: Ints  # [P, D]
    hi: Ints
    nbytes: Ints


def _intersect(table: _TensorTable, held: _HeldShards, units: _Units) -> _Pairs:
    tensor = units.tensor
    counts = held.of_tensor[tensor + 1] - held.of_tensor[tensor]
    assert (counts > 0).all(), "no rank holds a wanted tensor"
    unit = np.repeat(np.arange(len(tensor)), counts)
    within = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    shard = np.repeat(held.of_tensor[tensor], counts) + within
    lo, hi = np.maximum(units.lo[unit], held.origin[shard]), np.minimum(units.hi[unit], held.end[shard])
    found = np.flatnonzero((lo < hi).all(axis=1))
    unit, shard, lo, hi = unit[found], shard[found], lo[found], hi[found]
    return _Pairs(unit, shard, lo, hi, (hi - lo).prod(axis=1) * table.itemsize[tensor[unit]])


def _choose_sources(held: _HeldShards, pairs: _Pairs, receiver: Ints, nodes: Ints) -> Ints:
    """The source of each pair. One Python step per receiver and set of replicas, of which a layout has few."""
    num_sets = len(held.sets)
    wanted = receiver * num_sets + held.set_of[pairs.shard]
    # Sums in float64 are exact up to 2^53 bytes.
    nbytes = np.bincount(wanted, pairs.nbytes, minlength=len(nodes) * num_sets).astype(np.int64)
    keys = np.flatnonzero(nbytes)
    single = np.array([len(ranks) == 1 for ranks in held.sets], dtype=bool)[keys % num_sets]
    keys = keys[np.lexsort((keys, -nbytes[keys], ~single))]
    # Replicas share the load: the largest parts first, each to the candidate with least to send, as in list scheduling.
    load, choice = np.zeros(len(nodes), dtype=np.int64), np.full(len(nodes) * num_sets, -1, dtype=np.int64)
    for key in keys.tolist():
        to, ranks = key // num_sets, held.sets[key % num_sets]
        if to in ranks:
            choice[key] = to
            continue
        near = ranks[nodes[ranks] == nodes[to]]
        candidates = near if len(near) else ranks
        choice[key] = candidates[np.argmin(load[candidates])]
        load[choice[key]] += nbytes[key]
    return choice[wanted]


def _group(
    pairs: _Pairs, units: _Units, source: Ints, receiver: Ints, *, world: int, limit: int
) -> tuple[dict[str, Ints], Ints]:
    """One message for everything that `source[pair]` sends `receiver[pair]` for one bucket.

    Returns the columns of messages in a `ShardPlan`, and the rows of `pairs` in the order of the messages.
    """
    bucket = units.bucket[pairs.unit]
    order = np.lexsort((pairs.unit, receiver, source, bucket))
    bucket, source, receiver = bucket[order], source[order], receiver[order]
    starts = _run_starts(bucket, source, receiver)
    first = np.append(starts, len(bucket))
    aligned = -(-pairs.nbytes[order] // _MOVE_ALIGNMENT) * _MOVE_ALIGNMENT
    before = np.cumsum(aligned) - aligned
    at = before - np.repeat(before[starts], np.diff(first))
    bucket, source, receiver = bucket[starts], source[starts], receiver[starts]
    nbytes = np.where(source != receiver, np.add.reduceat(aligned, starts) + TRAILER_BYTES, 0)
    num_buckets = int(units.bucket.max(initial=0)) + 1
    number, num_rounds = _rounds(bucket, source, receiver, nbytes, num_buckets, world, limit)
    again = np.lexsort((receiver, source, number, bucket))
    counts = np.diff(first)[again]
    rows = np.repeat(first[:-1][again] - (np.cumsum(counts) - counts), counts) + np.arange(len(order))
    by_message = {"bucket": bucket, "round": number, "source": source, "receiver": receiver, "nbytes": nbytes}
    messages = {name: column[again] for name, column in by_message.items()}
    messages |= {"first": np.append(0, np.cumsum(counts)), "at": at[rows], "num_rounds": num_rounds}
    return messages, order[rows]


def _rounds(
    bucket: Ints, source: Ints, receiver: Ints, nbytes: Ints, num_buckets: int, world: int, limit: int
) -> tuple[Ints, Ints]:
    """The round of each message, and the number of rounds of each bucket. All messages of a receiver's bucket share a
    round."""
    number, num_rounds = np.zeros(len(bucket), dtype=np.int64), np.ones(num_buckets, dtype=np.int64)
    order = np.lexsort((receiver, bucket))
    starts = _run_starts(bucket[order], receiver[order])
    loads, current = np.zeros((1, world), dtype=np.int64), -1
    for begin, end in zip(starts.tolist(), np.append(starts[1:], len(order)).tolist(), strict=True):
        rows = order[begin:end]
        if bucket[rows[0]] != current:
            current = int(bucket[rows[0]])
            loads = np.zeros((1, world), dtype=np.int64)
        after = loads[:, source[rows]] + nbytes[rows]
        # The first round with room, else a new one. An empty round takes a bucket even if the limit is below it.
        free = np.flatnonzero((after <= limit).all(axis=1) | ~loads.any(axis=1))
        if len(free) == 0:
            loads = np.concatenate([loads, np.zeros((1, world), dtype=np.int64)])
        number[rows] = chosen = int(free[0]) if len(free) else len(loads) - 1
        loads[chosen, source[rows]] += nbytes[rows]
        num_rounds[current] = len(loads)
    return number, num_rounds


# -- arrays


def _run_starts(*columns: Ints) -> Ints:
    """First rows of runs of equal rows."""
    changes = (np.diff(np.stack(columns), axis=1) != 0).any(axis=0)
    return np.flatnonzero(np.append(True, changes)[: len(columns[0])])

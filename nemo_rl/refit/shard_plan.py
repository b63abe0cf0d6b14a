"""Which bytes of which rank's shards go where, when every receiver takes its own part of a model and nothing else.

Sources hold shards: a tensor is cut on one dimension into parts, each held by one rank or by several (replicas), and
different tensors may be cut differently or live on few ranks only (experts, pipeline stages). Receivers want tensors
or slices of them, in an order of their own. Each receiver's tensors lie in buckets as `PackLayout` puts them; for every
bucket a source sends it one message or none.

    plan = build_plan(metas, sources, wants, nodes=nodes, bucket_bytes=...)   # once, equal on every rank
    mine = plan.for_rank(rank)                                                # what this rank sends and receives

A bucket of all receivers is moved in one round, or in several where a source would otherwise need more memory than
`send_bytes` for what it sends. Everything that grows with the number of tensors is done on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nemo_rl.refit.layout import ALIGNMENT, PackLayout, TensorMeta

# -- Tables of which rank has which part of which tensor, as arrays with a row per part.

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


TRAILER_BYTES = 16  # at the end of a message: the fingerprint of what comes before, and room to stay aligned
_MOVE_ALIGNMENT = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a tensor on its way.

    It begins at `local` (index per dimension) of the source's shard and has `size` elements per dimension. In its
    message it lies contiguous from byte `at`; in the receiver's bucket its first element is at byte `offset`, and
    `strides` (in elements) are those of the receiver's tensor.
    """

    tensor: int
    local: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one source sends one receiver for one bucket: `nbytes` with the trailer, and the boxes in it."""

    peer: int
    nbytes: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange between all ranks, as one of them takes part in it. `sends` and `receives` in order of peers."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class RankPlan:
    """A rank's part: `rounds[bucket]` and the moves within the rank, which need no message.

    `layout` says where everything lies in the rank's buckets. Ranks with fewer buckets than others take part in the
    exchanges of the later ones too.
    """

    tensors: tuple[TensorMeta, ...]
    rank: int
    world_size: int
    layout: PackLayout
    rounds: tuple[tuple[Round, ...], ...]
    within: tuple[tuple[Move, ...], ...]

    @property
    def send_bytes(self) -> int:
        """The most that leaves this rank in one exchange."""
        return max((sum(m.nbytes for m in one.sends) for bucket in self.rounds for one in bucket), default=0)

    @property
    def receive_bytes(self) -> int:
        """The most that reaches this rank in one exchange."""
        return max((sum(m.nbytes for m in one.receives) for bucket in self.rounds for one in bucket), default=0)


@dataclass(frozen=True)
class ShardPlan:
    """The whole plan. Message m has the moves `first[m]` to `first[m + 1]`, in the order of the receiver's bucket.

    Messages are ordered by bucket, round, source and receiver; those within a rank have a row too, and no bytes.
    """

    tensors: tuple[TensorMeta, ...]
    wants: Shards
    bucket_bytes: int
    world_size: int
    num_rounds: Ints  # [buckets]
    bucket: Ints  # of each message, like the next four
    round: Ints
    source: Ints
    receiver: Ints
    nbytes: Ints
    first: Ints
    tensor: Ints  # of each move, like the next six
    local: Ints  # [moves, dimensions]
    size: Ints  # [moves, dimensions]
    strides: Ints  # [moves, dimensions]
    at: Ints
    offset: Ints
    payload: Ints

    @cached_property
    def _between(self) -> Ints:
        """Messages that leave their rank."""
        return np.flatnonzero(self.source != self.receiver)

    def messages_per_bucket(self) -> Ints:
        """[ranks, buckets]: how many messages each receiver gets for each of its buckets."""
        key = self.receiver[self._between] * len(self.num_rounds) + self.bucket[self._between]
        counts = np.bincount(key, minlength=self.world_size * len(self.num_rounds))
        return counts.reshape(self.world_size, len(self.num_rounds))

    def received_bytes(self) -> Ints:
        """[ranks]: bytes of weights that each receiver's buckets are filled with, from itself included."""
        of_message = np.repeat(self.receiver, np.diff(self.first))
        return sums_by(of_message, self.payload, self.world_size)

    def transferred_bytes(self) -> Ints:
        """[ranks, ranks]: bytes in messages from source to receiver, with trailers and alignment."""
        key = self.source * self.world_size + self.receiver
        return sums_by(key, self.nbytes, self.world_size**2).reshape(self.world_size, self.world_size)

    def peak_send_bytes(self) -> int:
        """The most that one rank sends in one exchange."""
        rounds = int(self.num_rounds.max(initial=1))
        key = (self.bucket * rounds + self.round) * self.world_size + self.source
        return int(sums_by(key, self.nbytes, len(self.num_rounds) * rounds * self.world_size).max(initial=0))

    def layout(self, rank: int) -> PackLayout:
        """Where everything lies in the buckets of `rank`; shapes are those of the slices it wants."""
        metas = []
        for row in np.flatnonzero(self.wants.rank == rank).tolist():
            meta, dim = self.tensors[self.wants.tensor[row]], int(self.wants.dim[row])
            shape = list(meta.shape)
            if shape:
                shape[dim] = int(self.wants.hi[row] - self.wants.lo[row])
            metas.append(TensorMeta(meta.name, meta.dtype, tuple(shape)))
        return PackLayout.build(metas, self.bucket_bytes)

    def for_rank(self, rank: int) -> RankPlan:
        """What `rank` sends, receives, and moves within itself."""
        sends: list[list[list[Message]]] = [[[] for _ in range(count)] for count in self.num_rounds.tolist()]
        receives: list[list[list[Message]]] = [[[] for _ in range(count)] for count in self.num_rounds.tolist()]
        within: list[tuple[Move, ...]] = [() for _ in sends]
        for index in np.flatnonzero((self.source == rank) | (self.receiver == rank)).tolist():
            bucket, number = int(self.bucket[index]), int(self.round[index])
            source, receiver = int(self.source[index]), int(self.receiver[index])
            moves = self._moves(int(self.first[index]), int(self.first[index + 1]))
            if source == receiver:
                within[bucket] = moves
            elif source == rank:
                sends[bucket][number].append(Message(receiver, int(self.nbytes[index]), moves))
            else:
                receives[bucket][number].append(Message(source, int(self.nbytes[index]), moves))
        rounds = tuple(
            tuple(Round(tuple(out), tuple(into)) for out, into in zip(outs, intos, strict=True))
            for outs, intos in zip(sends, receives, strict=True)
        )
        return RankPlan(self.tensors, rank, self.world_size, self.layout(rank), rounds, tuple(within))

    def _moves(self, first: int, stop: int) -> tuple[Move, ...]:
        rows = slice(first, stop)
        columns = (self.tensor, self.local, self.size, self.at, self.offset, self.strides)
        moves = []
        for tensor, local, size, at, offset, strides in zip(*(c[rows].tolist() for c in columns), strict=True):
            rank = len(self.tensors[tensor].shape)  # arrays are as wide as the tensor with most dimensions
            moves.append(Move(tensor, tuple(local[:rank]), tuple(size[:rank]), at, offset, tuple(strides[:rank])))
        return tuple(moves)


def first_layer(rank: int, num_layers: int) -> int:
    """The layer with which a receiver's order should begin; those before it come last.

    Were all to begin with the first layer, the ranks of the first pipeline stage would send alone and the others wait.
    Multiples of the golden ratio, modulo 1, are spread evenly for any number of receivers and for any that follow one
    another, which often want from the same source.
    """
    return int(rank * _GOLDEN % 1 * num_layers)


def build_plan(
    tensors: Sequence[TensorMeta],
    sources: Shards,
    wants: Shards,
    *,
    nodes: Sequence[int],
    bucket_bytes: int,
    send_bytes: int | None = None,
) -> ShardPlan:
    """The plan; the same arguments give the same plan on every rank.

    `nodes[rank]` is the node of each member of the group. Of replicas a receiver takes itself, else one on its node,
    else any, and among these the one that has least to send; it takes all from one that the same ranks hold, so that
    a choice adds no messages. `send_bytes` limits what a rank sends in one exchange (None: two buckets).

    ValueError when the parts of a tensor do not tile it, when ranks cut it differently, when a wanted part does not
    exist, when a rank holds or wants two parts of a tensor, and for adapters, which are not sent this way.
    """
    table = TensorTable.of(tensors)
    boxes = HeldBoxes.of(table, table.checked(sources, "held"))
    wants = _ordered(table.checked(wants, "wanted"))
    refuse_repeats(table, wants, "wants")
    capacity = -(-bucket_bytes // ALIGNMENT) * ALIGNMENT
    units = _place(table, wants, capacity)
    pairs = _intersect(table, boxes, wants, units)
    receiver = wants.rank[units.want[pairs.unit]]
    chosen = _choose(boxes, pairs, receiver, np.asarray(nodes, dtype=np.int64))
    limit = 2 * capacity if send_bytes is None else send_bytes
    sent = _messages(pairs, units, chosen, receiver, world=len(nodes), limit=limit)
    pairs = pairs.take(sent.rows)
    unit, want = pairs.unit, units.want[pairs.unit]
    strides = table.strides_of(wants)[want]
    relative = pairs.lo - table.offsets_of(wants)[want]
    return ShardPlan(
        tensors=tuple(tensors),
        wants=wants,
        bucket_bytes=bucket_bytes,
        world_size=len(nodes),
        num_rounds=sent.num_rounds,
        bucket=sent.bucket,
        round=sent.round,
        source=sent.source,
        receiver=sent.receiver,
        nbytes=sent.nbytes,
        first=sent.first,
        tensor=wants.tensor[want],
        local=pairs.lo - boxes.origin[pairs.box],
        size=pairs.hi - pairs.lo,
        strides=strides,
        at=sent.at,
        offset=units.base[unit] + (relative * strides).sum(axis=1) * table.itemsize[wants.tensor[want]],
        payload=pairs.nbytes,
    )


# -- which messages carry what


@dataclass(frozen=True)
class _Messages:
    """Messages in the order in which they are sent; message m carries the pairs rows[first[m] : first[m + 1]]."""

    bucket: Ints
    round: Ints
    source: Ints
    receiver: Ints
    nbytes: Ints  # 0 within a rank
    first: Ints
    rows: Ints
    at: Ints  # of each row: where its bytes begin in the message
    num_rounds: Ints  # of each bucket


def _messages(pairs: _Pairs, units: _Units, source: Ints, receiver: Ints, *, world: int, limit: int) -> _Messages:
    """All that goes from `source[pair]` to `receiver[pair]` for one bucket is one message."""
    bucket = units.bucket[pairs.unit]
    order = np.lexsort((pairs.unit, receiver, source, bucket))
    bucket, source, receiver = bucket[order], source[order], receiver[order]
    starts = run_starts(bucket, source, receiver)
    first = np.append(starts, len(bucket))
    aligned = round_up(pairs.nbytes[order], _MOVE_ALIGNMENT)
    before = np.cumsum(aligned) - aligned
    at = before - np.repeat(before[starts], np.diff(first))
    bucket, source, receiver = bucket[starts], source[starts], receiver[starts]
    nbytes = sums_by(np.repeat(np.arange(len(starts)), np.diff(first)), aligned, len(starts))
    nbytes = np.where(source != receiver, nbytes + TRAILER_BYTES, 0)
    num_buckets = int(units.bucket.max(initial=0)) + 1
    number, num_rounds = _rounds(bucket, source, receiver, nbytes, num_buckets, world, limit)
    again = np.lexsort((receiver, source, number, bucket))
    counts = np.diff(first)[again]
    rows = np.repeat(first[:-1][again] - (np.cumsum(counts) - counts), counts) + np.arange(len(order))
    return _Messages(
        bucket=bucket[again],
        round=number[again],
        source=source[again],
        receiver=receiver[again],
        nbytes=nbytes[again],
        first=np.append(0, np.cumsum(counts)),
        rows=order[rows],
        at=at[rows],
        num_rounds=num_rounds,
    )


# -- where receivers put what they want


@dataclass(frozen=True)
class _Units:
    """Boxes of wanted parts that lie in one bucket: nearly always the whole part.

    Element x of the part is at byte `base` + (index of x in the part, flat) x itemsize of the bucket.
    """

    want: Ints
    bucket: Ints
    base: Ints
    lo: Ints  # [U, D], within the whole tensor
    hi: Ints


def _ordered(wants: Shards) -> Shards:
    return take_rows(wants, np.argsort(wants.rank, kind="stable"))


def _place(table: TensorTable, wants: Shards, capacity: int) -> _Units:
    """What `PackLayout.build` does, for all receivers: a step of Python per bucket and not per tensor."""
    shapes = table.shapes_of(wants)
    nbytes = shapes.prod(axis=1) * table.itemsize[wants.tensor]
    bucket, base = np.empty(len(nbytes), dtype=np.int64), np.empty(len(nbytes), dtype=np.int64)
    split: list[tuple[int, int, int, int, int]] = []  # want, bucket, offset, first byte, number of bytes
    starts = run_starts(wants.rank)
    for begin, end in zip(starts.tolist(), np.append(starts[1:], len(nbytes)).tolist(), strict=True):
        after = np.cumsum(round_up(nbytes[begin:end], ALIGNMENT))
        row, number, used = begin, 0, 0
        while row < end:
            before = int(after[row - begin - 1]) if row > begin else 0
            fitting = begin + int(np.searchsorted(after, before + capacity - used, side="right"))
            if fitting > row:
                bucket[row:fitting] = number
                base[row:fitting] = used + np.append(before, after[row - begin : fitting - begin - 1]) - before
                row, used = fitting, used + int(after[fitting - begin - 1]) - before
                continue
            if used:
                number, used = number + 1, 0
            if int(nbytes[row]) <= capacity:
                continue
            start, bucket[row] = 0, -1
            while int(nbytes[row]) - start > capacity:
                split.append((row, number, 0, start, capacity))
                number, start = number + 1, start + capacity
            split.append((row, number, 0, start, int(nbytes[row]) - start))
            row, used = row + 1, int(round_up(nbytes[row] - start, ALIGNMENT))
    whole = np.flatnonzero(bucket >= 0)
    origin = table.offsets_of(wants)
    columns = [(whole, bucket[whole], base[whole], origin[whole], origin[whole] + shapes[whole])]
    columns += [_split_units(table, wants, shapes, origin, *piece) for piece in split]
    units = _Units(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    order = np.argsort(units.want, kind="stable")
    return _Units(units.want[order], units.bucket[order], units.base[order], units.lo[order], units.hi[order])


def _split_units(
    table: TensorTable,
    wants: Shards,
    shapes: Ints,
    origin: Ints,
    want: int,
    bucket: int,
    offset: int,
    start: int,
    count: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    itemsize = int(table.itemsize[wants.tensor[want]])
    boxes = _boxes_of_range(shapes[want].tolist(), start // itemsize, (start + count) // itemsize)
    lo = np.array([low for low, _ in boxes], dtype=np.int64) + origin[want]
    hi = np.array([high for _, high in boxes], dtype=np.int64) + origin[want]
    same = np.ones(len(boxes), dtype=np.int64)
    return same * want, same * bucket, same * (offset - start), lo, hi


def _boxes_of_range(shape: list[int], start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    """Elements `start` to `stop` of a contiguous tensor as boxes (first index, end), at most 2 len(shape) - 1."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [([start], [stop])]
    row = int(np.prod(shape[1:]))
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return [([last, *lo], [last + 1, *hi]) for lo, hi in _boxes_of_range(shape[1:], start % row, stop - last * row)]
    head = _boxes_of_range(shape[1:], start % row, row) if start % row else []
    tail = _boxes_of_range(shape[1:], 0, stop % row)
    boxes = [([first - 1, *lo], [first, *hi]) for lo, hi in head]
    if first < last:
        boxes.append(([first, *(0 for _ in shape[1:])], [last, *shape[1:]]))
    return boxes + [([last, *lo], [last + 1, *hi]) for lo, hi in tail]


# -- who sends it


@dataclass(frozen=True)
class _Pairs:
    """What units and parts have in common."""

    unit: Ints
    box: Ints
    lo: Ints  # [P, D]
    hi: Ints
    nbytes: Ints

    def take(self, rows: Ints) -> _Pairs:
        return _Pairs(self.unit[rows], self.box[rows], self.lo[rows], self.hi[rows], self.nbytes[rows])


def _intersect(table: TensorTable, boxes: HeldBoxes, wants: Shards, units: _Units) -> _Pairs:
    tensor = wants.tensor[units.want]
    counts = boxes.of_tensor[tensor + 1] - boxes.of_tensor[tensor]
    if (counts == 0).any():
        missing = int(tensor[counts == 0][0])
        raise ValueError(f"no rank holds {table.names[missing].name}, which is wanted")
    unit = np.repeat(np.arange(len(tensor)), counts)
    within = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    box = np.repeat(boxes.of_tensor[tensor], counts) + within
    lo, hi = np.maximum(units.lo[unit], boxes.origin[box]), np.minimum(units.hi[unit], boxes.end[box])
    found = np.flatnonzero((lo < hi).all(axis=1))
    unit, box, lo, hi = unit[found], box[found], lo[found], hi[found]
    return _Pairs(unit, box, lo, hi, (hi - lo).prod(axis=1) * table.itemsize[tensor[unit]])


def _choose(boxes: HeldBoxes, pairs: _Pairs, receiver: Ints, nodes: Ints) -> Ints:
    """The source of each pair. A step of Python per receiver and set of replicas, of which a layout has few."""
    num_sets = len(boxes.sets)
    wanted = receiver * num_sets + boxes.set_of[pairs.box]
    nbytes = sums_by(wanted, pairs.nbytes, len(nodes) * num_sets)
    keys = np.flatnonzero(nbytes)
    single = np.array([len(ranks) == 1 for ranks in boxes.sets], dtype=bool)[keys % num_sets]
    keys = keys[np.lexsort((keys, -nbytes[keys], ~single))]
    load, choice = np.zeros(len(nodes), dtype=np.int64), np.full(len(nodes) * num_sets, -1, dtype=np.int64)
    for key in keys.tolist():
        to, ranks = key // num_sets, boxes.sets[key % num_sets]
        if to in ranks:
            choice[key] = to
            continue
        near = ranks[nodes[ranks] == nodes[to]]
        candidates = near if len(near) else ranks
        choice[key] = candidates[np.argmin(load[candidates])]
        load[choice[key]] += nbytes[key]
    return choice[wanted]


def _rounds(
    bucket: Ints, source: Ints, receiver: Ints, nbytes: Ints, num_buckets: int, world: int, limit: int
) -> tuple[Ints, Ints]:
    """The round of each message, and how many each bucket needs: all messages of a receiver's bucket go together."""
    number, num_rounds = np.zeros(len(bucket), dtype=np.int64), np.ones(num_buckets, dtype=np.int64)
    order = np.lexsort((receiver, bucket))
    starts = run_starts(bucket[order], receiver[order])
    loads, current = np.zeros((1, world), dtype=np.int64), -1
    for begin, end in zip(starts.tolist(), np.append(starts[1:], len(order)).tolist(), strict=True):
        rows = order[begin:end]
        if bucket[rows[0]] != current:
            current = int(bucket[rows[0]])
            loads = np.zeros((1, world), dtype=np.int64)
        after = loads[:, source[rows]] + nbytes[rows]
        # The first round with room, else one more: a single bucket goes even where the limit is below it.
        free = np.flatnonzero((after <= limit).all(axis=1) | ~loads.any(axis=1))
        if len(free) == 0:
            loads = np.concatenate([loads, np.zeros((1, world), dtype=np.int64)])
        number[rows] = chosen = int(free[0]) if len(free) else len(loads) - 1
        loads[chosen, source[rows]] += nbytes[rows]
        num_rounds[current] = len(loads)
    return number, num_rounds

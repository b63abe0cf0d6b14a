"""Which sequences share a micro-batch, and which a data-parallel rank: bins of limited size, and parts of equal cost.

A packer takes lengths and returns positions: `pack([5, 3, 2]) -> [[0], [1, 2]]` for a capacity of 5 tokens. All packers
are deterministic, and all but the concatenative one take the longest sequences first or draw their order from a seed.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from nemo_rl.config.rules import round_up

Bins = list[list[int]]
"""Positions of the sequences of each bin."""

# -- Equal parts for data-parallel ranks.


def sequence_cost[Number: (float, np.ndarray)](length: Number, *, quadratic_weight: float) -> Number:
    """Cost of a sequence of `length` tokens, in units of one token: length + quadratic_weight * length^2.

    `quadratic_weight` depends on the model: 2e-5 to 1e-4 for 7B to 0.5B parameters.
    """
    # Attention computes one product for each pair of positions; everything else is done once for each token.
    return length + quadratic_weight * length * length  # pyrefly: ignore[bad-return]  (of the type of `length`)


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide the positions of `costs` into `num_parts` parts of equally many items and nearly equal sums. O(n log n).

    The k-th item of every part is one of the k-th `num_parts` costliest, so ranks that work through their parts in step
    wait little for one another. The method is the balanced differencing method (BLDM) of Michiels et al., "Performance
    ratios of the Karmarkar-Karp differencing method" (2007). `num_parts` must divide the number of items.
    """
    assert len(costs) % num_parts == 0
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable").tolist()
    rank = {item: k for k, item in enumerate(order)}
    # Begin with one division for each group of `num_parts` neighbours in the order: one item in each part. Entries are
    # (minus difference, number, [(sum, items)] with the largest sum first); the number breaks ties.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), num_parts):
        division = [(costs[item], [item]) for item in order[start : start + num_parts]]
        heapq.heappush(heap, (division[-1][0] - division[0][0], start, division))
    while len(heap) > 1:
        # Join the two divisions with the largest differences, the largest part of one with the smallest of the other:
        # their differences then cancel instead of adding up.
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        division = []
        for (cost, items), (other_cost, other_items) in zip(one, reversed(other), strict=True):
            shorter, longer = sorted((items, other_items), key=len)
            longer += shorter  # onto the longer list: joining n lists then costs O(n log n) in total
            division.append((cost + other_cost, longer))
        division.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (division[-1][0] - division[0][0], number, division))
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(items, key=rank.__getitem__) for _, items in heap[0][2]]


# -- Bins of at most `bin_capacity` tokens.


class PackingAlgorithm(StrEnum):
    """How sequences are assigned to bins. Names are looked up without regard to case."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"

    @classmethod
    def _missing_(cls, value: object) -> PackingAlgorithm | None:
        name = value.lower() if isinstance(value, str) else value
        return next((member for member in cls if member.value == name), None)


@dataclass(frozen=True, kw_only=True)
class PackingMetrics:
    """How full the bins of one call of `pack` are."""

    num_sequences: int
    bin_capacity: int
    loads: Sequence[int]  # tokens of each bin

    @property
    def num_bins(self) -> int:
        return len(self.loads)

    @property
    def num_tokens(self) -> int:
        return sum(self.loads)

    @property
    def utilization(self) -> float:
        """The share of the capacity that holds tokens; 1.0 without bins."""
        return self.num_tokens / (self.num_bins * self.bin_capacity) if self.loads else 1.0

    @property
    def balance(self) -> float:
        """The emptiest bin over the fullest; 1.0 is even."""
        return min(self.loads) / max(self.loads) if self.loads else 1.0


@dataclass(eq=False)
class SequencePacker(ABC):
    """Packs sequences into bins. The number of bins is at least `min_bin_count` and a multiple of `bin_count_multiple`.

    If the algorithm makes fewer bins, the fullest are split in two; a bin is never empty. `seed` determines the order
    of the packer that draws one.
    """

    bin_capacity: int
    collect_metrics: bool = False
    min_bin_count: int | None = None
    bin_count_multiple: int | None = None
    seed: int = 0
    metrics: PackingMetrics | None = field(init=False, default=None)  # of the last `pack`, with `collect_metrics`

    def __post_init__(self) -> None:
        for name in ("bin_capacity", "min_bin_count", "bin_count_multiple"):
            if (value := vars(self)[name]) is not None and value < 1:
                raise ValueError(f"{name}={value}: it is at least 1")

    def pack(self, lengths: Sequence[int]) -> Bins:
        """The positions of `lengths` (tokens) in each bin; every position is in exactly one.

        Raises:
            ValueError: if a sequence is empty or longer than a bin, or there are fewer sequences than required bins.
        """
        lengths = list(lengths)
        if lengths and min(lengths) < 1:
            raise ValueError(f"a sequence of {min(lengths)} tokens cannot be packed; leave it out")
        if lengths and max(lengths) > self.bin_capacity:
            raise ValueError(
                f"a sequence of {max(lengths)} tokens is longer than any micro-batch may hold ({self.bin_capacity}); "
                f"raise policy.sequence_packing.train_mb_tokens and logprob_mb_tokens to at least {max(lengths)}"
            )
        bins = self._pack(lengths)
        count = round_up(max(len(bins), self.min_bin_count or 0), self.bin_count_multiple or 1)
        if count > len(lengths):
            raise ValueError(
                f"{len(lengths)} sequences cannot fill {count} bins (min_bin_count={self.min_bin_count}, "
                f"bin_count_multiple={self.bin_count_multiple})"
            )
        bins = split_fullest(bins, lengths, count)
        if self.collect_metrics:
            loads = [sum(lengths[i] for i in members) for members in bins]
            self.metrics = PackingMetrics(num_sequences=len(lengths), bin_capacity=self.bin_capacity, loads=loads)
        return bins

    @abstractmethod
    def _pack(self, lengths: list[int]) -> Bins:
        """Bins of sequences that each fit into one."""


class ConcatenativePacker(SequencePacker):
    """Next fit: sequences in the given order, a new bin when one does not fit. At most 2 OPT - 1 bins."""

    def _pack(self, lengths: list[int]) -> Bins:
        bins: Bins = []
        room = 0
        for position, length in enumerate(lengths):
            if length > room:
                bins.append([])
                room = self.bin_capacity
            bins[-1].append(position)
            room -= length
        return bins


class FirstFitShufflePacker(SequencePacker):
    """First fit in a random order: every bin a similar mix of lengths. At most 1.7 OPT bins."""

    def _pack(self, lengths: list[int]) -> Bins:
        order = list(range(len(lengths)))
        random.Random(self.seed).shuffle(order)
        return first_fit(lengths, order, self.bin_capacity)


class FirstFitDecreasingPacker(SequencePacker):
    """Longest first, each into the first bin with room. At most 11/9 OPT + 6/9 bins (Dosa 2007)."""

    def _pack(self, lengths: list[int]) -> Bins:
        # The first bin gets the longest sequence, then the longest that fits beside it, and so on; the second bin gets
        # the same of the rest. These are the bins of first fit, without a search for each sequence.
        rest = _ByLength(lengths)
        bins: Bins = []
        while rest:
            bins.append([])
            rest.fill(bins[-1], self.bin_capacity)
        return bins


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first fit decreasing (Johnson and Garey, "A 71/60 theorem for bin packing", J. Complexity 1, 1985).

    At most 71/60 OPT + 1 bins (Yue and Zhang, 1995). Sequences longer than half a bin have a bin each. Before first fit
    decreasing continues, it adds to them one sequence of more than a third, or two of more than a sixth of a bin.
    """

    def _pack(self, lengths: list[int]) -> Bins:
        capacity = self.bin_capacity
        rest = _ByLength(lengths)
        bins: Bins = []
        rooms: list[int] = []
        while (kind := rest.largest(capacity)) and 2 * rest.length[kind] > capacity:
            bins.append([rest.take(kind)])
            rooms.append(capacity - rest.length[kind])
        # The longest medium sequence (over a third of a bin) that fits, to the bins with the least room first. Bins are
        # in descending order of their sequence: ascending order of room.
        unpaired = []
        for number, members in enumerate(bins):
            kind = rest.largest(rooms[number])
            if kind and 3 * rest.length[kind] > capacity:
                members.append(rest.take(kind))
                rooms[number] -= rest.length[kind]
            else:
                unpaired.append(number)
        self._join_two_small(rest, bins, rooms, reversed(unpaired))
        for members, room in zip(bins, rooms, strict=True):
            rest.fill(members, room)
        while rest:
            bins.append([])
            rest.fill(bins[-1], capacity)
        return bins

    def _join_two_small(self, rest: _ByLength, bins: Bins, rooms: list[int], numbers: Iterable[int]) -> None:
        """Add the shortest small sequence (over a sixth of a bin) and the longest small one beside it.

        `numbers`: the bins, those with the most room first. What does not fit there fits nowhere.
        """
        largest_small = self.bin_capacity // 3
        smallest = bisect_right(rest.length, self.bin_capacity // 6)
        for number in numbers:
            smallest = rest.nonempty_from(smallest)
            if smallest > rest.num_kinds or rest.length[smallest] > largest_small:
                return
            second = smallest if rest.count[smallest] > 1 else rest.nonempty_from(smallest + 1)
            if second > rest.num_kinds or rest.length[second] > largest_small:
                return
            room = rooms[number] - rest.length[smallest]
            if rest.length[second] > room:
                continue
            bins[number].append(rest.take(smallest))
            partner = rest.largest(min(room, largest_small))
            bins[number].append(rest.take(partner))
            rooms[number] = room - rest.length[partner]


class _ByLength:
    """Sequences by length; finds the longest sequence of at most a given number of tokens.

    The k-th distinct length, counted from 1, is called kind k; 0 means none. A kind without sequences points to the
    next shorter kind (a disjoint-set forest), so finding costs a bisection and, amortised, little more.
    """

    def __init__(self, lengths: list[int]) -> None:
        array = np.asarray(lengths, dtype=np.int64)
        distinct, counts = np.unique(array, return_counts=True)
        self.num_kinds = len(distinct)
        self.length = [0, *distinct.tolist()]
        self.count = [0, *counts.tolist()]
        self._order = np.argsort(array, kind="stable").tolist()
        self._next = [0, *(np.cumsum(counts) - counts).tolist()]
        self._shorter = list(range(self.num_kinds + 1))

    def __bool__(self) -> bool:
        return self.largest(self.length[-1]) > 0

    def largest(self, room: int) -> int:
        """The kind of the longest sequence of at most `room` tokens."""
        shorter = self._shorter
        kind = bisect_right(self.length, room) - 1
        while shorter[kind] != kind:
            shorter[kind] = shorter[shorter[kind]]
            kind = shorter[kind]
        return kind

    def nonempty_from(self, kind: int) -> int:
        """The first kind from `kind` up that has sequences left, or num_kinds + 1."""
        while kind <= self.num_kinds and not self.count[kind]:
            kind += 1
        return kind

    def take(self, kind: int, number: int = 1) -> int:
        """Remove `number` sequences of a kind, which are neighbours in the order by length. Returns the first."""
        start = self._next[kind]
        self._next[kind] = start + number
        self.count[kind] -= number
        if not self.count[kind]:
            self._shorter[kind] = kind - 1
        return self._order[start]

    def fill(self, members: list[int], room: int) -> None:
        """Move the longest sequence that fits into `members`, until none fits."""
        while kind := self.largest(room):
            number = min(self.count[kind], room // self.length[kind])  # all of one length at once
            start = self._next[kind]
            self.take(kind, number)
            members += self._order[start : start + number]
            room -= number * self.length[kind]


def first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    """Each sequence, in `order`, into the first bin with room; O(n log n) by a tournament tree over the bins' room."""
    # First fit leaves at most one bin half full or less, which limits the number of bins and so the size of the tree.
    most_bins = 2 * sum(lengths) // capacity + 1
    leaves = 1 << max(most_bins - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)  # room[k]: the most below node k, whose children are 2k and 2k + 1
    bins: Bins = []
    for position in order:
        length = lengths[position]
        node = 1
        while node < leaves:  # go down to the leftmost leaf with room
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(position)
        room[node] -= length
        while node > 1:  # update the maxima above it
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return bins


def split_fullest(bins: Bins, lengths: Sequence[int], count: int) -> Bins:
    """At least `count` bins: the fullest bin of two or more sequences is split into similar halves, repeatedly.

    There must be at least `count` sequences.
    """
    bins = list(bins)
    heap = [(-sum(lengths[i] for i in members), k) for k, members in enumerate(bins) if len(members) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        _, number = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0, 0]
        for i in sorted(bins[number], key=lambda i: (-lengths[i], i)):
            side = int(loads[1] < loads[0])
            halves[side].append(i)
            loads[side] += lengths[i]
        bins[number] = halves[0]
        bins.append(halves[1])
        for k, half, load in zip((number, len(bins) - 1), halves, loads, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-load, k))
    return bins


def level(lengths: Sequence[int], costs: Sequence[float], count: int, capacity: int) -> Bins | None:
    """Exactly `count` bins of nearly equal cost, or None if this greedy method finds no room for a sequence.

    Longest first, each into the cheapest bin with room: Graham's LPT rule (1969) under a capacity, O(n log n). It fails
    if bins have to be almost full, and if there are fewer sequences than bins.
    """
    if len(lengths) < count:
        return None
    room = [capacity] * count
    bins: Bins = [[] for _ in range(count)]
    open_bins = [(0.0, number) for number in range(count)]  # (cost, bin)
    # Bins without room for the current sequence: (minus room, cost, bin). Lengths fall, so each bin leaves once.
    waiting: list[tuple[int, float, int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[position]
        while waiting and -waiting[0][0] >= length:
            _, cost, number = heapq.heappop(waiting)
            heapq.heappush(open_bins, (cost, number))
        while open_bins and room[open_bins[0][1]] < length:
            cost, number = heapq.heappop(open_bins)
            heapq.heappush(waiting, (-room[number], cost, number))
        if not open_bins:
            return None
        cost, number = open_bins[0]
        bins[number].append(position)
        room[number] -= length
        heapq.heapreplace(open_bins, (cost + costs[position], number))
    return bins


def even_out(bins: Bins, lengths: Sequence[int], costs: Sequence[float], capacity: int, group: int = 1) -> Bins:
    """As many bins, of more even cost: the sequences of the emptiest bins are distributed again.

    Packers fill the first bins completely and leave the last ones nearly empty. All bins are distributed again if
    `level` succeeds, else the emptiest three quarters of them, nine sixteenths and so on, in multiples of `group`.
    """
    fullest_first = sorted(bins, key=lambda members: -sum(lengths[i] for i in members))
    size = len(bins)
    while True:
        kept, rest = fullest_first[: len(bins) - size], fullest_first[len(bins) - size :]
        positions = [i for members in rest for i in members]
        dealt = level([lengths[i] for i in positions], [costs[i] for i in positions], size, capacity)
        if dealt is not None:
            return kept + [[positions[k] for k in members] for members in dealt]
        size = min(round_up(3 * size // 4, group), size - group)
        if size <= 0:
            return fullest_first


PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(algorithm: PackingAlgorithm | str, bin_capacity: int, *args: Any, **options: Any) -> SequencePacker:
    """The packer of a name, which may be in any case; `SequencePacker` takes the other arguments.

    Raises ValueError for an unknown name or a number below 1.
    """
    return PACKERS[PackingAlgorithm(algorithm)](bin_capacity, *args, **options)

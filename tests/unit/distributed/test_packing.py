"""Bins of sequences, and parts of equal cost."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.distributed.packing import PackingAlgorithm, balance, even_out, first_fit, get_packer, level, split_fullest


def naive_first_fit(lengths: list[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in order]
    for i in order:
        for members in bins:
            if sum(lengths[k] for k in members) + lengths[i] <= capacity:
                members.append(i)
                break
    return [members for members in bins if members]


def naive_mffd(lengths: list[int], capacity: int) -> int:
    """The number of bins of modified first fit decreasing, step by step as Johnson and Garey put it."""
    rest = sorted(lengths, reverse=True)

    def longest(room: int, low: int = 0, high: int = 6) -> int | None:
        return next((n for n in rest if n <= room and n * 6 > low * capacity and n * 6 <= high * capacity), None)

    bins = [[n] for n in rest if 2 * n > capacity]
    rest = rest[len(bins) :]
    for members in bins:
        if found := longest(capacity - sum(members), low=2, high=3):
            members.append(found)
            rest.remove(found)
    for members in reversed(bins):
        small = sorted(n for n in rest if capacity < n * 6 <= 2 * capacity)
        room = capacity - sum(members)
        if len(members) == 1 and len(small) >= 2 and small[0] + small[1] <= room:
            rest.remove(small[0])
            partner = max(n for n in small[1:] if n <= room - small[0])
            rest.remove(partner)
            members += [small[0], partner]
    while True:
        for members in bins:
            while found := longest(capacity - sum(members)):
                members.append(found)
                rest.remove(found)
        if not rest:
            return len(bins)
        bins.append([])


def assert_whole(bins: list[list[int]], lengths: list[int], capacity: int) -> None:
    """Every sequence is in one bin, and no bin is empty or too full."""
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in members) <= capacity for members in bins)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PackingAlgorithm), st.integers(1, 60), st.data())
def test_every_sequence_is_in_one_bin_and_no_bin_is_empty_or_too_full(algorithm, capacity, data):
    min_bin_count, multiple = data.draw(st.none() | st.integers(1, 12)), data.draw(st.none() | st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    packer = get_packer(algorithm, capacity, True, min_bin_count, multiple)
    try:
        bins = packer.pack(lengths)
    except ValueError as error:
        assert "cannot fill" in str(error)
        fewest = max(min_bin_count or 0, len(get_packer(algorithm, capacity).pack(lengths)))
        assert fewest + -fewest % (multiple or 1) > len(lengths), "there were enough sequences"
        return
    assert_whole(bins, lengths, capacity)
    assert len(bins) >= (min_bin_count or 0) and len(bins) % (multiple or 1) == 0
    assert packer.pack(lengths) == bins
    metrics = packer.metrics
    assert metrics is not None and (metrics.num_bins, metrics.num_tokens) == (len(bins), sum(lengths))
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert metrics.utilization == (sum(loads) / (len(bins) * capacity) if bins else 1.0)
    assert metrics.balance == (min(loads) / max(loads) if bins else 1.0)


@settings(deadline=None, max_examples=100)
@given(capacity=st.integers(2, 200), size=st.integers(1, 9) | st.integers(1, 60), data=st.data())
def test_fast_searches_find_what_plain_ones_find(capacity, size, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=size, max_size=size))
    order = data.draw(st.permutations(range(size)))
    assert first_fit(lengths, order, capacity) == naive_first_fit(lengths, list(order), capacity)
    longest_first = naive_first_fit(lengths, sorted(range(size), key=lambda i: -lengths[i]), capacity)
    assert get_packer("first_fit_decreasing", capacity).pack(lengths) == longest_first
    assert len(get_packer("modified_first_fit_decreasing", capacity).pack(lengths)) == naive_mffd(lengths, capacity)


def test_a_sequence_longer_than_a_bin_is_refused_and_more_bins_come_from_splitting_the_fullest():
    with pytest.raises(ValueError, match=r"9 tokens.*policy\.sequence_packing\.train_mb_tokens.*at least 9"):
        get_packer("First_Fit_Decreasing", 8).pack([3, 9])
    assert split_fullest([[0, 1, 2], [3]], [4, 3, 3, 9], 3) == [[0], [3], [1, 2]]
    assert [len(members) for members in split_fullest([[*range(8)]], [5] * 8, 4)] == [2, 2, 2, 2]
    bins = get_packer("first_fit_decreasing", 30, min_bin_count=3, bin_count_multiple=4).pack([5] * 12)
    assert [len(members) for members in bins] == [3, 3, 3, 3]


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 10), capacity=st.integers(10, 60), data=st.data())
def test_level_bins_hold_every_sequence_or_there_are_none(count, capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=50))
    costs = [float(length * length) for length in lengths]
    bins = level(lengths, costs, count, capacity)
    if bins is None:
        # Greedy bins without room for a sequence: together they are more full than this.
        assert len(lengths) < count or sum(lengths) > count * (capacity - max(lengths))
        return
    assert_whole(bins, lengths, capacity)
    assert len(bins) == count


def test_evening_out_keeps_the_number_of_bins_and_levels_what_is_not_full():
    drawn = np.random.default_rng(1).lognormal(math.log(25), 0.6, 300)
    lengths = drawn.clip(1, 100).astype(int).tolist()
    bins = get_packer("modified_first_fit_decreasing", 100, bin_count_multiple=8).pack(lengths)
    evened = even_out(bins, lengths, lengths, 100, group=8)
    assert_whole(evened, lengths, 100)
    assert len(evened) == len(bins)
    lowest = [min(sum(lengths[i] for i in members) for members in some) for some in (bins, evened)]
    assert lowest[1] > lowest[0]
    # Full bins are left alone where dealing all anew finds no room.
    lengths = [3, 3, 2, 2, 2] * 4 + [4, 2]
    bins = [[5 * k + i for i in pair_or_three] for k in range(4) for pair_or_three in ([0, 1], [2, 3, 4])]
    bins += [[20], [21]]
    assert level(lengths, lengths, 10, 6) is None and level([3, 3], [1.0, 1.0], 2, 6) == [[0], [1]]
    assert level([4, 3, 3, 2], [1.0, 5.0, 1.0, 1.0], 2, 6) == [[0, 3], [1, 2]], "a bin is filled to the last token"
    evened = even_out(bins, lengths, lengths, 6)
    assert len(evened) == 10 and evened[:3] == bins[:3]
    assert_whole(evened, lengths, 6)
    assert min(sum(lengths[i] for i in members) for members in evened) == 4


@settings(deadline=None, max_examples=80)
@given(num_parts=st.integers(1, 6), per_part=st.integers(0, 12), data=st.data())
def test_the_kth_items_of_all_parts_are_the_kth_costliest(num_parts, per_part, data):
    size = num_parts * per_part
    costs = data.draw(st.lists(st.floats(0, 1e4), min_size=size, max_size=size))
    parts = balance(costs, num_parts)
    assert parts == balance(costs, num_parts)
    assert len(parts) == num_parts and sorted(i for part in parts for i in part) == list(range(size))
    kth = [[costs[part[k]] for part in parts] for k in range(per_part)]
    assert sorted(costs, reverse=True) == [cost for some in kth for cost in sorted(some, reverse=True)]
    sums = [sum(costs[i] for i in part) for part in parts]
    widest = max((max(some) - min(some) for some in kth), default=0)
    assert max(sums) - min(sums) <= widest + 1e-6, "joining never makes the difference larger"

"""Work over data-parallel ranks: what a sequence costs, and equal shares of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)


def sequence_cost(length: Number, *, quadratic_weight: float) -> Number:
    """Work of a sequence of `length` tokens in tokens' worth: length + quadratic_weight * length^2.

    `quadratic_weight` is what a squared token costs relative to a token: attention's pairs of positions against all
    that is done for each token alone. It is the model's: 2e-5 to 1e-4 for 7B to 0.5B parameters.
    """
    return length + quadratic_weight * length * length


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Positions of `costs` in `num_parts` parts of equally many items and nearly equal sums.

    The k-th item of every part is one of the k-th `num_parts` costliest: ranks that work through their parts in step
    wait little for one another. Which goes where is found by the differencing method of Karmarkar and Karp (1982) in
    its balanced form (Michiels et al., "Performance ratios of the Karmarkar-Karp differencing method", 2007; BLDM):
    partial divisions, at first one per `num_parts` neighbours, are joined two by two, those of the largest difference
    first, the largest sum of one with the smallest of the other. O(n log n). `num_parts` divides the number of items.
    """
    assert len(costs) % num_parts == 0
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable").tolist()
    place = {item: k for k, item in enumerate(order)}
    # (minus difference, number, [(sum, items)] from the largest sum down); the number decides ties.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), num_parts):
        division = [(costs[item], [item]) for item in order[start : start + num_parts]]
        heap.append((division[-1][0] - division[0][0], start, division))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        division = [
            (cost + other_cost, _joined(items, other_items))
            for (cost, items), (other_cost, other_items) in zip(one, reversed(other), strict=True)
        ]
        division.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (division[-1][0] - division[0][0], number, division))
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(items, key=place.__getitem__) for _, items in heap[0][2]]


def _joined(one: list[int], other: list[int]) -> list[int]:
    """All items, in the memory of the longer list: joining n lists costs O(n log n) in all."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    longer += shorter
    return longer

"""Which dataset each prompt of a run comes from, where datasets have weights, and which of its rows it is.

Position p = 0, 1, 2, ... counts the prompts of a run. With shares s_i that add up to 1, the first p prompts have within
one of s_i * p from dataset i, for every p; so any stretch of n prompts has within two of s_i * n, and a batch has
exactly its share wherever that is a whole number. The schedule is that of R. Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32 (1980): among the datasets that are far enough behind, the one whose turn would be
overdue first.

A dataset's own rows come in passes, each a permutation of all of them, whatever the others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

MAX_PERIOD = 100_000  # prompts; a schedule of that length is made in a quarter of a second


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the same proportions, of weights as they are written: 0.7 is 7/10.

    Raises:
        ValueError: when they add up to more than 100,000, the longest schedule.
    """
    fractions = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*numbers)
    numbers = [number // divisor for number in numbers]
    if sum(numbers) > MAX_PERIOD:
        raise ValueError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} have so many digits that their pattern repeats "
            f"only after {sum(numbers)} prompts; use rounder ones, e.g. 2 and 1, or 0.67 and 0.33"
        )
    return numbers


def schedule(weights: Sequence[int]) -> np.ndarray:
    """int16 [sum(weights)]: the number of the dataset at each position; then it repeats."""
    total, count = sum(weights), len(weights)
    order = np.zeros(total, dtype=np.int16)
    if count == 1:
        return order
    # All numbers times total * scale, so that they are whole: a share is weight * scale.
    scale = 2 * count - 2
    taken = [0] * count
    for position in range(total):
        best, best_due = -1, 0  # due: times its weight
        for i, weight in enumerate(weights):
            ahead = weight * (position + 1) - taken[i] * total
            if scale * ahead < total:  # not far enough behind yet
                continue
            due = scale - 1 + scale * taken[i]
            if best < 0 or due * weights[best] < best_due * weight:
                best, best_due = i, due
        assert best >= 0
        taken[best] += 1
        order[position] = best
    assert taken == list(weights)
    return order


class MixedOrder:
    """Positions of a run -> (dataset, row): no state, so that any position is the same after a restart.

    The order depends on seed, weights and lengths alone. Without `shuffle`, passes are in the order of the rows.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], *, shuffle: bool, seed: int) -> None:
        self.lengths = list(lengths)
        self.weights = whole_weights(weights)
        self.shuffle = shuffle
        self.seed = seed
        self._permutation = lru_cache(maxsize=2 * len(self.lengths))(self._make_permutation)

    @property
    def shares(self) -> list[float]:
        """Of each dataset, of all prompts."""
        return [weight / sum(self.weights) for weight in self.weights]

    @cached_property
    def _period(self) -> np.ndarray:
        return schedule(self.weights)

    @cached_property
    def _taken_before(self) -> np.ndarray:
        """int32 [period]: how many prompts of its own dataset are before each position."""
        before = np.zeros(len(self._period), dtype=np.int32)
        for i in range(len(self.weights)):
            mine = self._period == i
            before[mine] = np.arange(mine.sum())
        return before

    def row(self, position: int) -> tuple[int, int]:
        """(number of the dataset, index of its row)."""
        rounds, place = divmod(position, len(self._period))
        number = int(self._period[place])
        taken = rounds * self.weights[number] + int(self._taken_before[place])
        a_pass, index = divmod(taken, self.lengths[number])
        return number, int(self._permutation(number, a_pass)[index])

    def _make_permutation(self, number: int, a_pass: int) -> np.ndarray:
        length = self.lengths[number]
        if not self.shuffle:
            return np.arange(length)
        return np.random.default_rng([self.seed, number, a_pass]).permutation(length)

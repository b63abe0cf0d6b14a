"""What the reference policy says of all answers: computed once, kept on disk, handed to the rows of a plan."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from nemo_rl.algorithms.dpo import ReferenceSums
from nemo_rl.algorithms.plan.batch import Batching, FixedSize
from nemo_rl.algorithms.trainers.supervised import plan_examples
from tests.fakes import keys_of_plan
from tests.unit.algorithms.example_runs import ScoringPolicy, handles, prompts

ROWS = [
    {"lengths": (4, 6)},
    {"lengths": (5, 3), "problem": "too_long"},
    {"lengths": (7, 8)},
    *[{"lengths": (9, 9)}] * 4,
]
BATCHING = Batching(train=FixedSize(2), logprobs=FixedSize(2), quadratic_weight=0.0)


def compute(num_ranks: int, batch_size: int = 7) -> ReferenceSums:
    made = handles(prompts("d", ROWS))
    plan = partial(plan_examples, num_ranks=num_ranks, batching=BATCHING)
    policy = ScoringPolicy(data_parallel_size=num_ranks)
    sums = ReferenceSums.compute(policy, [made[:1], made[1:]] if batch_size < 7 else [made], plan)  # type: ignore[arg-type]
    return sums


def test_each_pair_has_the_sums_over_its_tokens_that_carry_loss():
    sums = compute(1).sums
    assert list(sums) == [f"d:{i}" for i in range(7)]
    # Ids count up from 1, rejected ones from 2; the last two tokens carry loss.
    assert sums["d:0"] == pytest.approx((-(3 + 4) / 100, -(6 + 7) / 100))
    assert sums["d:1"] == (0.0, 0.0), "left out"
    assert sums["d:2"] == pytest.approx((-(8 + 9) / 100, -(10 + 11) / 100))


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(2, 7), (3, 7), (3, 3)])
def test_ranks_batches_and_the_copies_that_fill_them_change_nothing(num_ranks, batch_size):
    assert compute(num_ranks, batch_size).sums == compute(1).sums


def test_the_rows_of_a_plan_get_their_own_and_copies_nothing():
    sums = ReferenceSums({f"d:{i}": (float(i), -float(i)) for i in range(7)})
    made = handles(prompts("d", ROWS))[::-1]  # seven pairs in groups of 1, 3 and 3, on two ranks: one copy
    plan = plan_examples(made, num_ranks=2, batching=BATCHING)
    found = sums.of(made, plan)
    assert sorted(found) == sorted(keys_of_plan(plan)) and len(found) == 16
    assert all(value.dtype == np.float32 and value.shape == () for value in found.values())
    assert (found[0, 0], found[0, 1]) == (6.0, -6.0)
    assert (found[1, 2], found[1, 3]) == (4.0, -4.0)
    assert (found[3, 2], found[3, 3]) == (0.0, 0.0), "a copy of the shortest pair, in a group of its own"

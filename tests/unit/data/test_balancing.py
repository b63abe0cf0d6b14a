from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.packing import balance, sequence_cost


@settings(deadline=None, max_examples=80)
@given(num_parts=st.integers(1, 6), per_part=st.integers(0, 12), data=st.data())
def test_the_kth_items_of_all_parts_are_the_kth_costliest(num_parts, per_part, data):
    size = num_parts * per_part
    costs = data.draw(st.lists(st.floats(0, 1e4), min_size=size, max_size=size))
    parts = balance(costs, num_parts)
    assert parts == balance(costs, num_parts)
    assert len(parts) == num_parts and sorted(i for part in parts for i in part) == list(range(size))
    ranked = sorted(costs, reverse=True)
    for k in range(per_part):
        assert sorted((costs[part[k]] for part in parts), reverse=True) == ranked[k * num_parts : (k + 1) * num_parts]
    sums = [sum(costs[i] for i in part) for part in parts]
    widest = max(
        (max(costs[p[k]] for p in parts) - min(costs[p[k]] for p in parts) for k in range(per_part)), default=0
    )
    assert max(sums) - min(sums) <= widest + 1e-6, "joining never makes the difference larger"


def test_differencing_finds_what_dealing_back_and_forth_does_not():
    costs = [16.0, 9, 8, 7, 6, 5, 4, 1]
    back_and_forth = abs((16 + 7 + 6 + 1) - (9 + 8 + 5 + 4))
    one, other = (sum(costs[i] for i in part) for part in balance(costs, 2))
    # Differences of the pairs: 7, 3, 1, 1. The 3 is set against the 7, then both ones against what is left.
    assert abs(one - other) == 7 - 3 - 1 - 1 < back_and_forth


def test_cost_grows_with_the_square():
    assert sequence_cost(100, quadratic_weight=0.0) == 100
    assert sequence_cost(100, quadratic_weight=0.01) == 200
    assert sequence_cost(200, quadratic_weight=0.01) == 600

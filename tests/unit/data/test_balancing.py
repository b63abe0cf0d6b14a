from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.packing import balance


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

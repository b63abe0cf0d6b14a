from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.distributed.named_sharding import NamedSharding


def two_by_two() -> NamedSharding:
    return NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


def test_shape_names_and_fixed_axes() -> None:
    sharding = two_by_two()
    assert sharding.shape == {"data_parallel": 2, "tensor_parallel": 2}
    assert (sharding.names, sharding.ndim, sharding.size) == (["data_parallel", "tensor_parallel"], 2, 4)
    assert sharding.get_axis_index("tensor_parallel") == 1 and sharding.get_axis_size("data_parallel") == 2
    assert sharding.get_ranks(tensor_parallel=1) == NamedSharding([1, 3], ["data_parallel"])
    assert sharding.get_ranks(data_parallel=1, tensor_parallel=0) == 2
    assert sharding.get_ranks_by_coord() == [0, 1, 2, 3]
    assert sharding != NamedSharding([[0, 1], [2, 3]], ["tensor_parallel", "data_parallel"])
    sharding.layout[0, 0] = 9  # of a copy
    assert sharding == two_by_two()
    for outside in (2, -1):
        assert sharding.get_ranks_by_coord(data_parallel=outside) == []


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1], [2]], ["a", "b"], "ragged"),
        ([0.0, 1.0], ["a"], "integer"),
        ([[0, 1], [1, 2]], ["a", "b"], r"more than once in the layout: \[1\]"),
        ([0, 1], ["a", "b"], "1 axes but 2 names"),
        ([[0, 1]], ["a", "a"], "names must differ"),
    ],
)
def test_impossible_layouts(layout: list, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda s: s.get_ranks(data_parallel=2), IndexError, "data_parallel=2 is out of range: the axis has 2"),
        (lambda s: s.get_ranks_by_coord(pipeline=0), ValueError, "no axis 'pipeline'"),
        (lambda s: s.get_worker_coords(4), ValueError, "rank 4 is not in the layout"),
    ],
)
def test_out_of_range_and_unknown(ask: Callable[[NamedSharding], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ask(two_by_two())


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms())
@settings(max_examples=40, deadline=None)
def test_coordinates_lead_back_to_the_rank(sizes: list[int], random: object) -> None:
    ranks = np.arange(int(np.prod(sizes)))
    random.shuffle(ranks)  # type: ignore[attr-defined]
    names = [f"axis{i}" for i in range(len(sizes))]
    sharding = NamedSharding(ranks.reshape(sizes), names)
    for rank in ranks.tolist():
        coords = sharding.get_worker_coords(rank)
        assert sharding.get_ranks(**coords) == rank
        assert sharding.get_ranks_by_coord(**coords) == [rank]

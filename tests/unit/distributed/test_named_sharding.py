import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.distributed.named_sharding import NamedSharding


def two_by_two() -> NamedSharding:
    return NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


def test_shape_and_names() -> None:
    sharding = two_by_two()
    assert sharding.shape == {"data_parallel": 2, "tensor_parallel": 2}
    assert (sharding.names, sharding.ndim, sharding.size) == (["data_parallel", "tensor_parallel"], 2, 4)
    assert sharding.get_axis_index("tensor_parallel") == 1
    assert sharding.get_axis_size("data_parallel") == 2


def test_layout_is_a_copy() -> None:
    sharding = two_by_two()
    sharding.layout[0, 0] = 9
    assert sharding == two_by_two()


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


def test_out_of_range_and_unknown() -> None:
    sharding = two_by_two()
    assert sharding.get_ranks_by_coord(data_parallel=2) == []
    assert sharding.get_ranks_by_coord(data_parallel=-1) == []
    with pytest.raises(IndexError, match="data_parallel=2 is out of range: the axis has 2"):
        sharding.get_ranks(data_parallel=2)
    with pytest.raises(ValueError, match="no axis 'pipeline'"):
        sharding.get_ranks_by_coord(pipeline=0)
    with pytest.raises(ValueError, match="rank 4 is not in the layout"):
        sharding.get_worker_coords(4)


def test_fixing_axes() -> None:
    sharding = two_by_two()
    assert sharding.get_ranks(tensor_parallel=1) == NamedSharding([1, 3], ["data_parallel"])
    assert sharding.get_ranks(data_parallel=1, tensor_parallel=0) == 2
    assert sharding.get_ranks_by_coord() == [0, 1, 2, 3]
    assert sharding != NamedSharding([[0, 1], [2, 3]], ["tensor_parallel", "data_parallel"])


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

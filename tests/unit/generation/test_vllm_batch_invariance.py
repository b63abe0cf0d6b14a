"""The row-invariant products alone; the engine as a whole is in test_vllm_generation.py."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.generation.vllm.engine_patches import RowInvariantLinear, split_rows


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    RowInvariantLinear._proven.clear()
    yield
    torch.set_num_threads(num_threads)
    RowInvariantLinear._proven.clear()


SHAPES = [(256, 128), (87, 128), (200, 72), (448, 1600), (1, 64), (640, 512)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 700), st.integers(0, 2**31), st.booleans())
def test_a_row_has_the_same_bits_in_every_batch(
    shape: tuple[int, int], num_rows: int, seed: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if with_bias else None
    x = torch.randn(num_rows, shape[1], generator=generator)
    linear = RowInvariantLinear(weight)
    together = linear(x, weight, bias)
    position = seed % num_rows
    assert torch.equal(linear(x[position : position + 1], weight, bias)[0], together[position])
    order = torch.randperm(num_rows, generator=generator)
    assert torch.equal(linear(x[order], weight, bias), together[order])
    assert linear(x[:0], weight, bias).shape == (0, shape[0])


def test_sizes_that_disagree_are_split() -> None:
    assert split_rows(40, lambda size: True) == [40]
    assert split_rows(40, lambda size: size != 40) == [32, 8]
    assert split_rows(48, lambda size: size in (8, 16)) == [16, 16, 16]
    assert split_rows(1032, lambda size: True) == [512, 512, 8]
    assert split_rows(0, lambda size: True) == []
    with pytest.raises(RuntimeError, match="cannot be made reproducible"):
        split_rows(24, lambda size: size == 16)


def test_a_weight_of_zeros_proves_nothing() -> None:
    RowInvariantLinear._proven.clear()
    linear, x = RowInvariantLinear(torch.zeros(32, 16)), torch.ones(24, 16)
    assert linear(x, torch.zeros(32, 16)).sum() == 0 and RowInvariantLinear._proven == {}
    linear.pack(torch.ones(32, 16))
    assert torch.equal(linear(x, torch.ones(32, 16)), torch.full((24, 32), 16.0))
    assert RowInvariantLinear._proven == {(24, 32, 16): True}

"""The collectives that replace gloo's own, against these."""

import pytest
import torch
import torch.distributed as dist

from nemo_rl.distributed.collectives import gather_rows, scatter_sums
from tests.worlds import run_world


def _both_ways(rank: int, world: int, is_part: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(2, 3, generator=generator)
    whole, same = torch.zeros(2 * world, 3), torch.empty(2 * world, 3)
    own = whole[2 * rank :][:2].copy_(rows) if is_part else rows
    gather_rows(whole, own, group)
    dist.all_gather_single(same, rows, group=group)
    assert torch.equal(whole, same)
    gradients = torch.randn(2 * world, 3, generator=generator)
    before, total, expected = gradients.clone(), torch.empty(2, 3), torch.empty(2, 3)
    scatter_sums(total, gradients, group)
    dist.reduce_scatter_single(expected, gradients, group=group)
    assert torch.allclose(total, expected, atol=1e-6) and torch.equal(gradients, before)


@pytest.mark.parametrize("is_part", [False, True], ids=["apart", "a part of the whole"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_are_gathered_and_sums_scattered_as_by_gloo(world: int, is_part: bool) -> None:
    run_world(_both_ways, world, is_part)

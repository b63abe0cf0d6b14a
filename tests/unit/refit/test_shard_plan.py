"""Plans of shards: their promises on random layouts, and refused input."""

from dataclasses import fields, replace

import numpy as np
import pytest

from nemo_rl.refit.layout import TensorMeta
from nemo_rl.refit.shard_plan import Shards
from tests.unit.refit.shard_cases import (
    Case,
    messages_per_bucket,
    peak_send_bytes,
    random_case,
    received_bytes,
    shards_of,
    transferred_bytes,
)


def replicated(num_ranks: int, nodes: list[int], wanting: list[int]) -> Case:
    """Two tensors of 64 bytes that the first `num_ranks` ranks hold, and `wanting` want."""
    metas = [TensorMeta("a", "uint8", (64,)), TensorMeta("b", "uint8", (64,))]
    held = [(rank, tensor, 0, 0, 64) for rank in range(num_ranks) for tensor in range(2)]
    return Case(metas, shards_of(held), {rank: [0, 1] for rank in wanting}, nodes)


def test_receivers_get_what_they_want_in_one_message_of_each_source_for_a_bucket():
    """Where the bytes lie is compared in test_shard_exchange.py."""
    for seed in range(6):
        plan = random_case(seed).plan(512)
        triples = np.stack([plan.bucket, plan.source, plan.receiver], axis=1)
        assert len(np.unique(triples, axis=0)) == len(triples)
        assert messages_per_bucket(plan).sum() == (plan.source != plan.receiver).sum()
        assert received_bytes(plan).tolist() == [plan.layouts[rank].total_bytes for rank in range(plan.world_size)]


def test_a_rank_sends_no_more_at_once_than_two_buckets():
    for bucket_bytes, num_rounds in ((128, 5), (256, 2), (1024, 1)):  # for messages of 144 bytes
        plan = replicated(1, [0] * 6, [1, 2, 3, 4, 5]).plan(bucket_bytes)
        assert plan.num_rounds.tolist() == [num_rounds]
        assert plan.for_rank(0).send_bytes == peak_send_bytes(plan) <= 2 * bucket_bytes


def test_sources_are_the_rank_itself_then_its_node_and_replicas_share_the_load():
    own = replicated(3, [0, 0, 0], [0, 1, 2]).plan(128)
    assert (own.source == own.receiver).all() and transferred_bytes(own).sum() == 0
    near = replicated(2, [0, 1, 1, 0], [2, 3]).plan(128)
    assert dict(zip(near.receiver.tolist(), near.source.tolist(), strict=True)) == {2: 1, 3: 0}
    shared = replicated(4, [0] * 12, list(range(4, 12))).plan(128)
    assert np.bincount(shared.source).tolist() == [2, 2, 2, 2]
    one = replicated(4, [0] * 5, [4]).plan(64)
    assert len(one.source) == 2 and len(set(one.source.tolist())) == 1, "all of one receiver from one replica"


def test_equal_for_any_order_of_the_sources():
    case = random_case(1)
    shuffled = np.random.default_rng(0).permutation(len(case.sources.rank))
    again = replace(case, sources=Shards(*(column[shuffled] for column in case.sources)))
    first, second = case.plan(512), again.plan(512)
    for field in fields(first):
        if isinstance(value := getattr(first, field.name), np.ndarray):
            assert np.array_equal(value, getattr(second, field.name)), field.name


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([(0, 0, 0, 0, 4)], r"m.w \[8, 4\]: the shards .* 0 to 4 of dimension 0"),
        ([(0, 0, 0, 0, 5), (1, 0, 0, 4, 8)], "0 to 5 of dimension 0, 4 to 8 of dimension 0"),
        ([(0, 0, 0, 0, 4), (1, 0, 0, 4, 8), (2, 0, 1, 0, 2), (3, 0, 1, 2, 4)], "2 to 4 of dimension 1"),
        ([(0, 0, 0, 0, 9)], "do not tile it from begin to end: 0 to 9 of dimension 0"),
        ([(0, 0, 0, 0, 4), (0, 0, 0, 4, 8)], "rank 0 holds two shards of m.w"),
    ],
)
def test_what_does_not_fit_together_is_refused(sources, message):
    metas = [TensorMeta("m.w", "float32", (8, 4))]
    with pytest.raises(ValueError, match=message):
        Case(metas, shards_of(sources), {1: [0]}, [0] * 4).plan(128)

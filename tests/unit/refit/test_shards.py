"""Shards of a policy into the buffers that engines read: the plan, who gets which bytes, and the sender over gloo."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_rl.refit.layout import RefitError, TensorMeta, exported
from nemo_rl.refit.shard_plan import TRAILER_BYTES, Shards
from nemo_rl.refit.shard_sender import ExportedShard, ShardExchange, ShardSender
from tests.tables import named
from tests.unit.refit import shard_cases
from tests.unit.refit.shard_cases import Case, random_case, shards_of
from tests.unit.refit.test_weight_transfer import CPU, Link, packing
from tests.worlds import run_world


def replicated(num_ranks: int, nodes: list[int], wanting: list[int]) -> Case:
    """Two tensors of 64 bytes that the first `num_ranks` ranks hold, and `wanting` want."""
    metas = [TensorMeta("a", "uint8", (64,)), TensorMeta("b", "uint8", (64,))]
    held = [(rank, tensor, 0, 0, 64) for rank in range(num_ranks) for tensor in range(2)]
    return Case(metas, shards_of(held), {rank: [0, 1] for rank in wanting}, nodes)


def test_receivers_get_what_they_want_in_one_message_of_each_source_for_a_bucket():
    """Where the bytes lie is compared below."""
    for seed in range(6):
        plan = random_case(seed).plan(512)
        triples = np.stack([plan.bucket, plan.source, plan.receiver], axis=1)
        assert len(np.unique(triples, axis=0)) == len(triples)
        assert shard_cases.messages_per_bucket(plan).sum() == (plan.source != plan.receiver).sum()
        assert shard_cases.received_bytes(plan).tolist() == [layout.total_bytes for layout in plan.layouts]


def test_a_rank_sends_no_more_at_once_than_two_buckets():
    for bucket_bytes, num_rounds in ((128, 5), (256, 2), (1024, 1)):  # for messages of 144 bytes
        plan = replicated(1, [0] * 6, [1, 2, 3, 4, 5]).plan(bucket_bytes)
        assert plan.num_rounds.tolist() == [num_rounds]
        assert plan.for_rank(0).send_bytes == shard_cases.peak_send_bytes(plan) <= 2 * bucket_bytes


def test_sources_are_the_rank_itself_then_its_node_and_replicas_share_the_load():
    own = replicated(3, [0, 0, 0], [0, 1, 2]).plan(128)
    assert (own.source == own.receiver).all() and shard_cases.transferred_bytes(own).sum() == 0
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


@named(
    "sources, message",
    {
        "half is missing": ([(0, 0, 0, 0, 4)], r"m.w \[8, 4\]: the shards .* 0 to 4 of dimension 0"),
        "overlap": ([(0, 0, 0, 0, 5), (1, 0, 0, 4, 8)], "0 to 5 of dimension 0, 4 to 8 of dimension 0"),
        "another dimension": (
            [(0, 0, 0, 0, 4), (1, 0, 0, 4, 8), (2, 0, 1, 0, 2), (3, 0, 1, 2, 4)],
            "2 to 4 of dimension 1",
        ),
        "beyond the end": ([(0, 0, 0, 0, 9)], "do not tile it from begin to end: 0 to 9 of dimension 0"),
        "two shards of a rank": ([(0, 0, 0, 0, 4), (0, 0, 0, 4, 8)], "rank 0 holds two shards of m.w"),
    },
)
def test_what_does_not_fit_together_is_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        Case([TensorMeta("m.w", "float32", (8, 4))], shards_of(sources), {1: [0]}, [0] * 4).plan(128)


def carry(exchanges: list[ShardExchange], bucket: int, halves: list[torch.Tensor]) -> None:
    """What `fill` does on every rank, with messages carried by hand."""
    for number in range(len(exchanges[0].plan.rounds[bucket])):
        sent: dict[tuple[int, int], torch.Tensor] = {}
        for rank, exchange in enumerate(exchanges):
            one, begin = exchange.plan.rounds[bucket][number], 0
            into = halves[rank].new_empty(exchange.plan.send_bytes)
            exchange.pack(one, into)
            for message in one.sends:
                sent[rank, message.peer] = into[begin : begin + message.nbytes]
                begin += message.nbytes
        for rank, exchange in enumerate(exchanges):
            one = exchange.plan.rounds[bucket][number]
            arrived = [sent[message.peer, rank] for message in one.receives]
            exchange.unpack(one, torch.cat([halves[rank][:0], *arrived]), halves[rank])
    for exchange, half in zip(exchanges, halves, strict=True):
        exchange.copy_within(bucket, half)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bucket_bytes", [128, 1000, 1 << 20])
def test_every_byte_of_random_layouts_also_of_shards_that_are_cast(bucket_bytes, device):
    for seed in range(6):
        case = random_case(seed)
        plan, exchanges = case.plan(bucket_bytes), []
        for rank in range(plan.world_size):
            held = {tensor: shard.to(device) for tensor, shard in case.shards(rank).items()}
            if seed == 0:
                held = {t: shard.long() if shard.dtype == torch.uint8 else shard for t, shard in held.items()}
            exchanges.append(ShardExchange(plan.for_rank(rank), held.__getitem__, torch.device(device)))
        checked = 0
        for bucket in range(len(plan.num_rounds)):
            sizes = (exchange.plan.layout.bucket_bytes for exchange in exchanges)
            halves = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
            carry(exchanges, bucket, halves)
            for rank, half in enumerate(halves):
                layout, wanted = plan.layouts[rank], case.wanted_bytes(rank)
                for piece in layout.buckets[bucket] if bucket < len(layout.buckets) else ():
                    found = half[piece.offset : piece.offset + piece.nbytes].cpu()
                    expected = wanted[piece.tensor][piece.start : piece.start + piece.nbytes]
                    assert torch.equal(found, expected), layout.tensors[piece.tensor].name
                    checked += piece.nbytes
        assert checked == shard_cases.received_bytes(plan).sum() > 0


SHAPES = {
    "embed": (40, 12),
    "norm": (12,),
    **{f"experts.{expert}.{part}": (6, 12) for expert in range(8) for part in ("up", "down")},
    "count": (3,),
    "head": (40, 12),
}
KEPT = "norm"  # in its own dtype


def values(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {**drawn, "count": torch.arange(3) + version}


class Policy:
    """Four ranks: two stages (embed; norm, head) of two, which cut dense tensors and share experts."""

    def __init__(self, rank: int, lost: int | None = None) -> None:
        """Rank `lost` has lost its experts."""
        self.rank, self.version, self.lost = rank, 1, lost

    def shards(self) -> list[ExportedShard]:
        held = []
        for name, shape in SHAPES.items():
            whole = (0, 0, shape[0])
            if name.startswith("experts"):
                if int(name.split(".")[1]) // 2 == self.rank != self.lost:
                    held.append(self.shard(name, *whole))
            elif name in ("embed", "head"):
                if (name == "head") == (self.rank >= 2):
                    dim, part = (0, 20) if name == "embed" else (1, 6)
                    held.append(self.shard(name, dim, self.rank % 2 * part, (self.rank % 2 + 1) * part))
            elif self.rank >= 2:
                held.append(self.shard(name, *whole))
        return held

    def shard(self, name: str, dim: int, start: int, stop: int) -> ExportedShard:
        how: Any = {"dtype": torch.int64 if name == "count" else torch.float64, "keeps_dtype": name == KEPT}
        how |= {"local": lambda: values(self.version)[name].narrow(dim, start, stop - start)}
        return ExportedShard(name=name, dim=dim, start=start, stop=stop, **how)

    def sender(self) -> ShardSender:
        how: Any = {"device": CPU, "rank": self.rank, "local_rank": self.rank, "transport": "packed_shm"}
        return ShardSender(list(SHAPES.items()), self.shards(), wire_dtype="float32", bucket_bytes=700, **how)


def same_as_gathering(rank: int) -> None:
    """Into the buffer of rank 0, as one engine that wants everything."""
    policy = Policy(rank)
    sender = policy.sender()
    description = sender.describe()
    assert ("endpoints" in description) == (rank == 0)
    weights = [
        exported(name, lambda name=name: values(policy.version)[name], keeps_dtype=name == KEPT) for name in SHAPES
    ]
    whole = packing(weights, "float32", 700, rank=rank, local_rank=rank)
    assert sender.layout == whole.layout and description["layout_digest"] == whole.describe()["layout_digest"]
    for policy.version in (1, 2):
        for bucket in range(len(whole.layout.buckets)):
            ours, theirs = sender.pack(bucket), whole.pack(bucket)
            assert theirs.keys() - ours.keys() == (
                {"digest"} if rank else set()
            )  # no rank but the first holds a bucket
            assert rank > 0 or ours["fingerprints"] == theirs["fingerprints"]
    if rank == 0:
        ends = Link(sender)
        ends.sync(1)
        want = {name: t if name in (KEPT, "count") else t.float() for name, t in values(2).items()}
        torch.testing.assert_close(ends.own, want, rtol=0, atol=0)
    else:
        for bucket in range(len(sender.layout.buckets)):
            sender.pack(bucket)


class DamagingExchange(ShardExchange):
    def pack(self, one: Any, into: torch.Tensor) -> None:
        super().pack(one, into)
        into[sum(message.nbytes for message in one.sends) - TRAILER_BYTES - 1] ^= 1


def damaged(rank: int) -> str:
    sender = Policy(rank).sender()
    if rank == 3:
        sender._exchange.__class__ = DamagingExchange
    said = ""
    for bucket in range(len(sender.layout.buckets)):
        try:
            sender.pack(bucket)
        except RefitError as error:
            said = said or str(error)
    return said


def test_what_is_sent_is_what_gathering_sends_and_damage_or_a_hole_is_named():
    def on_rank(rank: int, world_size: int) -> str:
        same_as_gathering(rank)
        with pytest.raises(ValueError, match=r"no rank holds 4 of the tensors: experts\.2\.up"):
            Policy(rank, lost=1).sender()
        dist.barrier()
        return damaged(rank)

    first, *others = run_world(on_rank, 4)
    assert others == ["", "", ""]
    assert first.startswith("packed_shm, bucket ") and "rank 0 did not get what rank 3 sent it" in first

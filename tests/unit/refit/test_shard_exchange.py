"""What arrives in every rank's buckets is, byte for byte, what the sources hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemo_rl.refit.shard_plan import ShardPlan
from nemo_rl.refit.shard_sender import ShardDamaged, ShardExchange
from tests.unit.refit.shard_cases import Case, random_case, received_bytes
from tests.worlds import run_world

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exchanges_of(case: Case, plan: ShardPlan, device: str) -> list[ShardExchange]:
    """Those of all ranks, in this process."""
    exchanges = []
    for rank in range(plan.world_size):
        held = {tensor: shard.to(device) for tensor, shard in case.shards(rank).items()}
        exchanges.append(ShardExchange(plan.for_rank(rank), held.__getitem__, torch.device(device)))
    return exchanges


def carry(exchanges: list[ShardExchange], bucket: int, halves: list[torch.Tensor]) -> None:
    """What `fill` does on every rank, with messages carried by hand."""
    device = halves[0].device
    for number in range(len(exchanges[0].plan.rounds[bucket])):
        sent: dict[tuple[int, int], torch.Tensor] = {}
        for rank, exchange in enumerate(exchanges):
            one, begin = exchange.plan.rounds[bucket][number], 0
            into = torch.empty(exchange.plan.send_bytes, dtype=torch.uint8, device=device)
            exchange.pack(one, into)
            for message in one.sends:
                sent[rank, message.peer] = into[begin : begin + message.nbytes]
                begin += message.nbytes
        for rank, exchange in enumerate(exchanges):
            one = exchange.plan.rounds[bucket][number]
            arrived = [sent[message.peer, rank] for message in one.receives]
            nothing = torch.empty(0, dtype=torch.uint8, device=device)
            exchange.unpack(one, torch.cat([nothing, *arrived]), halves[rank])
    for exchange, half in zip(exchanges, halves, strict=True):
        exchange.copy_within(bucket, half)


def assert_bucket(wanted: list[torch.Tensor], exchange: ShardExchange, bucket: int, half: torch.Tensor) -> int:
    """Compare all pieces of a bucket with what the rank wants; the number of bytes."""
    layout = exchange.plan.layout
    pieces = layout.buckets[bucket] if bucket < len(layout.buckets) else ()
    for piece in pieces:
        found = half[piece.offset : piece.offset + piece.nbytes].cpu()
        expected = wanted[piece.tensor][piece.start : piece.start + piece.nbytes]
        assert torch.equal(found, expected), layout.tensors[piece.tensor].name
    return sum(piece.nbytes for piece in pieces)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket_bytes", [192, 1000, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_every_byte_of_random_layouts(seed, bucket_bytes, device):
    case = random_case(seed)
    plan = case.plan(bucket_bytes, 2048)
    exchanges = exchanges_of(case, plan, device)
    wanted = [case.wanted_bytes(rank) for rank in range(plan.world_size)]
    checked = 0
    for bucket in range(len(plan.num_rounds)):
        halves = [torch.full((e.plan.layout.bucket_bytes,), 255, dtype=torch.uint8, device=device) for e in exchanges]
        carry(exchanges, bucket, halves)
        checked += sum(map(assert_bucket, wanted, exchanges, [bucket] * len(halves), halves))
    assert checked == received_bytes(plan).sum() > 0


def fill_all(rank: int, world_size: int, seed: int, bucket_bytes: int) -> int:
    case = random_case(seed, world_size)
    held = case.shards(rank)
    exchange = ShardExchange(case.plan(bucket_bytes, 4096).for_rank(rank), held.__getitem__, torch.device("cpu"))
    layout, checked = exchange.plan.layout, 0
    buffer = torch.full((2 * layout.bucket_bytes,), 255, dtype=torch.uint8)
    for case.version in (1, 2):
        held.update(case.shards(rank))
        wanted = case.wanted_bytes(rank)
        for bucket in range(len(exchange.plan.rounds)):
            half = buffer[layout.half_offset(bucket) :][: layout.bucket_bytes]
            exchange.fill(bucket, half)
            checked += assert_bucket(wanted, exchange, bucket, half)
    return checked


def test_over_gloo_into_two_halves():
    checked = run_world(fill_all, 4, 5, 1000)
    assert checked == [2 * n for n in received_bytes(random_case(5, 4).plan(1000, 4096)).tolist()]
    assert sum(n > 0 for n in checked) == 3  # the last rank only sends


def in_a_group(rank: int, world_size: int) -> list[int]:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return []
    case = random_case(2, 2)
    member = dist.get_rank(group)
    exchange = ShardExchange(
        case.plan(512).for_rank(member), case.shards(member).__getitem__, torch.device("cpu"), group
    )
    counts, wanted = [], case.wanted_bytes(member)
    for bucket in range(len(exchange.plan.rounds)):
        half = torch.zeros(exchange.plan.layout.bucket_bytes, dtype=torch.uint8)
        exchange.fill(bucket, half)
        counts.append(assert_bucket(wanted, exchange, bucket, half))
    return counts


def test_in_a_group_of_some_ranks():
    counts = run_world(in_a_group, 4)
    assert sum(counts[1]) > 0 and counts[0] == counts[2] == []


@pytest.mark.parametrize("device", DEVICES)
def test_shards_are_cast_to_the_dtype_they_travel_in(device):
    case = random_case(0)
    plan = case.plan(1 << 20)
    exchanges = exchanges_of(case, plan, device)
    for rank, exchange in enumerate(exchanges):
        wide = {
            t: s.to(device, torch.int64) if s.dtype == torch.uint8 else s.to(device)
            for t, s in case.shards(rank).items()
        }
        exchanges[rank] = ShardExchange(exchange.plan, wide.__getitem__, torch.device(device))
    halves = [torch.zeros(e.plan.layout.bucket_bytes, dtype=torch.uint8, device=device) for e in exchanges]
    carry(exchanges, 0, halves)
    assert sum(assert_bucket(case.wanted_bytes(e.plan.rank), e, 0, h) for e, h in zip(exchanges, halves, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [0, -1])
def test_a_damaged_message_is_named(place, device):
    case = random_case(4)
    exchanges = exchanges_of(case, case.plan(1 << 20, 1 << 20), device)
    receiver = next(e for e in exchanges if e.plan.rounds[0][0].receives)
    one = receiver.plan.rounds[0][0]
    message = one.receives[0]
    source = exchanges[message.peer]
    sends = source.plan.rounds[0][0].sends
    into = torch.empty(source.plan.send_bytes, dtype=torch.uint8, device=device)
    source.pack(source.plan.rounds[0][0], into)
    begin = sum(m.nbytes for m in sends if m.peer < receiver.plan.rank)
    data = into[begin : begin + message.nbytes].clone()
    half = torch.zeros(receiver.plan.layout.bucket_bytes, dtype=torch.uint8, device=device)
    only = type(one)((), (message,))
    receiver.unpack(only, data, half)
    last = max(move.at for move in message.moves)  # first byte of the last box
    data[last if place else 0] ^= 1
    with pytest.raises(ShardDamaged, match=f"rank {receiver.plan.rank} did not get what rank {message.peer} sent"):
        receiver.unpack(only, data, half)

"""What arrives in every rank's buckets is, byte for byte, what the sources hold."""

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
def test_every_byte_of_random_layouts_also_of_shards_that_are_cast(bucket_bytes, device):
    for seed in range(6):
        case = random_case(seed)
        plan = case.plan(bucket_bytes, 2048)
        exchanges = exchanges_of(case, plan, device)
        if seed == 0:
            for rank, exchange in enumerate(exchanges):
                wide = {
                    t: s.to(device, torch.int64 if s.dtype == torch.uint8 else s.dtype)
                    for t, s in case.shards(rank).items()
                }
                exchanges[rank] = ShardExchange(exchange.plan, wide.__getitem__, torch.device(device))
        wanted, checked = [case.wanted_bytes(rank) for rank in range(plan.world_size)], 0
        for bucket in range(len(plan.num_rounds)):
            sizes = [exchange.plan.layout.bucket_bytes for exchange in exchanges]
            halves = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
            carry(exchanges, bucket, halves)
            checked += sum(map(assert_bucket, wanted, exchanges, [bucket] * len(halves), halves))
        assert checked == received_bytes(plan).sum() > 0


def fill_all(rank: int, world_size: int, ranks: list[int]) -> int | None:
    """Two syncs into both halves of a buffer, in a group of some ranks."""
    group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    member, case = dist.get_rank(group), random_case(5, len(ranks))
    held = case.shards(member)
    plan = case.plan(1000, 4096).for_rank(member)
    exchange = ShardExchange(plan, held.__getitem__, torch.device("cpu"), group)
    layout, checked = exchange.plan.layout, 0
    buffer = torch.full((2 * layout.bucket_bytes,), 255, dtype=torch.uint8)
    for case.version in (1, 2):
        held.update(case.shards(member))
        wanted = case.wanted_bytes(member)
        for bucket in range(len(exchange.plan.rounds)):
            half = buffer[layout.half_offset(bucket) :][: layout.bucket_bytes]
            exchange.fill(bucket, half)
            checked += assert_bucket(wanted, exchange, bucket, half)
    return checked


def test_over_gloo_into_two_halves_in_a_group_of_some_ranks():
    checked = run_world(fill_all, 4, [0, 1, 3])
    assert checked.pop(2) is None
    assert checked == [2 * n for n in received_bytes(random_case(5, 3).plan(1000, 4096)).tolist()]
    assert sum(n > 0 for n in checked) == 2  # the last rank only sends


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

"""Every rank's buckets get the bytes of the sources."""

import pytest
import torch

from nemo_rl.refit.shard_sender import ShardExchange
from tests.unit.refit.shard_cases import random_case, received_bytes


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
    """Compare all pieces of a bucket with the wanted bytes; their number."""
    layout = exchange.plan.layout
    pieces = layout.buckets[bucket] if bucket < len(layout.buckets) else ()
    for piece in pieces:
        found = half[piece.offset : piece.offset + piece.nbytes].cpu()
        expected = wanted[piece.tensor][piece.start : piece.start + piece.nbytes]
        assert torch.equal(found, expected), layout.tensors[piece.tensor].name
    return sum(piece.nbytes for piece in pieces)


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
        wanted, checked = [case.wanted_bytes(rank) for rank in range(plan.world_size)], 0
        for bucket in range(len(plan.num_rounds)):
            sizes = [exchange.plan.layout.bucket_bytes for exchange in exchanges]
            halves = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
            carry(exchanges, bucket, halves)
            checked += sum(map(assert_bucket, wanted, exchanges, [bucket] * len(halves), halves))
        assert checked == received_bytes(plan).sum() > 0

"""Weights from shards into the buffers that engines read, over gloo, with the receivers of a real refit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl.refit.layout import RefitError, exported
from nemo_rl.refit.shard_plan import TRAILER_BYTES
from nemo_rl.refit.shard_sender import ExportedShard, ShardExchange, ShardSender
from tests.unit.refit.test_weight_transfer import CPU, Link, packing
from tests.worlds import run_world

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

    def __init__(self, rank: int) -> None:
        self.rank, self.version = rank, 1

    def shards(self) -> list[ExportedShard]:
        held = []
        for name, shape in SHAPES.items():
            whole = (0, 0, shape[0])
            if name.startswith("experts"):
                if int(name.split(".")[1]) // 2 == self.rank:
                    held.append(self.shard(name, *whole))
            elif name in ("embed", "head"):
                if (name == "head") == (self.rank >= 2):
                    dim, part = (0, 20) if name == "embed" else (1, 6)
                    held.append(self.shard(name, dim, self.rank % 2 * part, (self.rank % 2 + 1) * part))
            elif self.rank >= 2:
                held.append(self.shard(name, *whole))
        return held

    def shard(self, name: str, dim: int, start: int, stop: int) -> ExportedShard:
        return ExportedShard(
            name=name,
            dtype=torch.int64 if name == "count" else torch.float64,
            dim=dim,
            start=start,
            stop=stop,
            local=lambda: values(self.version)[name].narrow(dim, start, stop - start),
            keeps_dtype=name == KEPT,
        )

    def sender(self) -> ShardSender:
        return ShardSender(
            list(SHAPES.items()),
            self.shards(),
            device=CPU,
            rank=self.rank,
            local_rank=self.rank,
            transport="packed_shm",
            wire_dtype="float32",
            bucket_bytes=700,
        )


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
            assert ours.keys() == theirs.keys()
            assert rank > 0 or ours["fingerprints"] == theirs["fingerprints"]
    if rank == 0:
        ends = Link(sender)
        ends.sync(1)
        want = {name: t if name in (KEPT, "count") else t.float() for name, t in values(2).items()}
        torch.testing.assert_close(ends.own, want, rtol=0, atol=0)
    else:
        for bucket in range(len(sender.layout.buckets)):
            sender.pack(bucket)


class Damaging(ShardExchange):
    def pack(self, one: Any, into: torch.Tensor) -> None:
        super().pack(one, into)
        into[sum(message.nbytes for message in one.sends) - TRAILER_BYTES - 1] ^= 1


def damaged(rank: int) -> str:
    sender = Policy(rank).sender()
    if rank == 3:
        sender._exchange.__class__ = Damaging
    said = ""
    for bucket in range(len(sender.layout.buckets)):
        try:
            sender.pack(bucket)
        except RefitError as error:
            said = said or str(error)
    return said


class WithHole(Policy):
    """Rank 1 has lost its experts."""

    def shards(self) -> list[ExportedShard]:
        return [shard for shard in super().shards() if self.rank != 1 or not shard.name.startswith("experts")]


def incomplete(rank: int) -> None:
    with pytest.raises(ValueError, match=r"no rank holds 4 of the tensors: experts\.2\.up"):
        WithHole(rank).sender()
    dist.barrier()


def test_what_is_sent_is_what_gathering_sends_and_damage_or_a_hole_is_named():
    def on_rank(rank: int, world_size: int) -> str:
        same_as_gathering(rank)
        incomplete(rank)
        return damaged(rank)

    first, *others = run_world(on_rank, 4)
    assert others == ["", "", ""]
    assert first.startswith("packed_shm, bucket ") and "rank 0 did not get what rank 3 sent it" in first

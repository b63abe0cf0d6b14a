"""Sends weights from every rank's shards straight into the buffers that generation reads.

`WeightSender` gathers each tensor on every rank. Here the ranks agree once on a plan (`shard_plan`), and a bucket then
costs one exchange: ranks with a buffer receive the bytes of their bucket, and no rank ever holds a whole tensor. The
layout, the buckets and the fingerprints are the same as in `WeightSender`.

An exchange is one `all_to_all_single` (or several, if the plan says so) between two staging buffers that are allocated
once. A source writes the slices that a receiver needs one after the other into its message, in their wire dtype, and
then the fingerprint of the message; the receiver verifies it and copies every slice to its place.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl.refit.buffers import host_key
from nemo_rl.refit.fingerprint import fingerprints
from nemo_rl.refit.layout import TensorMeta
from nemo_rl.refit.shard_plan import TRAILER_BYTES, LocalShardPlan, Message, Move, Round, Shards, build_plan
from nemo_rl.refit.transfer import Sender


@dataclass(frozen=True, kw_only=True)
class ExportedShard:
    """This rank's part of a tensor: indices `start` to `stop` of dimension `dim`, and all of the other dimensions.

    `local()` returns the shard, now and at every later sync, on the rank's device, strided or not. `dtype` and
    `keeps_dtype` as in `ExportedTensor`.
    """

    name: str
    dtype: torch.dtype
    dim: int
    start: int
    stop: int
    local: Callable[[], torch.Tensor]
    keeps_dtype: bool = False


class ShardSender(Sender):
    """One policy rank's part in sending weights. Construction and `pack` are collectives over all ranks.

    `tensors`: names and full shapes of all tensors, equal on every rank, in the order they are sent in. `shards`: what
    this rank holds of them; together the ranks hold everything. For `settings` see `Sender`.

    Raises:
        ValueError: the shards of all ranks do not make up the tensors.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, tuple[int, ...]]],
        shards: Sequence[ExportedShard],
        *,
        device: torch.device,
        **settings: Any,
    ) -> None:
        self._tensors, self._shards = tensors, shards
        self._numbers = {name: number for number, (name, _) in enumerate(tensors)}
        self._offers: list[Any] = [None] * dist.get_world_size()
        super().__init__(device=device, **settings)
        # Every rank makes the whole plan by itself: to send one around would cost more than to compute it.
        nodes = sorted({offer.node for offer in self._offers})
        plan = build_plan(
            self.layout.tensors,
            Shards(*map(np.concatenate, zip(*(offer.shards for offer in self._offers), strict=True))),
            {number: range(len(tensors)) for number, offer in enumerate(self._offers) if offer.has_buffer},
            nodes=[nodes.index(offer.node) for offer in self._offers],
            bucket_bytes=self.layout.bucket_bytes,
        )
        local = {self._numbers[shard.name]: shard.local for shard in shards}
        self._exchange = ShardExchange(plan.for_rank(self._rank), lambda number: local[number](), device)

    def _describe_tensors(self, wire: torch.dtype) -> list[TensorMeta]:
        """Exchange offers with all ranks. The holders of a tensor must agree on its dtype."""
        shards = self._shards
        dtypes = [wire if s.dtype.is_floating_point and not s.keeps_dtype else s.dtype for s in shards]
        rows = [(self._rank, self._numbers[s.name], s.dim, s.start, s.stop) for s in shards]
        own = _Offer(
            node=host_key(),
            shards=Shards(*np.array(rows, dtype=np.int64).reshape(len(rows), 5).T),
            dtypes=[str(dtype).removeprefix("torch.") for dtype in dtypes],
            has_buffer=self._has_buffer,
        )
        dist.all_gather_object(self._offers, own)
        agreed: dict[int, str] = {}
        for offer in self._offers:
            for number, dtype in zip(offer.shards.tensor.tolist(), offer.dtypes, strict=True):
                if agreed.setdefault(number, dtype) != dtype:
                    raise ValueError(f"{self._tensors[number][0]}: ranks hold it as {agreed[number]} and as {dtype}")
        missing = [name for number, (name, _) in enumerate(self._tensors) if number not in agreed]
        if missing:
            raise ValueError(f"no rank holds {len(missing)} of the tensors: {', '.join(missing[:10])}")
        return [TensorMeta(name, agreed[number], shape) for number, (name, shape) in enumerate(self._tensors)]

    def _fill(self, bucket: int, half: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Buckets may come in any order."""
        before = time.perf_counter()
        self._exchange.fill(bucket, half)
        gather_s = time.perf_counter() - before
        pieces = self.layout.buckets[bucket] if self._has_buffer else ()
        return gather_s, fingerprints([half[piece.offset : piece.offset + piece.nbytes] for piece in pieces])


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """A rank's message to the others: its node, its shards with their wire dtypes, and whether it has a buffer."""

    node: str
    shards: Shards
    dtypes: list[str]
    has_buffer: bool


class ShardDamaged(ConnectionError):
    """A message is not what its source sent. The text names both ranks and the tensors in it."""


class ShardExchange:
    """Carries out a plan on one rank: `fill(bucket, half)` for each of `plan.rounds`, on every rank.

    `local(tensor)` returns this rank's shard of tensor number `tensor`, on `device`, strided or not. Memory:
    `LocalShardPlan.send_bytes` and `receive_bytes`.
    """

    def __init__(self, plan: LocalShardPlan, local: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self.plan = plan
        self._local = local
        self._sent = torch.zeros(plan.send_bytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros(plan.receive_bytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def fill(self, bucket: int, half: torch.Tensor) -> None:
        """Assemble bucket number `bucket` of this rank in `half` (uint8, as large as a bucket). A collective.

        A rank with fewer buckets only sends to the others, and `half` does not change. ShardDamaged if a message
        arrives with other bytes than it was sent with.
        """
        self.copy_within(bucket, half)  # what is here already travels nowhere
        for one in self.plan.rounds[bucket]:  # several: a source never sends more than its send buffer holds
            self.pack(one, self._sent)
            sizes_in, sizes_out = self._sizes(one.receives), self._sizes(one.sends)
            arriving, leaving = self._received[: sum(sizes_in)], self._sent[: sum(sizes_out)]
            dist.all_to_all_single(arriving, leaving, sizes_in, sizes_out)
            self.unpack(one, arriving, half)

    def copy_within(self, bucket: int, half: torch.Tensor) -> None:
        """Copy what this rank itself holds of bucket number `bucket` to its place in `half`."""
        for move in self.plan.within[bucket]:
            self._target(move, half).copy_(self._source(move))

    def pack(self, one: Round, into: torch.Tensor) -> None:
        """Write the messages of a round one after the other into `into` (uint8)."""
        begin = 0
        for message in one.sends:
            data = into[begin : begin + message.nbytes]
            for move in message.moves:
                source, dtype = self._source(move), self.plan.tensors[move.tensor].torch_dtype
                target = data[move.at : move.at + source.numel() * dtype.itemsize]
                target.view(dtype).view(source.shape).copy_(source)  # casts to the dtype that travels
            data[-TRAILER_BYTES:].view(torch.int64)[0] = fingerprints([data[:-TRAILER_BYTES]])[0]
            begin += message.nbytes

    def unpack(self, one: Round, arrived: torch.Tensor, half: torch.Tensor) -> None:
        """Verify the messages of a round, which lie behind each other in `arrived`, and copy their slices to `half`."""
        if not one.receives:
            return
        messages = arrived.split([message.nbytes for message in one.receives])
        sent = torch.stack([data[-TRAILER_BYTES:].view(torch.int64)[0] for data in messages])
        # All messages at once, and one wait for the device: single comparisons would wait for each.
        differs = fingerprints([data[:-TRAILER_BYTES] for data in messages]) != sent
        for message, is_damaged in zip(one.receives, differs.tolist(), strict=True):
            if is_damaged:
                first, last = (self.plan.tensors[message.moves[end].tensor].name for end in (0, -1))
                raise ShardDamaged(
                    f"rank {self.plan.rank} did not get what rank {message.peer} sent it: a message of "
                    f"{message.nbytes} bytes ({first} to {last})"
                )
        for message, data in zip(one.receives, messages, strict=True):
            for move in message.moves:
                target = self._target(move, half)
                part = data[move.at : move.at + target.numel() * target.itemsize]
                target.copy_(part.view(target.dtype).view(target.shape))

    def _sizes(self, messages: Sequence[Message]) -> list[int]:
        nbytes = {message.peer: message.nbytes for message in messages}
        return [nbytes.get(peer, 0) for peer in range(self.plan.world_size)]

    def _source(self, move: Move) -> torch.Tensor:
        """The slice of this rank's shard."""
        shard = self._local(move.tensor)
        for dim, (start, size) in enumerate(zip(move.local, move.size, strict=True)):
            if size != shard.shape[dim]:
                shard = shard.narrow(dim, start, size)
        return shard

    def _target(self, move: Move, half: torch.Tensor) -> torch.Tensor:
        """The slice's place in this rank's bucket."""
        dtype = self.plan.tensors[move.tensor].torch_dtype
        offset = (int(half.storage_offset()) + move.offset) // dtype.itemsize
        return half.view(dtype).as_strided(move.size, move.strides, offset)

"""Carries out a plan of shards: every rank's part of the weights comes together in its own bucket.

    exchange = ShardExchange(plan.for_rank(rank), local, device, group)
    for bucket in range(exchange.num_buckets):      # on every rank of the group
        exchange.fill(bucket, half)

A bucket costs one `all_to_all_single` (more where the plan says so), between two staging buffers that are made once. A
source writes the slices a receiver needs behind one another into its message, cast to the dtype they travel in, and
the fingerprint of the message behind them; the receiver checks it and copies every slice to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from nemo_rl.refit.fingerprint import host_fingerprint, word_fingerprint
from nemo_rl.refit.shard_plan import TRAILER_BYTES, Message, Move, RankPlan, Round

_WORD = 1 << 64


class ShardDamaged(RuntimeError):
    """A message is not what its source sent; the text names both ranks and the tensors in it."""


class ShardExchange:
    """One rank's side. `local(tensor)` gives this rank's shard of tensor number `tensor`, on `device`, strided or not.

    `group` numbers its members as the plan does (None: all ranks). Memory: `RankPlan.send_bytes` and `receive_bytes`,
    which the plan limits to what it was asked for and one bucket.
    """

    def __init__(
        self,
        plan: RankPlan,
        local: Callable[[int], torch.Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan = plan
        self._local = local
        self._group = group
        self._dtypes = {meta.dtype: meta.torch_dtype for meta in plan.tensors}
        self._sent = torch.zeros(plan.send_bytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros(plan.receive_bytes, dtype=torch.uint8, device=device)

    @property
    def num_buckets(self) -> int:
        """How often every rank must call `fill`; the rank's own buckets are the first of them."""
        return len(self.plan.rounds)

    @torch.no_grad()
    def fill(self, bucket: int, half: torch.Tensor) -> None:
        """Bring bucket number `bucket` of this rank together in `half` (uint8, as large as a bucket). A collective.

        A rank that has fewer buckets helps the others, and `half` stays as it is. ShardDamaged when a message arrives
        other than it was sent.
        """
        self.place_own(bucket, half)
        for one in self.plan.rounds[bucket]:
            self.pack(one, self._sent)
            arriving = self._received[: sum(message.nbytes for message in one.receives)]
            leaving = self._sent[: sum(message.nbytes for message in one.sends)]
            sizes_in, sizes_out = self._sizes(one.receives), self._sizes(one.sends)
            dist.all_to_all_single(arriving, leaving, sizes_in, sizes_out, group=self._group)
            self.unpack(one, arriving, half)

    def place_own(self, bucket: int, half: torch.Tensor) -> None:
        """Copy what this rank has itself of bucket number `bucket` to its place in `half`."""
        for move in self.plan.within[bucket]:
            self._place(move, half).copy_(self._box(move))

    def pack(self, one: Round, into: torch.Tensor) -> None:
        """Write the messages of a round behind one another into `into` (uint8)."""
        begin = 0
        for message in one.sends:
            data = into[begin : begin + message.nbytes]
            for move in message.moves:
                box = self._box(move)
                target = data[move.at : move.at + box.numel() * self._dtype(move).itemsize]
                target.view(self._dtype(move)).view(box.shape).copy_(box)
            _write_fingerprint(data)
            begin += message.nbytes

    def unpack(self, one: Round, arrived: torch.Tensor, half: torch.Tensor) -> None:
        """Check the messages of a round, which lie behind one another in `arrived`, and put every box to its place."""
        begin, messages = 0, []
        for message in one.receives:
            messages.append(arrived[begin : begin + message.nbytes])
            begin += message.nbytes
        for message, is_sound in zip(one.receives, _are_sound(messages), strict=True):
            if not is_sound:
                raise ShardDamaged(self._damage(message))
        for message, data in zip(one.receives, messages, strict=True):
            for move in message.moves:
                place = self._place(move, half)
                part = data[move.at : move.at + place.numel() * place.itemsize]
                place.copy_(part.view(place.dtype).view(place.shape))

    def _sizes(self, messages: Sequence[Message]) -> list[int]:
        sizes = [0] * self.plan.world_size
        for message in messages:
            sizes[message.peer] = message.nbytes
        return sizes

    def _dtype(self, move: Move) -> torch.dtype:
        return self._dtypes[self.plan.tensors[move.tensor].dtype]

    def _box(self, move: Move) -> torch.Tensor:
        """The box in this rank's shard."""
        box = self._local(move.tensor)
        for dim, (start, size) in enumerate(zip(move.local, move.size, strict=True)):
            if size != box.shape[dim]:
                box = box.narrow(dim, start, size)
        return box

    def _place(self, move: Move, half: torch.Tensor) -> torch.Tensor:
        """The box in this rank's bucket."""
        dtype = self._dtype(move)
        return half.view(dtype).as_strided(
            move.size, move.strides, (int(half.storage_offset()) + move.offset) // dtype.itemsize
        )

    def _damage(self, message: Message) -> str:
        first, last = (self.plan.tensors[message.moves[end].tensor].name for end in (0, -1))
        return (
            f"rank {self.plan.rank} did not get what rank {message.peer} sent it: a message of {message.nbytes} bytes "
            f"({first} to {last})"
        )


def _write_fingerprint(message: torch.Tensor) -> None:
    payload, trailer = message[:-TRAILER_BYTES], message[-TRAILER_BYTES:].view(torch.int64)
    if message.is_cpu:
        value = host_fingerprint(payload.data_ptr(), payload.numel())
        trailer[0] = value - _WORD if value >= _WORD // 2 else value
    else:
        trailer[0] = word_fingerprint(payload)


def _are_sound(messages: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each message still has its fingerprint. Waits for a device once."""
    if not messages:
        return []
    if messages[0].is_cpu:
        return [
            host_fingerprint(data.data_ptr(), data.numel() - TRAILER_BYTES)
            == data[-TRAILER_BYTES:].view(torch.int64)[0].item() % _WORD
            for data in messages
        ]
    equal = [word_fingerprint(d[:-TRAILER_BYTES]) == d[-TRAILER_BYTES:].view(torch.int64)[0] for d in messages]
    return torch.stack(equal).tolist()

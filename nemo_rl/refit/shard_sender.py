"""Packs weights from every rank's shards straight into the buffers that generation reads.

`WeightSender` gathers each tensor on every rank. Here the ranks agree once on a plan (`shard_plan`), and a bucket then
costs one exchange between them: who has a buffer gets the bytes that lie in its bucket, and no rank ever holds a whole
tensor or sends to one that has no buffer. What is sent is the same: layout, buckets, fingerprints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from nemo_rl.refit.buffers import TransferBuffer, host_key
from nemo_rl.refit.collective import Rendezvous
from nemo_rl.refit.fingerprint import host_fingerprint, pack_fingerprints, word_fingerprint
from nemo_rl.refit.layout import NUM_HALVES, PackLayout, TensorMeta, choose_bucket_bytes
from nemo_rl.refit.shard_exchange import ShardDamaged, ShardExchange
from nemo_rl.refit.shard_plan import Ints, Shards, build_plan
from nemo_rl.refit.transfer import RefitError, Transport, create_buffer


@dataclass(frozen=True, kw_only=True)
class ExportedShard:
    """What this rank holds of a tensor: indices `start` to `stop` of dimension `dim`, and all of the others.

    `local()` gives it, now and at every later sync, on the rank's device and strided or not. `dtype` and `keeps_dtype`
    as in `ExportedTensor`.
    """

    name: str
    dtype: torch.dtype
    dim: int
    start: int
    stop: int
    local: Callable[[], torch.Tensor]
    keeps_dtype: bool = False


class ShardSender:
    """One policy rank's part in sending weights; takes the place of a `WeightSender`.

    `tensors`: names and full shapes of all tensors, equal on every rank, in the order they are sent in. `shards`: what
    this rank holds of them; together the ranks hold everything. `wanted`: the names that the receiver at this rank's
    buffer wants (its own experts and all that is no expert's, say); None: all. The other arguments are those of
    `WeightSender`. Construction and `pack` are collectives over all ranks.

    ValueError when the shards of all ranks do not make up the tensors.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, tuple[int, ...]]],
        shards: Sequence[ExportedShard],
        *,
        device: torch.device,
        rank: int,
        local_rank: int,
        transport: Transport,
        wire_dtype: str,
        bucket_bytes: int | None = None,
        rendezvous: Rendezvous | None = None,
        wanted: Collection[str] | None = None,
    ) -> None:
        self._rank = rank
        self._transport: Transport = transport
        self._has_own_layout = wanted is not None
        sends = {"packed_ipc": True, "packed_shm": local_rank == 0, "packed_collective": rank == 0}[transport]
        numbers = {name: number for number, (name, _) in enumerate(tensors)}
        wire = TensorMeta("", wire_dtype, ()).torch_dtype
        own = _Offer(
            node=host_key(),
            tensor=np.array([numbers[s.name] for s in shards], dtype=np.int64),
            dim=np.array([s.dim for s in shards], dtype=np.int64),
            lo=np.array([s.start for s in shards], dtype=np.int64),
            hi=np.array([s.stop for s in shards], dtype=np.int64),
            dtypes=[str(_wire(s, wire)).removeprefix("torch.") for s in shards],
            wanted=_numbers(numbers, wanted),
            has_buffer=sends,
        )
        offers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(offers, own)
        metas = _metas(tensors, offers)
        preferred = choose_bucket_bytes(metas)
        chosen = preferred if bucket_bytes is None else min(preferred, bucket_bytes)
        self.layout = PackLayout.build([metas[number] for number in own.wanted.tolist()], chosen)
        hosts = sorted({offer.node for offer in offers})
        plan = build_plan(
            metas,
            Shards.concatenate([offer.shards(number) for number, offer in enumerate(offers)]),
            Shards.concatenate([offer.wants(number, metas) for number, offer in enumerate(offers)]),
            nodes=[hosts.index(offer.node) for offer in offers],
            bucket_bytes=self.layout.bucket_bytes,
        )
        held = {numbers[shard.name]: shard.local for shard in shards}
        self._exchange = ShardExchange(plan.for_rank(rank), lambda number: held[number](), device)
        self._buffer = create_buffer(transport, self.layout.buffer_bytes, device, rendezvous) if sends else None
        self._no_half = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def num_buckets(self) -> int:
        """How often every rank must call `pack`: the buckets of the rank that has most."""
        return self._exchange.num_buckets

    def metadata(self) -> list[TensorMeta]:
        """What this rank's receiver gets, in order."""
        return list(self.layout.tensors)

    def describe(self) -> dict[str, Any]:
        """As `WeightSender.describe`; where receivers want different tensors, every rank adds its own layout."""
        description: dict[str, Any] = {"rank": self._rank, "layout_digest": self.layout.digest()}
        if self._rank == 0 or self._has_own_layout:
            description["layout"] = self.layout.to_dict()
        if self._buffer is not None:
            description["endpoints"] = {self._buffer.key: self._buffer.endpoint()}
        return description

    @torch.no_grad()
    def pack(self, bucket: int) -> dict[str, Any]:
        """As `WeightSender.pack`; `gather_s` is the exchange. Buckets may come in any order.

        Where receivers want different tensors, every rank with a buffer returns the fingerprints of its own bucket.
        RefitError when a rank did not get what another sent it, or an engine has left the collective.
        """
        started = time.perf_counter()
        result: dict[str, Any] = {"rank": self._rank, "bucket": bucket}
        try:
            if self._buffer is None or bucket >= len(self.layout.buckets):
                self._exchange.fill(bucket, self._no_half)
                result["gather_s"] = time.perf_counter() - started
            else:
                result |= self._fill(bucket, self._buffer)
        except (ConnectionError, ShardDamaged) as error:
            raise RefitError(f"{self._transport}, bucket {bucket}: {error}") from error
        result["pack_s"] = time.perf_counter() - started
        return result

    def close(self) -> None:
        """Free the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _fill(self, bucket: int, buffer: TransferBuffer) -> dict[str, Any]:
        half, begin = bucket % NUM_HALVES, self.layout.half_offset(bucket)
        buffer.await_free(half)
        data = buffer.bytes[begin : begin + self.layout.bucket_bytes]
        started = time.perf_counter()
        self._exchange.fill(bucket, data)
        gather_s = time.perf_counter() - started
        blob = pack_fingerprints(self._fingerprints(bucket, data))
        buffer.filled(half, self.layout.used_bytes(bucket))
        result: dict[str, Any] = {"gather_s": gather_s, "digest": xxhash.xxh3_64_hexdigest(blob)}
        return result | ({"fingerprints": blob} if self._rank == 0 or self._has_own_layout else {})

    def _fingerprints(self, bucket: int, data: torch.Tensor) -> list[int]:
        pieces = self.layout.buckets[bucket]
        if data.is_cpu:
            return [host_fingerprint(data.data_ptr() + piece.offset, piece.nbytes) for piece in pieces]
        found = [word_fingerprint(data[piece.offset : piece.offset + piece.nbytes]) for piece in pieces]
        return [value % (1 << 64) for value in torch.stack(found).tolist()] if found else []


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """What a rank tells the others: its shards (a row each), what it wants, where it is."""

    node: str
    tensor: Ints
    dim: Ints
    lo: Ints
    hi: Ints
    dtypes: list[str]
    wanted: Ints
    has_buffer: bool

    def shards(self, rank: int) -> Shards:
        return Shards(np.full(len(self.tensor), rank), self.tensor, self.dim, self.lo, self.hi)

    def wants(self, rank: int, metas: Sequence[TensorMeta]) -> Shards:
        wanted = self.wanted if self.has_buffer else self.wanted[:0]
        return Shards.whole(metas, np.full(len(wanted), rank), wanted)


def _wire(shard: ExportedShard, wire: torch.dtype) -> torch.dtype:
    return wire if shard.dtype.is_floating_point and not shard.keeps_dtype else shard.dtype


def _numbers(numbers: dict[str, int], wanted: Collection[str] | None) -> Ints:
    if wanted is None:
        return np.arange(len(numbers))
    unknown = sorted(set(wanted) - numbers.keys())
    assert not unknown, f"wanted, but not sent: {unknown[:10]}"
    return np.array(sorted(numbers[name] for name in wanted), dtype=np.int64)


def _metas(tensors: Sequence[tuple[str, tuple[int, ...]]], offers: Sequence[_Offer]) -> list[TensorMeta]:
    """With the dtype that the holders of a tensor agree on."""
    dtypes: dict[int, str] = {}
    for offer in offers:
        for number, dtype in zip(offer.tensor.tolist(), offer.dtypes, strict=True):
            if dtypes.setdefault(number, dtype) != dtype:
                raise ValueError(f"{tensors[number][0]}: ranks hold it as {dtypes[number]} and as {dtype}")
    missing = [name for number, (name, _) in enumerate(tensors) if number not in dtypes]
    if missing:
        raise ValueError(f"no rank holds {len(missing)} of the tensors: {', '.join(missing[:10])}")
    return [TensorMeta(name, dtypes[number], shape) for number, (name, shape) in enumerate(tensors)]

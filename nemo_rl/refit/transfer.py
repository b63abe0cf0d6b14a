"""Weights from a training process to generation processes, and the proof that they arrived.

Names, shapes, dtypes and offsets are agreed once (`PackLayout`); a sync then moves bytes through two halves of one
buffer and says of each bucket only its fingerprints. Bucket i goes into half i % 2, so the sender fills one half while
the receiver empties the other.

    sender:   sender = WeightSender(...); description = sender.describe(); sender.pack(0); sender.pack(1); ...
    receiver: receiver = WeightReceiver(layout, transport, attach_buffer(...)); receiver.begin(version, ...)
              receiver.receive(0, fingerprints); ...; receiver.finish()

Every byte enters a fingerprint: at the sender it is taken of the source tensor (after the cast to the wire dtype), at
the receiver of the bytes it hands to the model.

Where the layout has adapters, the first sync sends the base weights and the adapters, and later ones may begin at the
first bucket of adapters: the receiver adds them to the base weights it has kept.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import xxhash

from nemo_rl.refit.adapter_merge import AdapterMerger
from nemo_rl.refit.buffers import CudaIpcBuffer, SharedMemoryBuffer, TransferBuffer, device_key, host_key
from nemo_rl.refit.collective import KEY, CollectiveBuffer, Rendezvous
from nemo_rl.refit.fingerprint import (
    hash_and_copy,
    host_fingerprint,
    pack_fingerprints,
    unpack_fingerprints,
    word_fingerprint,
)
from nemo_rl.refit.layout import NUM_HALVES, ExportedTensor, PackLayout, Piece, Segment, TensorMeta, choose_bucket_bytes

Transport = Literal["packed_shm", "packed_ipc", "packed_collective"]


class RefitError(RuntimeError):
    """Generation does not hold the policy's weights. The message names transport, version, bucket and tensor."""


# -- buffers by transport


def create_buffer(
    transport: Transport, nbytes: int, device: torch.device, rendezvous: Rendezvous | None = None
) -> TransferBuffer:
    """The sender's buffer. `device` is where the policy lives; `rendezvous` is that of a collective."""
    if transport == "packed_collective":
        assert rendezvous is not None, "a collective needs to know whom to wait for"
        return CollectiveBuffer.create(nbytes, device, rendezvous)
    return CudaIpcBuffer.create(nbytes, device) if transport == "packed_ipc" else SharedMemoryBuffer.create(nbytes)


def attach_buffer(
    transport: Transport, endpoints: dict[str, dict[str, Any]], device: torch.device, receiver: int = 0
) -> TransferBuffer:
    """The receiver's view of the buffer offered at its own place, or its part in the collective as number `receiver`.

    RefitError when no sender is there.
    """
    if transport == "packed_collective":
        try:
            return CollectiveBuffer.attach(endpoints[KEY], device, receiver)
        except ConnectionError as error:
            raise RefitError(f"{transport}: rank {receiver} of the engines cannot join the policy: {error}") from error
    key = device_key(device) if transport == "packed_ipc" else host_key()
    if key not in endpoints:
        place = "GPU" if transport == "packed_ipc" else "node"
        raise RefitError(
            f"{transport}: no policy worker shares this {place} ({key}); policy workers are on {sorted(endpoints)}. "
            "Place generation on the policy's nodes and devices (colocated)."
        )
    if transport == "packed_ipc":
        return CudaIpcBuffer.attach(endpoints[key], device)
    return SharedMemoryBuffer.attach(endpoints[key])


# -- sender


class WeightSender:
    """Packs the weights of one policy rank, bucket by bucket.

    `weights` are the same on every rank, in the same order. Every rank must call `pack` for every bucket: gathering is
    a collective. One tensor at a time is gathered, and one that spans buckets is gathered once. Through shared memory
    one rank of each node (`local_rank` 0) copies; through CUDA IPC every rank fills the buffer of its own device; into
    a collective, which meets at `rendezvous`, rank 0 sends.
    Floating-point tensors are cast to `wire_dtype` (torch's name), a shard before its gather, unless they keep their
    dtype; adapters travel in float32. `bucket_bytes` is an upper limit: small models get smaller buckets.
    """

    def __init__(
        self,
        weights: Sequence[ExportedTensor],
        *,
        device: torch.device,
        rank: int,
        local_rank: int,
        transport: Transport,
        wire_dtype: str,
        bucket_bytes: int | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._weights = weights
        self._wire_dtype = TensorMeta("", wire_dtype, ()).torch_dtype
        self._rank = rank
        self._transport: Transport = transport
        metas = [TensorMeta(w.name, str(self._wire(w)).removeprefix("torch."), w.shape, w.adapts) for w in weights]
        preferred = choose_bucket_bytes(metas)
        self.layout = PackLayout.build(metas, preferred if bucket_bytes is None else min(preferred, bucket_bytes))
        sends = {"packed_ipc": True, "packed_shm": local_rank == 0, "packed_collective": rank == 0}[transport]
        self._buffer = create_buffer(transport, self.layout.buffer_bytes, device, rendezvous) if sends else None
        self._dtypes = [meta.torch_dtype for meta in self.layout.tensors]
        self._next_bucket = 0
        self._current = torch.empty(0)  # the tensor that is being packed, gathered
        self._gather_s = 0.0

    def metadata(self) -> list[TensorMeta]:
        """What travels, in order. Nothing is gathered for it."""
        return list(self.layout.tensors)

    def describe(self) -> dict[str, Any]:
        """Once, for the controller: digest of the layout, the layout itself from rank 0, the buffer where one is."""
        description: dict[str, Any] = {"rank": self._rank, "layout_digest": self.layout.digest()}
        if self._rank == 0:
            description["layout"] = self.layout.to_dict()
        if self._buffer is not None:
            description["endpoints"] = {self._buffer.key: self._buffer.endpoint()}
        return description

    @torch.no_grad()
    def pack(self, bucket: int) -> dict[str, Any]:
        """Fill bucket number `bucket`; buckets come in order, and 0 or the first of adapters begins a new sync.

        The receiver must have done with bucket - 2, which lay in the same half; a collective waits for that itself.
        Returns the seconds it took, from a rank that copies a digest of the fingerprints, and from rank 0 the
        fingerprints (uint64, one per piece). RefitError when an engine has left the collective.
        """
        if bucket in (0, self.layout.num_base_buckets):
            self._next_bucket = bucket
        assert bucket == self._next_bucket, f"bucket {bucket} out of order, expected {self._next_bucket}"
        self._next_bucket += 1
        self._gather_s, started = 0.0, time.perf_counter()
        digests: list[int] = []
        if self._buffer is None:
            for piece in self.layout.buckets[bucket]:
                if piece.start == 0:
                    self._advance(piece.tensor)
        else:
            digests = self._fill(bucket, self._buffer)
        if bucket == len(self.layout.buckets) - 1:
            self._current = torch.empty(0)
        result: dict[str, Any] = {"rank": self._rank, "bucket": bucket, "gather_s": self._gather_s}
        if self._buffer is not None:
            blob = pack_fingerprints(digests)
            result["digest"] = xxhash.xxh3_64_hexdigest(blob)
            if self._rank == 0:
                result["fingerprints"] = blob
        result["pack_s"] = time.perf_counter() - started
        return result

    def close(self) -> None:
        """Free the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _wire(self, weight: ExportedTensor) -> torch.dtype:
        if weight.adapts is not None:
            return torch.float32
        is_cast = weight.dtype.is_floating_point and not weight.keeps_dtype
        return self._wire_dtype if is_cast else weight.dtype

    def _advance(self, index: int) -> None:
        before = time.perf_counter()
        self._current = self._weights[index].gather(self._dtypes[index])
        self._gather_s += time.perf_counter() - before
        assert self._current.shape == self.layout.tensors[index].shape

    def _fill(self, bucket: int, buffer: TransferBuffer) -> list[int]:
        """Put a bucket into its half, once that is free, and let it go; the fingerprints."""
        half = bucket % NUM_HALVES
        try:
            buffer.await_free(half)
            if buffer.bytes.is_cpu:
                digests = self._pack_on_host(bucket, buffer.bytes.data_ptr())
            else:
                digests = self._pack_on_device(bucket, buffer.bytes)
            buffer.filled(half, self.layout.used_bytes(bucket))
        except ConnectionError as error:
            raise RefitError(f"{self._transport}, {self.layout.describe(bucket)}: {error}") from error
        return digests

    def _pack_on_host(self, bucket: int, address: int) -> list[int]:
        """Copy a bucket's pieces to their places; the fingerprints of the sources."""
        address += self.layout.half_offset(bucket)
        digests: list[int] = []
        for piece in self.layout.buckets[bucket]:
            if piece.start == 0:
                self._advance(piece.tensor)
            digests.append(hash_and_copy(self._current.data_ptr() + piece.start, address + piece.offset, piece.nbytes))
        return digests

    def _pack_on_device(self, bucket: int, buffer: torch.Tensor) -> list[int]:
        """The same on a device. Reading the fingerprints waits for the copies, which come before them in the stream."""
        digests: list[torch.Tensor] = []
        for piece in self.layout.buckets[bucket]:
            if piece.start == 0:
                self._advance(piece.tensor)
            dtype = self._dtypes[piece.tensor]
            first, count = piece.start // dtype.itemsize, piece.nbytes // dtype.itemsize
            source = self._current.view(-1)[first : first + count].view(torch.uint8)
            position = self.layout.half_offset(bucket) + piece.offset
            buffer[position : position + piece.nbytes].copy_(source)
            digests.append(word_fingerprint(source))
        return _host_values(digests)


def _host_values(digests: Sequence[torch.Tensor]) -> list[int]:
    return [value % (1 << 64) for value in torch.stack(list(digests)).tolist()] if digests else []


# -- receiver


LoadFn = Callable[[list[tuple[str, torch.Tensor]]], None]


@dataclass(slots=True)
class _Job:
    """A piece on its way: its bytes in the buffer and the flat copies (source byte, byte count, target) they end in.

    `copies` is None where the whole tensor is needed first. `target` is the address a piece goes to as it is, in host
    memory; 0 when there is no such place.
    """

    piece: Piece
    data: torch.Tensor
    copies: list[tuple[int, int, torch.Tensor]] | None
    source: int = field(init=False)
    target: int = field(init=False)

    def __post_init__(self) -> None:
        self.source, self.target = self.data.data_ptr(), 0
        if self.data.is_cpu and self.copies is not None and len(self.copies) == 1:
            first, nbytes, target = self.copies[0]
            if (first, nbytes) == (0, self.piece.nbytes):
                self.target = target.data_ptr()

    def copy(self) -> None:
        """Perform `copies`."""
        for first, nbytes, target in self.copies or []:
            if self.data.is_cpu:
                ctypes.memmove(target.data_ptr(), self.source + first, nbytes)
            else:
                target.copy_(self.data[first : first + nbytes])


class WeightReceiver:
    """Takes buckets out of the buffer, checks every piece, and puts the tensors where they belong.

    Either straight into the model's memory (`targets`: the segments of each tensor) or through a function that loads
    named tensors (`load`), which gets copies of its own and may keep them. One of the two per sync. After a RefitError
    the model may hold parts of both versions and must not be used until a later sync has gone through.

    Adapters are added to weights that lie in `targets`, which has no entries for the adapters themselves.
    """

    def __init__(self, layout: PackLayout, transport: Transport, buffer: TransferBuffer) -> None:
        self.layout = layout
        self._transport = transport
        self._buffer = buffer
        self._targets: Sequence[Sequence[Segment]] | None = None
        self._load: LoadFn | None = None
        self._jobs: dict[int, list[_Job]] = {}
        self._received: set[int] = set()
        self._assembly: dict[int, tuple[torch.Tensor, int]] = {}  # tensor -> (its bytes so far, how many are missing)
        self._version = -1
        self._merger = AdapterMerger()
        self._halves: dict[int, tuple[int, torch.Tensor]] = {}  # weight -> (tensor, values) of half its adapter
        self._expected: set[int] = set()  # buckets that may come
        self._weights = {meta.name: index for index, meta in enumerate(layout.weights)}

    def begin(self, version: int, *, targets: Sequence[Sequence[Segment]] | None, load: LoadFn | None) -> None:
        """A new sync. `targets` must be the same object as last time for the prepared copies to be used again."""
        assert (targets is None) != (load is None)
        assert load is None or not self.layout.num_base_buckets, "adapters need the place of their weights"
        if targets is not self._targets or load is not None:
            self._jobs.clear()
        self._targets, self._load, self._version = targets, load, version
        self._received.clear()
        self._assembly.clear()
        self._halves.clear()
        self._expected.clear()

    def receive(self, bucket: int, fingerprints: bytes) -> None:
        """Take one bucket; any order, each once, but weights before adapters.

        RefitError naming the first tensor whose bytes differ, or when the policy has left the collective.
        """
        assert bucket not in self._received, f"bucket {bucket} came twice"
        self._await(bucket)
        if bucket < self.layout.num_base_buckets:
            self._merger.forget()
        if bucket not in self._jobs:
            self._jobs[bucket] = [self._job(bucket, piece) for piece in self.layout.buckets[bucket]]
        jobs, expected = self._jobs[bucket], unpack_fingerprints(fingerprints)
        if len(expected) != len(jobs):
            raise RefitError(f"{self._where(bucket)}: {len(expected)} fingerprints for {len(jobs)} pieces")
        whole: list[tuple[str, torch.Tensor]] = []
        if self._buffer.bytes.is_cpu:
            found: Iterable[int] = map(self._take_on_host, jobs)  # one at a time, checked as they come
        else:
            found = _host_values([word_fingerprint(job.data) for job in jobs])
        for job, digest, value in zip(jobs, found, expected, strict=True):
            if digest != value:
                self._refuse(digest, value, job, bucket)
            if not job.target:
                job.copy()
                if job.copies is None:
                    self._collect(job, whole)
        if self._load is not None and whole:
            self._load(whole)
        self._received.add(bucket)

    def _await(self, bucket: int) -> None:
        """Until a bucket is in its half; the next one, whose half is empty, may come meanwhile."""
        try:
            for coming in (bucket, bucket + 1):
                if coming < len(self.layout.buckets) and coming not in self._expected:
                    self._buffer.expect(coming % NUM_HALVES, self.layout.used_bytes(coming))
                    self._expected.add(coming)
            self._buffer.await_arrival(bucket % NUM_HALVES)
        except ConnectionError as error:
            where = f"{self._transport}, version {self._version}, {self.layout.describe(bucket)}"
            raise RefitError(f"{where}: {error}") from error

    def finish(self) -> None:
        """End of a sync, of all buckets or of all adapters. RefitError when something did not arrive."""
        num_base = self.layout.num_base_buckets
        first = 0 if any(bucket < num_base for bucket in self._received) else num_base
        missing = [b for b in range(first, len(self.layout.buckets)) if b not in self._received]
        if missing:
            names = sorted({self.layout.tensors[p.tensor].name for b in missing for p in self.layout.buckets[b]})
            raise RefitError(f"{self._where(missing[0])}: never arrived; its tensors: {', '.join(names[:10])}")
        assert not self._assembly and not self._halves

    def close(self) -> None:
        """Let go of the buffer and of the model's memory."""
        self._jobs.clear()
        self._merger.forget()
        self._targets = None
        self._buffer.close()

    def _where(self, bucket: int) -> str:
        return f"{self._transport}, version {self._version}, bucket {bucket}"

    def _job(self, bucket: int, piece: Piece) -> _Job:
        position = self.layout.half_offset(bucket) + piece.offset
        source = self._buffer.bytes[position : position + piece.nbytes]
        meta = self.layout.tensors[piece.tensor]
        dtype = meta.torch_dtype
        if self._targets is None or meta.adapts or not all(s.is_flat(dtype) for s in self._targets[piece.tensor]):
            return _Job(piece, source, None)
        copies = []
        for segment in self._targets[piece.tensor]:
            start = segment.offset * dtype.itemsize
            first, last = max(start, piece.start), min(start + segment.target.nbytes, piece.start + piece.nbytes)
            if first < last:
                target = segment.target.view(-1).view(torch.uint8)[first - start : last - start]
                copies.append((first - piece.start, last - first, target))
        return _Job(piece, source, copies)

    @staticmethod
    def _take_on_host(job: _Job) -> int:
        """Fingerprint of a piece, which is copied on the way when it goes to one place as it is."""
        if job.target:
            return hash_and_copy(job.source, job.target, job.piece.nbytes)
        return host_fingerprint(job.source, job.piece.nbytes)

    def _refuse(self, found: int, expected: int, job: _Job, bucket: int) -> None:
        meta, piece = self.layout.tensors[job.piece.tensor], job.piece
        part = "" if piece.nbytes == meta.nbytes else f" (bytes {piece.start} to {piece.start + piece.nbytes})"
        raise RefitError(
            f"{self._where(bucket)}: tensor {meta.name!r}{part} is not what the policy sent: "
            f"fingerprint {found:016x}, expected {expected:016x}"
        )

    def _collect(self, job: _Job, whole: list[tuple[str, torch.Tensor]]) -> None:
        """A tensor that is needed whole: wait for its last piece, then hand it over."""
        piece = job.piece
        meta = self.layout.tensors[piece.tensor]
        data, keep = job.data, self._load is not None
        if piece.nbytes < meta.nbytes:
            if piece.tensor not in self._assembly:
                fresh = torch.empty(meta.nbytes, dtype=torch.uint8, device=job.data.device)
                self._assembly[piece.tensor] = (fresh, meta.nbytes)
            data, missing = self._assembly[piece.tensor]
            data[piece.start : piece.start + piece.nbytes].copy_(job.data)
            self._assembly[piece.tensor] = (data, missing - piece.nbytes)
            if missing > piece.nbytes:
                return
            del self._assembly[piece.tensor]
            keep = False
        tensor = (data.clone() if keep else data).view(meta.torch_dtype)
        if self._targets is None:
            whole.append((meta.name, tensor.view(meta.shape)))
            return
        if meta.adapts is not None:
            self._add_adapter(self._weights[meta.adapts], piece.tensor, tensor.view(meta.shape))
            return
        for segment in self._targets[piece.tensor]:
            segment.target.copy_(
                tensor.as_strided(segment.size, segment.stride, tensor.storage_offset() + segment.offset)
            )

    def _add_adapter(self, weight: int, tensor: int, values: torch.Tensor) -> None:
        """Keep one matrix of an adapter until the other is there, then add the adapter to its weight."""
        assert self._targets is not None
        if weight not in self._halves:
            self._halves[weight] = (tensor, values.clone())
            return
        halves = [self._halves.pop(weight), (tensor, values)]
        (_, lora_a), (_, lora_b) = sorted(halves, key=lambda half: half[0])
        segments, name = self._targets[weight], self.layout.tensors[weight].name
        if weight not in self._merger:
            if not self._received.issuperset(range(self.layout.num_base_buckets)):
                raise RefitError(
                    f"{self._transport}, version {self._version}: adapters came, and the weights they belong to "
                    f"({name} and others) have not been received in whole"
                )
            self._merger.keep(weight, segments)
        try:
            self._merger.merge(weight, segments, lora_a, lora_b)
        except ValueError as error:
            raise RefitError(
                f"{self._transport}, version {self._version}: policy.dtensor_cfg.lora_cfg.refit=adapter does not work "
                f"for {name}: {error}; set it to merged"
            ) from error

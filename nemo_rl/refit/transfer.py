"""The two ends of a refit: senders fill buckets with weights, the receiver verifies them and puts them in place.

    sender:   sender = WeightSender(...); description = sender.describe(); sender.pack(0); sender.pack(1); ...
    receiver: receiver = WeightReceiver(layout, transport, attach_buffer(...)); receiver.begin(version, ...)
              receiver.receive(0, fingerprints); ...; receiver.finish()

Names, shapes, dtypes and offsets are agreed once (`PackLayout`). A sync then moves bytes and, per bucket, fingerprints.
Every byte enters a fingerprint: the sender takes it of the source tensor (after the cast to the wire dtype), the
receiver of the bytes it hands to the model. A source tensor that ranks gather is right if every rank finds its own part
in it (`OwnParts`) and all have the same fingerprints.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from nemo_rl.refit.buffers import TransferBuffer, create_buffer
from nemo_rl.refit.fingerprint import fingerprints, hash_and_copy, host_fingerprint, word_fingerprint
from nemo_rl.refit.layout import (
    NUM_HALVES,
    ExportedTensor,
    OwnParts,
    PackLayout,
    Piece,
    RefitError,
    Rendezvous,
    Segment,
    TensorMeta,
    Transport,
    choose_bucket_bytes,
    merge,
)


class Sender(ABC):
    """One policy rank's part in sending weights.

    Every rank must call `pack` for every bucket, because packing gathers over ranks. Ranks without a buffer only take
    part in that. The first rank of each node has a buffer (`packed_shm`), every rank for its own GPU (`packed_ipc`), or
    only rank 0 (`packed_collective`, which meets at `rendezvous`).

    Floating-point tensors are cast to `wire_dtype` (torch's name) unless they keep their dtype. `bucket_bytes` is an
    upper limit: small models get smaller buckets.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        rank: int,
        local_rank: int,
        transport: Transport,
        wire_dtype: str,
        bucket_bytes: int | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._rank = rank
        self._transport: Transport = transport
        has_buffer = {"packed_ipc": True, "packed_shm": local_rank == 0, "packed_collective": rank == 0}
        self._has_buffer = has_buffer[transport]
        metas = self._describe_tensors(TensorMeta("", wire_dtype, ()).torch_dtype)
        self.layout = PackLayout.build(metas, choose_bucket_bytes(metas, bucket_bytes, device.type))
        self._buffer: TransferBuffer | None = None
        if self._has_buffer:
            self._buffer = create_buffer(transport, NUM_HALVES * self.layout.bucket_bytes, device, rendezvous)
        self._no_half = torch.empty(0, dtype=torch.uint8, device=device)
        self._own = OwnParts()

    @abstractmethod
    def _describe_tensors(self, wire: torch.dtype) -> list[TensorMeta]:
        """The tensors to send, in order, with the dtypes they travel in."""

    def describe(self) -> dict[str, Any]:
        """For the controller: a digest of the layout, from rank 0 the layout itself, and the buffer if there is one."""
        description: dict[str, Any] = {"rank": self._rank, "layout_digest": self.layout.digest()}
        if self._rank == 0:
            description["layout"] = self.layout.to_dict()
        if self._buffer is not None:
            description["endpoints"] = {self._buffer.key: self._buffer.endpoint}
        return description

    @torch.no_grad()
    def pack(self, bucket: int) -> dict[str, Any]:
        """Fill bucket number `bucket` and send it. The receiver must have taken bucket - 2, which lay in the same half;
        a collective waits for that itself.

        Returns:
            `gather_s` and `pack_s` in seconds; from ranks with a whole bucket `digest`, a hash of its fingerprints;
            from rank 0 `fingerprints` (uint64, one per piece). `own_parts_differ`: gathers brought this rank's own
            parts back as other bytes.

        Raises:
            RefitError: an engine has left the collective, or a rank received damaged bytes from another rank.
        """
        started = time.perf_counter()
        result: dict[str, Any] = {"rank": self._rank}
        number, begin = bucket % NUM_HALVES, self.layout.half_offset(bucket)
        try:
            if self._buffer is None:
                result["gather_s"], words = self._fill(bucket, self._no_half)
                blob = words.cpu().numpy().tobytes()
            else:
                broken = None
                try:
                    self._buffer.wait(number)
                except ConnectionError as error:  # the other ranks gather all the same, and need this one for it
                    broken = error
                half = self._buffer.bytes[begin : begin + self.layout.bucket_bytes]
                result["gather_s"], words = self._fill(bucket, half)
                if broken is not None:
                    raise broken
                # Reading the fingerprints waits for the copies into the half, which precede them in the stream.
                blob = words.cpu().numpy().tobytes()
                self._buffer.start(number, self.layout.used_bytes(bucket))
                if self._rank == 0:
                    result["fingerprints"] = blob
            if blob:
                result["digest"] = xxhash.xxh3_64_hexdigest(blob)
            result["own_parts_differ"] = bool(self._own.take())
        except ConnectionError as error:
            raise RefitError(f"{self._transport}, {self.layout.describe(bucket)}: {error}") from error
        return result | {"pack_s": time.perf_counter() - started}

    @abstractmethod
    def _fill(self, bucket: int, half: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Write a bucket into `half` (uint8), which is empty on a rank without a buffer.

        Returns the seconds of the exchange between ranks, and the fingerprints (int64, one per piece; none on a rank
        that never has the whole bucket).
        """

    def close(self) -> None:
        """Free the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class WeightSender(Sender):
    """Sends weights that every rank gathers: one tensor at a time, and a tensor that spans buckets once.

    `weights` are the same on every rank, in the same order. A shard is cast before its gather. For `settings` see
    `Sender`.
    """

    def __init__(self, weights: Sequence[ExportedTensor], **settings: Any) -> None:
        self._weights = weights
        super().__init__(**settings)
        self._dtypes = [meta.torch_dtype for meta in self.layout.tensors]
        self._next_bucket = 0
        self._current = torch.empty(0)  # the gathered tensor that is being packed

    def _describe_tensors(self, wire: torch.dtype) -> list[TensorMeta]:
        return [
            TensorMeta(w.name, str(w.wire_dtype(wire)).removeprefix("torch."), w.shape, w.adapts, w.fixed)
            for w in self._weights
        ]

    def _fill(self, bucket: int, half: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Buckets come in order; bucket 0 or the first one that is sent again begins a new sync."""
        if bucket in (0, self.layout.num_base_buckets):
            self._next_bucket = bucket
        assert bucket == self._next_bucket, f"bucket {bucket} out of order, expected {self._next_bucket}"
        self._next_bucket += 1
        gather_s, values, words, address = 0.0, [], [], half.data_ptr()
        for piece in self.layout.buckets[bucket]:
            if piece.start == 0:  # the tensor is gathered once, even if it continues in the next buckets
                before = time.perf_counter()
                self._current = self._weights[piece.tensor].gather(self._dtypes[piece.tensor], self._own)
                gather_s += time.perf_counter() - before
                meta = self.layout.tensors[piece.tensor]
                assert self._current.shape == meta.shape, meta.name
                assert self._current.is_contiguous(), f"{meta.name}: bytes are read by their address"
            source = self._current.data_ptr() + piece.start
            if not half.is_cpu:
                part = self._current.view(-1).view(torch.uint8)[piece.start : piece.start + piece.nbytes]
                if self._buffer is not None:
                    half[piece.offset : piece.offset + piece.nbytes].copy_(part)
                words.append(word_fingerprint(part))
            elif self._buffer is not None:  # hash and copy in one pass, while the bytes are in the cache
                values.append(hash_and_copy(source, address + piece.offset, piece.nbytes))
            else:  # it gathers for the others, and says whether it has the same
                values.append(host_fingerprint(source, piece.nbytes))
        if bucket == len(self.layout.buckets) - 1:  # a gathered tensor would take memory until the next sync
            self._current = torch.empty(0)
        return gather_s, torch.stack(words) if words else torch.from_numpy(np.array(values, np.uint64).view(np.int64))


# -- receiver

COMPARISON = -1  # in place of a version
LoadFn = Callable[[list[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece to receive: its bytes in the buffer, and the flat copies (from, to) to perform.

    `copies` is None if the whole tensor is needed first. `target` is the host address that the whole piece is copied
    to; 0 if there is no such address.
    """

    piece: Piece
    data: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    target: int = 0

    def take_on_host(self) -> int:
        """Fingerprint of the piece, which is copied in the same pass if it has a `target`."""
        if self.target:
            return hash_and_copy(self.data.data_ptr(), self.target, self.piece.nbytes)
        return host_fingerprint(self.data.data_ptr(), self.piece.nbytes)


class WeightReceiver:
    """Takes buckets out of the buffer, verifies every piece, and puts the tensors where they belong.

    Tensors go either straight into the model's memory (`targets`: the segments of each tensor) or through a function
    that loads named tensors (`load`), which gets its own copies and may keep them. After a RefitError the model may
    hold parts of both versions and must not be used until a later sync has succeeded.

    The first sync brings everything, and later ones may leave out the first `num_base_buckets` of the layout. The
    receiver adds adapters to weights in `targets`, which has no entries for the adapters themselves.
    """

    def __init__(self, layout: PackLayout, transport: Transport, buffer: TransferBuffer) -> None:
        self.layout = layout
        self._transport = transport
        self._buffer = buffer
        self._targets: Sequence[Sequence[Segment]] | None = None
        self._load: LoadFn | None = None
        self._jobs: dict[int, list[_Job]] = {}
        self._received: set[int] = set()
        self._assembly: dict[int, tuple[torch.Tensor, int]] = {}  # tensor -> (its bytes, how many have arrived)
        self._version = -1
        self._adapters = Adapters()
        self._expected: set[int] = set()  # buckets that may arrive
        self._weights = {meta.name: index for index, meta in enumerate(layout.weights)}

    def begin(self, version: int, *, targets: Sequence[Sequence[Segment]] | None, load: LoadFn | None) -> None:
        """Begin a sync. Prepared copies are reused if `targets` is the same object as last time."""
        assert (targets is None) != (load is None)
        assert load is None or not self.layout.has_adapters, "adapters need the memory of their weights"
        if targets is not self._targets or load is not None:  # prepared copies point into the old memory
            self._jobs.clear()
        self._targets, self._load, self._version = targets, load, version
        self._received.clear()
        self._assembly.clear()
        self._adapters.halves.clear()
        self._expected.clear()

    def receive(self, bucket: int, fingerprints_sent: bytes) -> None:
        """Take one bucket: in any order, each once, but weights before adapters.

        RefitError with the name of the first tensor whose bytes differ, or if the policy has left the collective.
        """
        assert bucket not in self._received, f"bucket {bucket} came twice"
        self._await(bucket)
        if bucket < self.layout.num_base_buckets:  # new weights come: those that were kept without adapter are old
            self._adapters = Adapters()
        if bucket not in self._jobs:
            self._jobs[bucket] = [self._job(bucket, piece) for piece in self.layout.buckets[bucket]]
        jobs, expected = self._jobs[bucket], np.frombuffer(fingerprints_sent, dtype=np.uint64).tolist()
        if len(expected) != len(jobs):
            raise RefitError(f"{self._place}, bucket {bucket}: {len(expected)} fingerprints for {len(jobs)} pieces")
        whole: list[tuple[str, torch.Tensor]] = []
        if self._buffer.bytes.is_cpu:
            found: Iterable[int] = map(_Job.take_on_host, jobs)  # lazy: each piece is verified before the next
        else:
            found = fingerprints([job.data for job in jobs]).cpu().numpy().view(np.uint64).tolist()
        for job, digest, value in zip(jobs, found, expected, strict=True):
            if digest != value:
                meta, piece = self.layout.tensors[job.piece.tensor], job.piece
                part = "" if piece.nbytes == meta.nbytes else f" (bytes {piece.start} to {piece.start + piece.nbytes})"
                raise RefitError(
                    f"{self._place}, bucket {bucket}: tensor {meta.name!r}{part} is not what the policy sent: "
                    f"fingerprint {digest:016x}, expected {value:016x}"
                )
            if job.copies is None:
                self._collect(job, whole)
            elif not job.target:
                for source, target in job.copies:
                    target.copy_(source)
        if self._load is not None and whole:
            self._load(whole)
        self._received.add(bucket)

    def _await(self, bucket: int) -> None:
        """Wait until a bucket is in its half. The next one may arrive meanwhile, because its half is empty."""
        # In a comparison the sender does not run ahead. There CUDA loads new kernels, for which it waits until the
        # device is idle, and would wait for ever for a broadcast that is not sent.
        num = 1 if self._version == COMPARISON else 2
        try:
            for coming in range(bucket, bucket + num):
                if coming < len(self.layout.buckets) and coming not in self._expected:
                    self._buffer.start(coming % NUM_HALVES, self.layout.used_bytes(coming))
                    self._expected.add(coming)
            self._buffer.wait(bucket % NUM_HALVES)
        except ConnectionError as error:
            raise RefitError(f"{self._place}, {self.layout.describe(bucket)}: {error}") from error

    def finish(self) -> None:
        """End a sync of all buckets, or of all that are sent again. RefitError if a bucket did not arrive."""
        num_base = self.layout.num_base_buckets
        first = 0 if any(bucket < num_base for bucket in self._received) else num_base
        missing = [b for b in range(first, len(self.layout.buckets)) if b not in self._received]
        if missing:
            names = sorted({self.layout.tensors[p.tensor].name for b in missing for p in self.layout.buckets[b]})
            raise RefitError(f"{self._place}, bucket {missing[0]}: never arrived; its tensors: {', '.join(names[:10])}")
        assert not self._assembly and not self._adapters.halves

    def close(self) -> None:
        """Release the buffer and the model's memory."""
        self._jobs.clear()
        self._adapters = Adapters()
        self._targets = None
        self._buffer.close()

    @property
    def _place(self) -> str:
        return f"{self._transport}, version {self._version}"

    def _job(self, bucket: int, piece: Piece) -> _Job:
        position = self.layout.half_offset(bucket) + piece.offset
        source = self._buffer.bytes[position : position + piece.nbytes]
        meta = self.layout.tensors[piece.tensor]
        dtype = meta.torch_dtype
        if self._targets is None or meta.adapts or not all(s.is_flat(dtype) for s in self._targets[piece.tensor]):
            return _Job(piece, source)
        copies = []
        for segment in self._targets[piece.tensor]:
            start = segment.offset * dtype.itemsize
            first, last = max(start, piece.start), min(start + segment.target.nbytes, piece.start + piece.nbytes)
            if first < last:
                target = segment.target.view(-1).view(torch.uint8)[first - start : last - start]
                copies.append((source[first - piece.start : last - piece.start], target))
        at_once = source.is_cpu and len(copies) == 1 and copies[0][0].numel() == piece.nbytes
        return _Job(piece, source, copies, copies[0][1].data_ptr() if at_once else 0)

    def _collect(self, job: _Job, whole: list[tuple[str, torch.Tensor]]) -> None:
        """Assemble a tensor that is needed whole; with its last piece, add it to `whole` or copy it to its targets."""
        piece, data = job.piece, job.data
        meta = self.layout.tensors[piece.tensor]
        if piece.nbytes < meta.nbytes:
            if piece.tensor not in self._assembly:
                self._assembly[piece.tensor] = (torch.empty(meta.nbytes, dtype=torch.uint8, device=data.device), 0)
            data, arrived = self._assembly.pop(piece.tensor)
            data[piece.start : piece.start + piece.nbytes].copy_(job.data)
            if arrived + piece.nbytes < meta.nbytes:
                self._assembly[piece.tensor] = (data, arrived + piece.nbytes)
                return
        elif self._load is not None:
            data = data.clone()  # the model may keep it, and the half is filled again
        tensor = data.view(meta.torch_dtype)
        if self._targets is None:
            whole.append((meta.name, tensor.view(meta.shape)))
        elif meta.adapts is not None:
            weight = self._weights[meta.adapts]
            if weight not in self._adapters.base and not self._received.issuperset(range(self.layout.num_base_buckets)):
                raise RefitError(
                    f"{self._place}: adapters came, and the weights they belong to ({meta.adapts} and others) have not "
                    "been received in whole"
                )
            try:
                self._adapters.add(weight, self._targets[weight], piece.tensor, tensor.view(meta.shape))
            except ValueError as error:
                raise RefitError(
                    f"{self._place}: policy.dtensor_cfg.lora_cfg.refit=adapter does not work for {meta.adapts}: "
                    f"{error}; set policy.dtensor_cfg.lora_cfg.refit=merged"
                ) from error
        else:
            for segment in self._targets[piece.tensor]:
                offset = tensor.storage_offset() + segment.offset
                segment.target.copy_(tensor.as_strided(segment.size, segment.stride, offset))


class Adapters:
    """Writes W + B A into the memory of W.

    Every merge begins at the kept values of W, so nothing accumulates over syncs. An engine that holds a slice of W
    keeps and computes that slice alone.
    """

    def __init__(self) -> None:
        self.halves: dict[int, tuple[int, torch.Tensor]] = {}  # weight -> (tensor, values) of only A or B
        self.base: dict[int, list[torch.Tensor]] = {}  # weight -> its values without adapter, in host memory

    @torch.no_grad()
    def add(self, weight: int, segments: Sequence[Segment], tensor: int, values: torch.Tensor) -> None:
        """Keep one matrix of an adapter until the other arrives, then merge both into the `segments` of `weight`.

        `tensor`: number of the matrix in the layout, where A [r, in] comes before B [out, r].

        Raises:
            ValueError: a segment is no block of rows and columns.
        """
        if weight not in self.halves:
            self.halves[weight] = (tensor, values.clone())
            return
        halves = [self.halves.pop(weight), (tensor, values)]
        (_, lora_a), (_, lora_b) = sorted(halves, key=lambda half: half[0])
        if weight not in self.base:
            self.base[weight] = [
                torch.empty_like(s.target, device="cpu", pin_memory=s.target.is_cuda).copy_(s.target) for s in segments
            ]
        for segment, base in zip(segments, self.base[weight], strict=True):
            rows, columns = _block(segment, lora_a.shape[1])
            base = base.to(segment.target.device, non_blocking=True)
            segment.target.copy_(merge(base, lora_a[:, columns], lora_b[rows], 1.0))


def _block(segment: Segment, width: int) -> tuple[slice, slice]:
    """Rows and columns that a segment covers of a matrix with `width` columns. ValueError if it is no such block."""
    row, column = divmod(segment.offset, width)
    if len(segment.size) == 2:
        num_rows, num_columns = segment.size
        in_rows = num_rows == 1 or segment.stride[0] == width
        in_columns = num_columns == 1 or segment.stride[1] == 1
        if in_rows and in_columns and column + num_columns <= width:
            return slice(row, row + num_rows), slice(column, column + num_columns)
    raise ValueError(f"the engine takes it as {list(segment.size)} with strides {list(segment.stride)}")


def largest_difference(tensor: torch.Tensor, segments: Sequence[Segment]) -> float:
    """The largest difference between the parts of a tensor and the memory they belong in; inf if one is not finite."""
    worst = 0.0
    for segment in segments:
        part = tensor.flatten().as_strided(segment.size, segment.stride, segment.offset).to(segment.target.dtype)
        if not torch.equal(part, segment.target):
            worst = max(worst, (part.float() - segment.target.float()).abs().nan_to_num(nan=math.inf).max().item())
    return worst

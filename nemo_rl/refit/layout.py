"""The agreement of sender and receiver of weights: the tensors, and the place of each byte in the buckets.

Weights travel in buckets through the two halves of one buffer: bucket i through half i % 2. `PackLayout` places tensors
in buckets. `ExportedTensor` is a weight of the policy under its Hugging Face name, gathered when it is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from nemo_rl.distributed.collectives import gather_rows
from nemo_rl.refit.fingerprint import same_bytes

ALIGNMENT = 64  # bytes; every tensor starts at a multiple, so that any dtype and SIMD width is aligned
NUM_HALVES = 2
MAX_BUCKET_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}  # a GPU copies fast, so its calls need larger buckets
MIN_BUCKETS = 16  # so that the first one, for which nothing else waits, is a small part of a sync
_MIN_BUCKET_BYTES = 8 << 20  # below it a call costs more than its bytes

DRAFT_PREFIX = "draft."
"""Begins the names of the tensors of a draft model, which travel beside the policy's tensors."""

Transport = Literal["packed_shm", "packed_ipc", "packed_collective"]


class RefitError(RuntimeError):
    """Generation does not hold the policy's weights. The message names transport, version, bucket and tensor."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How the members of `packed_collective` meet: the address of the sender's node, the number of receivers, and the
    limit in seconds for every wait."""

    address: str
    num_receivers: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor as it travels: `dtype` is torch's name without the prefix, `shape` the full (unsharded) shape.

    Two tensors with the same `adapts` are the adapter of the weight W [out, in] of that name: A [r, in], then B
    [out, r], scaled such that the policy computes with W + B A. `fixed`: training never changes the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    adapts: str | None = None
    fixed: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype object."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + nbytes) of tensor number `tensor`, at `offset` within its bucket."""

    tensor: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Segment:
    """Part of a tensor and the memory of the receiving model that it belongs in.

    The part is the strided view (`size`, `stride`, `offset`, in elements) of the flat tensor; `target` has `size`.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target: torch.Tensor

    def is_flat(self, dtype: torch.dtype) -> bool:
        """Whether the bytes can be copied as they are: same dtype, contiguous on both sides."""
        strides = zip(self.size, self.stride, self.target.stride(), strict=True)
        same = all(size == 1 or source == target for size, source, target in strides)
        return same and self.target.dtype == dtype and self.target.is_contiguous()


@dataclass(frozen=True)
class PackLayout:
    """The place of every byte of every tensor. Both sides derive it from the same metadata and bucket size.

    Fixed tensors come first, adapters last. What stays after the first sync has buckets of its own, so that later syncs
    can leave them out.
    """

    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int
    buckets: tuple[tuple[Piece, ...], ...]

    @classmethod
    def build(cls, metas: Iterable[TensorMeta], bucket_bytes: int) -> PackLayout:
        """Place tensors in order, with at most `bucket_bytes` (rounded up to `ALIGNMENT`) per bucket.

        A tensor larger than a bucket starts a new bucket and continues in the following ones; a smaller one is never
        split. Names are unique, and adapters are pairs behind the weights they belong to. ValueError for a bucket size
        below 1.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        tensors = tuple(metas)
        assert len({meta.name for meta in tensors}) == len(tensors), "two tensors have one name"
        num_weights = next((i for i, meta in enumerate(tensors) if meta.adapts is not None), len(tensors))
        weights = {meta.name for meta in tensors[:num_weights]}
        adapted = [meta.adapts for meta in tensors[num_weights:]]
        assert adapted[::2] == adapted[1::2] and len(set(adapted)) == len(adapted[::2]) and weights.issuperset(adapted)
        num_kept = _num_kept(tensors)
        capacity = _align(bucket_bytes)
        buckets: list[list[Piece]] = [[]]
        used = 0
        for index, nbytes in enumerate(meta.nbytes for meta in tensors):
            if (used + nbytes > capacity and used) or (index == num_kept and index > 0):
                buckets.append([])
                used = 0
            start = 0
            while nbytes - start > capacity:
                buckets[-1].append(Piece(index, start, 0, capacity))
                start += capacity
                buckets.append([])
            buckets[-1].append(Piece(index, start, used, nbytes - start))
            used += _align(nbytes - start)
        return cls(tensors, capacity, tuple(tuple(bucket) for bucket in buckets))

    @property
    def weights(self) -> tuple[TensorMeta, ...]:
        """The tensors that are not adapters; they come first."""
        return tuple(meta for meta in self.tensors if meta.adapts is None)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters travel apart from the weights they belong to."""
        return self.tensors[-1].adapts is not None

    @property
    def num_base_buckets(self) -> int:
        """Number of leading buckets that later syncs may skip: the weights under adapters, or fixed ones."""
        num_kept = _num_kept(self.tensors)
        later = (i for i, pieces in enumerate(self.buckets) for piece in pieces if piece.tensor >= num_kept)
        return next(later, 0)

    def bytes_of(self, buckets: Iterable[int]) -> int:
        """Bytes in `buckets` without padding."""
        return sum(piece.nbytes for bucket in buckets for piece in self.buckets[bucket])

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors without padding."""
        return self.bytes_of(range(len(self.buckets)))

    def used_bytes(self, bucket: int) -> int:
        """Bytes from the beginning of a bucket to the end of its last piece."""
        return max((piece.offset + piece.nbytes for piece in self.buckets[bucket]), default=0)

    def describe(self, bucket: int) -> str:
        """`bucket 3 of 12 (first tensor to last tensor)`, for messages."""
        names = [self.tensors[piece.tensor].name for piece in self.buckets[bucket]]
        return f"bucket {bucket} of {len(self.buckets)}" + (f" ({names[0]} to {names[-1]})" if names else "")

    def half_offset(self, bucket: int) -> int:
        """First byte of a bucket in the buffer."""
        return bucket % NUM_HALVES * self.bucket_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` of it is equal."""
        tensors = [[m.name, m.dtype, list(m.shape), m.adapts, m.fixed] for m in self.tensors]
        return {"bucket_bytes": self.bucket_bytes, "tensors": tensors}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PackLayout:
        """Inverse of `to_dict`."""
        metas = (TensorMeta(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in fields["tensors"])
        return cls.build(metas, fields["bucket_bytes"])

    def digest(self) -> str:
        """Equal on two ranks exactly when their layouts are."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()


def _num_kept(tensors: Sequence[TensorMeta]) -> int:
    """Leading tensors that an engine keeps after the first sync: all that have adapters behind them, or fixed ones."""
    has_adapters = any(meta.adapts is not None for meta in tensors)
    sent_again = (i for i, m in enumerate(tensors) if m.adapts is not None or not (m.fixed or has_adapters))
    return next(sent_again, 0)


def choose_bucket_bytes(metas: Sequence[TensorMeta], limit: int | None = None, device: str = "cpu") -> int:
    """A bucket small enough that filling the first one hides behind the rest, and large enough to amortise a call; at
    most `limit`. `device` is the type of the policy's device."""
    total = sum(_align(meta.nbytes) for meta in metas)
    chosen = max(_MIN_BUCKET_BYTES, min(MAX_BUCKET_BYTES[device], total // MIN_BUCKETS))
    return chosen if limit is None else min(chosen, limit)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class OwnParts:
    """Whether the gathers of some tensors brought this rank's own parts back as it gave them.

    Every part of a tensor is the own part of some rank. So gathers were right if no rank finds a difference here and
    all ranks have the same bytes.
    """

    def __init__(self) -> None:
        self._differs: list[torch.Tensor] = []

    def compare(self, given: torch.Tensor, returned: torch.Tensor) -> None:
        """Note what a rank gave to a collective and the same part of the result: equal shapes and dtypes, strided or
        not. A device is not waited for."""
        assert given.shape == returned.shape, f"a part of {tuple(given.shape)} came back as {tuple(returned.shape)}"
        given, returned = given.contiguous(), returned.contiguous()
        if given.is_cpu:
            differs = torch.tensor(not same_bytes(given.data_ptr(), returned.data_ptr(), given.nbytes))
        else:
            bits = _BITS[given.dtype.itemsize]  # NaN is not equal to itself
            differs = (given.view(bits) != returned.view(bits)).any()
        self._differs.append(differs)

    def take(self) -> torch.Tensor:
        """Whether any part differed since the last call: a bool scalar on the device of the parts."""
        found, self._differs = self._differs, []
        return torch.stack(found).any() if found else torch.tensor(False)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """One tensor under its Hugging Face name. Every rank lists the same tensors in the same order.

    `collective`: see `gather`. `adapts` and `fixed` as in `TensorMeta`. `keeps_dtype`: the tensor travels in its own
    dtype, while others are cast.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    collective: Callable[[torch.dtype | None, OwnParts], torch.Tensor]
    adapts: str | None = None
    keeps_dtype: bool = False
    fixed: bool = False

    def gather(self, dtype: torch.dtype | None, own: OwnParts | None = None) -> torch.Tensor:
        """The whole tensor, contiguous, on the rank's device; floating-point values in `dtype` (None: as they are).

        A collective over all ranks. What became of this rank's part in it is noted in `own`.
        """
        return self.collective(dtype, OwnParts() if own is None else own)

    def wire_dtype(self, default: torch.dtype) -> torch.dtype:
        """The dtype the tensor travels in: adapters in float32, other floating-point weights in `default`."""
        if self.adapts is not None:
            return torch.float32
        return default if self.dtype.is_floating_point and not self.keeps_dtype else self.dtype


def in_sending_order(tensors: Iterable[ExportedTensor]) -> list[ExportedTensor]:
    """Fixed tensors first and adapters last, each in their own order."""
    return sorted(tensors, key=lambda tensor: (tensor.adapts is not None, not tensor.fixed))


def exported(
    name: str, tensor: Callable[[], torch.Tensor], *, keeps_dtype: bool = False, fixed: bool = False
) -> ExportedTensor:
    """The tensor or DTensor that `tensor()` returns at each gather, because parameters move with their module."""
    first = tensor()
    return ExportedTensor(
        name=name,
        shape=tuple(first.shape),
        dtype=first.dtype,
        collective=lambda dtype, own: gathered(tensor().detach(), dtype, own),
        keeps_dtype=keeps_dtype,
        fixed=fixed,
    )


def gathered(tensor: torch.Tensor, dtype: torch.dtype | None, own: OwnParts | None = None) -> torch.Tensor:
    """The whole of a tensor or DTensor, contiguous. Collective for a DTensor, whose own part is noted in `own`.

    A shard is cast first if that shrinks the gather, and made contiguous, because gloo garbles strided tensors.
    """
    wanted = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if wanted.itemsize < local.dtype.itemsize:
            local = local.to(wanted)
        local = local.contiguous()
        if (group := sharing_rows(tensor)) is not None:
            whole = local.new_empty(tensor.shape)
            gather_rows(whole, local, group)
            if own is not None:
                own.compare(local, whole[group.rank() * len(local) :][: len(local)])
            return whole.to(wanted)
        shards = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=torch.empty(tensor.shape, device="meta").stride(),
        )
        whole = shards.full_tensor()
        if own is not None:
            everywhere = [Replicate()] * tensor.device_mesh.ndim
            returned = DTensor.from_local(whole, tensor.device_mesh, everywhere, run_check=False)
            own.compare(local, returned.redistribute(placements=tensor.placements).to_local())  # cuts, sends nothing
        tensor = whole
    return tensor.to(wanted).contiguous()


def sharing_rows(tensor: DTensor) -> dist.ProcessGroup | None:
    """The ranks that have equally many rows of `tensor` each; None if it is cut in another way or not at all.

    Their rows end to end are the tensor: a collective without the plans of DTensor, which for a small tensor take
    longer than the bytes.
    """
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cuts) != 1 or type(cuts[0][1]) is not Shard or cuts[0][1].dim != 0:
        return None
    axis = cuts[0][0]
    return tensor.device_mesh.get_group(axis) if len(tensor) % tensor.device_mesh.size(axis) == 0 else None


def merge(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    """W [out, in] + scale B [out, r] A [r, in], computed in float32, in the dtype of W.

    Training and generation both merge with this function, so their weights agree bit for bit.
    """
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale).to(weight.dtype)


@dataclass(frozen=True, kw_only=True)
class WeightComparison:
    """Generation's weights against the policy's."""

    num_tensors: int = 0  # compared
    different: Mapping[str, float] = field(default_factory=dict)  # by tensor: the largest difference of a value
    gather: str = ""  # how the policy's ranks gathered other weights than they hold, if they did
    not_compared: str = ""  # why, if they were not

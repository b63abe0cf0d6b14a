"""Where every byte of every weight lies while it travels, agreed once by sender and receiver."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

ALIGNMENT = 64  # bytes; every tensor starts at a multiple, so that any dtype and SIMD width is aligned
NUM_HALVES = 2
MAX_BUCKET_BYTES = 128 << 20
_MIN_BUCKET_BYTES = 8 << 20  # below it a call costs more than its bytes


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor as it travels: `dtype` is torch's name without the prefix, `shape` the full (unsharded) shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype object. ValueError when torch has no dtype of that name."""
        dtype = torch.__dict__.get(self.dtype)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {self.name!r}: torch has no dtype {self.dtype!r}")
        return dtype

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
class PackLayout:
    """Where every byte of every tensor lies. Both sides derive it from the same metadata and bucket size."""

    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int
    buckets: tuple[tuple[Piece, ...], ...]

    @classmethod
    def build(cls, metas: Iterable[TensorMeta], bucket_bytes: int) -> PackLayout:
        """Place tensors in order, `bucket_bytes` (rounded up to `ALIGNMENT`) at most per bucket.

        A tensor larger than a bucket starts a bucket of its own and goes on in the following ones; a smaller one is
        never split. ValueError for a bucket size below 1 and for a name that comes twice.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        tensors = tuple(metas)
        names = {meta.name for meta in tensors}
        if len(names) != len(tensors):
            seen: set[str] = set()
            twice = sorted({m.name for m in tensors if m.name in seen or seen.add(m.name)})
            raise ValueError(f"tensor names must be unique, these come twice: {twice}")
        capacity = _align(bucket_bytes)
        buckets: list[list[Piece]] = [[]]
        used = 0
        for index, nbytes in enumerate(meta.nbytes for meta in tensors):
            if used + nbytes > capacity and used:
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
    def buffer_bytes(self) -> int:
        """Bytes of the whole buffer: all halves."""
        return NUM_HALVES * self.bucket_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(piece.nbytes for bucket in self.buckets for piece in bucket)

    def half_offset(self, bucket: int) -> int:
        """First byte of a bucket in the buffer."""
        return bucket % NUM_HALVES * self.bucket_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` of it is equal."""
        return {"bucket_bytes": self.bucket_bytes, "tensors": [[m.name, m.dtype, list(m.shape)] for m in self.tensors]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PackLayout:
        """Inverse of `to_dict`."""
        metas = (TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in fields["tensors"])
        return cls.build(metas, fields["bucket_bytes"])

    def digest(self) -> str:
        """Equal on two ranks exactly when their layouts are."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()


def choose_bucket_bytes(metas: Sequence[TensorMeta]) -> int:
    """A bucket small enough that filling the first one hides behind the rest, and large enough to amortise a call."""
    total = sum(_align(meta.nbytes) for meta in metas)
    return max(_MIN_BUCKET_BYTES, min(MAX_BUCKET_BYTES, total // 16))


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

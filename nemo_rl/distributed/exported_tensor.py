"""A weight as other programs know it, gathered when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """One tensor under its Hugging Face name. Every rank lists the same ones in the same order.

    `gather(dtype)` is a collective over all ranks and gives the whole tensor, contiguous, on the rank's device, with
    floating-point values in `dtype` (None: as they are kept). `adapts` as in `TensorMeta`. `keeps_dtype`: it travels in
    its own dtype, whatever others are cast to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gather: Callable[[torch.dtype | None], torch.Tensor]
    adapts: str | None = None
    keeps_dtype: bool = False


def exported(name: str, tensor: Callable[[], torch.Tensor], *, keeps_dtype: bool = False) -> ExportedTensor:
    """The tensor or DTensor that `tensor()` gives, now and at every later gather: parameters move with their module."""
    first = tensor()

    def gather(dtype: torch.dtype | None) -> torch.Tensor:
        return gathered(tensor().detach(), dtype)

    return ExportedTensor(
        name=name, shape=tuple(first.shape), dtype=first.dtype, gather=gather, keeps_dtype=keeps_dtype
    )


def gathered(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The whole of a tensor or DTensor, contiguous. Collective for a DTensor.

    A shard is cast first where that shrinks the gather, and made contiguous: gloo garbles strides.
    """
    wanted = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if wanted.itemsize < local.dtype.itemsize:
            local = local.to(wanted)
        shards = DTensor.from_local(
            local.contiguous(),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=torch.empty(tensor.shape, device="meta").stride(),
        )
        tensor = shards.full_tensor()
    return tensor.to(wanted).contiguous()

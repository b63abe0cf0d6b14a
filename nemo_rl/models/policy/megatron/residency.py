"""Weights, gradients and optimizer state between a device and host memory, in place.

Megatron's parameters, gradients and, in float32, main parameters are views of a few large buffers. So it is not tensors
that are moved but the storages beneath them: a storage gives its memory back and gets as much again later, and every
view of it stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


class MovedStorages:
    """Storages whose memory was given back, and the host's copies of what was in them (none of scratch memory)."""

    def __init__(self) -> None:
        self._moved: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    def take(self, tensors: Iterable[torch.Tensor], device: torch.device, *, keep: bool) -> None:
        """Give back the memory beneath those of `tensors` that are on `device`; `keep` what is in it."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device != device or storage.nbytes() == 0:  # another view of it came before
                continue
            host = _bytes(storage, device).to("cpu", copy=True) if keep else None
            self._moved.append((storage, storage.nbytes(), host))
            storage.resize_(0)

    def put_back(self, device: torch.device) -> None:
        """Inverse of `take`; what was not kept has any value."""
        for storage, nbytes, host in self._moved:
            storage.resize_(nbytes)
            if host is not None:
                _bytes(storage, device).copy_(host)
        self._moved = []


class Residency:
    """What of a rank's model and optimizer is on `device`."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None, device: torch.device
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.device = device
        self._weights, self._training = MovedStorages(), MovedStorages()

    def offload(self) -> None:
        """Everything to host memory, or forgotten: gradients of a step that is over."""
        self._weights.take(_weights(self.chunks), self.device, keep=True)
        self._training.take(_gradients(self.chunks), self.device, keep=False)
        if self.optimizer is not None:
            self._training.take(_state(self.optimizer), self.device, keep=True)

    def onload(self, *, with_optimizer: bool) -> None:
        """Weights, and what training needs besides, back to the device. What is there already stays."""
        self._weights.put_back(self.device)
        if with_optimizer:
            self._training.put_back(self.device)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _weights(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from chunk.module.parameters()
        yield from chunk.module.buffers()


def _gradients(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        buffers: Any = chunk.buffers  # of gradients: Megatron's attribute hides the module's method
        yield from (buffer.grad_data for buffer in (*buffers, *chunk.expert_parallel_buffers))


def _state(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Main parameters (in float32 they are the weights, which were taken before) and moments."""
    parts: list[Any] = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.is_stub_optimizer:  # this rank has no parameters for it
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

"""Weights and optimizer state between device and host memory, and the reference weights that wait on the host.

Parameters, gradients and states are views of larger buffers: Megatron's flat ones, FSDP's padded shards. So storages
are moved, not tensors: a storage frees its memory and allocates as much again later, and all its views stay valid. The
host side is pinned memory that is kept, as pinning takes longer than copying and pageable memory halves the speed.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator

import torch

CHUNK_BYTES = 256 << 20
"""A power of two: torch rounds pinned allocations up to one."""


class HostMemory:
    """Host memory that is filled from the beginning, emptied as a whole, and kept; pinned for a GPU.

    Copies are ordered with the work of the device's current stream, and nothing waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def store(self, tensor: torch.Tensor) -> int:
        """Copy the contents of `tensor`. Returns their place, for `load`."""
        start = self._used
        data = tensor.contiguous().view(-1).view(torch.uint8)
        self._used += len(data)
        for host, part in self._parts(start, data):
            host.copy_(part, non_blocking=True)
        return start

    def load(self, start: int, tensor: torch.Tensor) -> None:
        """Fill `tensor` with the stored contents of a tensor of its size and dtype."""
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for host, part in self._parts(start, target.view(-1).view(torch.uint8)):
            part.copy_(host, non_blocking=True)
        if target is not tensor:
            tensor.copy_(target)

    def clear(self) -> None:
        """Forget the contents."""
        self._used = 0

    def _parts(self, start: int, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes from `start` on, chunk by chunk, beside the parts of `data`."""
        done = 0
        while done < len(data):
            number, offset = divmod(start + done, CHUNK_BYTES)
            if number == len(self._chunks):
                self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
            size = min(len(data) - done, CHUNK_BYTES - offset)
            yield self._chunks[number][offset : offset + size], data[done : done + size]
            done += size


class MovedStorages:
    """Storages of `device` whose memory was freed, with their contents on the host (none for scratch memory)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory(device)
        self._moved: list[tuple[torch.Tensor, int, int | None]] = []  # all bytes, their number, their place on the host

    @torch.no_grad()
    def take(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> None:
        """Free the memory of those `tensors` that are on the device; `keep` the contents."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device != self.device or storage.nbytes() == 0:  # freed before, or with another view of it
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            self._moved.append((whole, storage.nbytes(), self.memory.store(whole) if keep else None))
            storage.resize_(0)

    @torch.no_grad()
    def put_back(self) -> None:
        """Inverse of `take`. Contents that were not kept are undefined."""
        for whole, nbytes, start in self._moved:
            whole.untyped_storage().resize_(nbytes)
            if start is not None:
                self.memory.load(start, whole)
        self._moved = []
        self.memory.clear()


class Residency:
    """Moves a rank's model and optimizer between `device` and the host.

    The functions return tensors, looked up at every move: `weights` with buffers, the `state` of the optimizer, and
    `scratch` memory of training, whose contents are not kept.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        weights: Callable[[], Iterable[torch.Tensor]],
        state: Callable[[], Iterable[torch.Tensor]],
        scratch: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._functions = weights, state, scratch
        self.weights, self._training = MovedStorages(device), MovedStorages(device)

    def offload(self, *, with_weights: bool = True) -> None:
        """Move optimizer state and, unless they are needed for a refit, weights to the host. No gradient survives."""
        weights, state, scratch = self._functions
        if with_weights:  # first, as main parameters in float32 can be the weights
            self.weights.take(weights(), keep=True)
        self._training.take(scratch(), keep=False)
        kept = {tensor.untyped_storage().data_ptr() for tensor in weights()}
        self._training.take((t for t in state() if t.untyped_storage().data_ptr() not in kept), keep=True)

    def onload(self, *, with_optimizer: bool) -> None:
        """Move the weights and, if it will be used, the optimizer state back, if they are not there already."""
        self.weights.put_back()
        if with_optimizer:
            self._training.put_back()


class SwappedReference:
    """The reference policy: the initial weights on the host, in place of the current ones while it is active.

    `weights()` returns the tensors of this rank that training changes, looked up at every use. `dtype`: in which the
    model computes with them, and so in which they are kept; None: their own. The current weights wait in `memory`,
    which is free while they are on the device.
    """

    def __init__(
        self, weights: Callable[[], list[torch.Tensor]], memory: HostMemory, *, dtype: torch.dtype | None
    ) -> None:
        self.weights, self.memory = weights, memory
        self.initial = HostMemory(memory.device)
        self._kept = []
        for weight in weights():
            kept = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
            self._kept.append((kept, self.initial.store(weight.to(kept))))

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        current = []  # places of the current weights in `memory`
        with torch.no_grad():
            # One tensor at a time, so that the device never holds a second copy of the model.
            for weight, (dtype, start) in zip(self.weights(), self._kept, strict=True):
                current.append(self.memory.store(weight))
                initial = torch.empty_like(weight, dtype=dtype)
                self.initial.load(start, initial)
                weight.copy_(initial)
        try:
            yield
        finally:
            # `weights` also drops what FSDP gathered of the reference, which the next pass would use.
            for weight, start in zip(self.weights(), current, strict=True):
                self.memory.load(start, weight)
            self.memory.clear()

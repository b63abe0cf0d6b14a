"""What each call of a worker did: seconds, memory of the device, operations, collectives, waits and copies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl.models.policy.memory import RESERVE, Phase
from tools.standin.trace.index_values import FalseAnswers, IndexValues

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm: (0, 1), ATEN.addmm: (1, 2), ATEN.bmm: (0, 1), ATEN._grouped_mm: (0, 1)}
"""Products of matrices, with the places of both arguments."""

COMMUNICATION = ("c10d", "_c10d_functional")
ONE_SIDED = {"send", "recv_", "recv_any_source_"}


OTHER_PROCESSES = ("CUDA context", "asleep beside it", "engine's weights", "KV cache")
"""Parts of a prediction that torch's allocator in the training process has not."""


def in_allocator(phase: Phase) -> dict[str, float]:
    """The predicted bytes of tensors at most, and of the device's memory that the allocator holds at most."""
    parts = [part for part in phase.parts if part.name not in OTHER_PROCESSES]
    reserved = sum(part.num_bytes for part in parts)
    return {"peak": sum(part.num_bytes for part in parts if part.name != RESERVE), "reserved": reserved}


@dataclass
class Numbers:
    """The numbers of a phase. Bytes are of this rank."""

    cpu_s: float = 0.0
    peak: int = 0  # bytes that tensors took at most
    reserved: int = 0  # bytes that the allocator had from the device at most
    after: int = 0  # bytes that tensors take at the end
    tflop: float = 0.0
    calls: int = 0  # of the method
    collectives: Counter[str] = field(default_factory=Counter)  # kind and number of ranks -> calls
    collective_bytes: Counter[str] = field(default_factory=Counter)
    waits: int = 0  # of the host for the device
    to_device: int = 0
    to_host: int = 0


@dataclass(frozen=True)
class Message:
    """A collective or a message as every member of its group should see it."""

    name: str
    dtype: str
    numel: int
    peer: int | None = None  # global rank, of messages and of collectives with a root

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.name} of {self.numel} {self.dtype}{peer}"


class Observer(TorchDispatchMode):
    """Notes every operation that passes through the dispatcher into `numbers`, and every message by its group."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()
        self.messages: dict[tuple[int, ...], list[Message]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COMMUNICATION:
            self._communication(func, tree_leaves((args, kwargs)))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in PRODUCTS:
            first, second = (args[place] for place in PRODUCTS[packet])
            self.numbers.tflop += 2e-12 * prod(first.shape) * second.shape[-1]
        elif packet is ATEN._local_scalar_dense:
            self.numbers.waits += args[0].is_cuda
        elif packet in (ATEN._to_copy, ATEN.copy_):
            target, source = (args[0], args[1]) if packet is ATEN.copy_ else (out, args[0])
            is_free = kwargs.get("non_blocking") or (packet is ATEN.copy_ and len(args) > 2 and args[2])
            self._copy(target, source, waits=not is_free)
        return out

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        if source.is_cuda and not target.is_cuda:
            self.numbers.to_host += target.nbytes
            self.numbers.waits += waits
        elif target.is_cuda and not source.is_cuda:
            self.numbers.to_device += target.nbytes

    def _communication(self, func: Any, leaves: list[Any]) -> None:
        name = func.overloadpacket.__name__
        if "wait" in name or "_wrap" in name:
            return
        ranks = _ranks_of(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if func.namespace == "c10d" and not tensor.is_contiguous():
                # NCCL sends the bytes from the tensor's address on, and torch's group of NCCL refuses this; the fake
                # group takes it.
                shape = f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
                raise ValueError(f"{name.strip('_')}: tensors must be contiguous, and this one has {shape}")
        largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
        kind = name.strip("_")
        key = f"{kind} x{len(ranks)}"
        self.numbers.collectives[key] += 1
        self.numbers.collective_bytes[key] += 0 if largest is None else largest.nbytes
        numbers = [leaf for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]
        has_peer = name in ONE_SIDED or "broadcast" in name
        dtype = "" if largest is None else str(largest.dtype).removeprefix("torch.")
        numel = 0 if largest is None else largest.numel()
        peer = ranks[numbers[0]] if has_peer and numbers else None
        self.messages.setdefault(ranks, []).append(Message(kind, dtype, numel, peer))


def _ranks_of(leaves: list[Any]) -> tuple[int, ...]:
    """The global ranks of the group that an operation names, as an object or by its registered name."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
    name = next(leaf for leaf in reversed(leaves) if isinstance(leaf, str))
    return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))


class Phases:
    """The numbers of a rank's phases, in the order in which they first happened.

    A phase that is repeated in a step, such as a bucket of a refit, adds up in one entry, with the highest of its
    peaks. torch compiles nothing while a mode like the observer is active: a model that is compiled is observed in the
    step `observed_from` alone, which has the memory of a model that is not.
    """

    def __init__(self, device: torch.device, *, has_indices: bool, observed_from: int = 0) -> None:
        """`has_indices`: the host reads integers that were computed on the device."""
        self.device = device
        self.has_indices = has_indices
        self.index_values = IndexValues()
        self.observed_from = observed_from
        self.observer = Observer()
        self.found: dict[str, Numbers] = {}
        self.step = 0

    @contextmanager
    def measure(self, name: str, *, is_sync: bool = False) -> Iterator[None]:
        numbers = self.observer.numbers = self.found.setdefault(f"{name}|{self.step}", Numbers())
        torch.cuda.reset_peak_memory_stats(self.device)
        started = time.process_time()
        try:
            with ExitStack() as stack:
                if self.step >= self.observed_from:
                    if self.has_indices:
                        stack.enter_context(FalseAnswers() if is_sync else self.index_values)
                    stack.enter_context(self.observer)
                yield
        finally:
            numbers.calls += 1
            numbers.cpu_s += time.process_time() - started
            numbers.peak = max(numbers.peak, torch.cuda.max_memory_allocated(self.device))
            numbers.reserved = max(numbers.reserved, torch.cuda.max_memory_reserved(self.device))
            numbers.after = torch.cuda.memory_allocated(self.device)

    def as_json(self) -> dict[str, Any]:
        """The numbers by `<phase>|<step>`; step 0 is before the first."""
        return {name: vars(numbers) for name, numbers in self.found.items()}

"""Where the tensors of a sync belong in the memory of an engine's model, found out by its own `load_weights`.

`trace_load` runs `load_weights` once on tensors without data and records its copies: which part of which tensor goes
into which part of which parameter, fused and tensor-parallel layers included. A sync then consists of these copies
only. It allocates no memory, runs no Python per module, and keeps the addresses in captured graphs valid.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.refit.layout import PackLayout, RefitError, Segment, TensorMeta, Transport
from nemo_rl.refit.transfer import COMPARISON, WeightReceiver, largest_difference

aten = torch.ops.aten
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class NotTraceable(Exception):
    """Loading does more than copy parts of tensors into parameters; the message gives the operation."""


class CopyRecorder(TorchDispatchMode):
    """Records copies from the loaded tensors into the model's memory, and fills of it, without performing them."""

    def __init__(self, sources: list[torch.Tensor]) -> None:
        super().__init__()
        self._index = {_storage(source): index for index, source in enumerate(sources)}
        self.segments: list[list[Segment]] = [[] for _ in sources]
        self.fills: list[tuple[torch.Tensor, float]] = []
        self.written: Counter[int] = Counter()  # storage -> elements written, fills included

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.copy_.default:
            target, part = args[0], args[1]
            if _storage(part) not in self._index:
                raise NotTraceable("a weight is computed from the tensor before it is stored")
            if part.shape != target.shape or target.is_meta:
                raise NotTraceable(f"a part of shape {list(part.shape)} is stored as {list(target.shape)}")
            segment = Segment(tuple(part.shape), part.stride(), part.storage_offset(), target.detach())
            self.segments[self._index[_storage(part)]].append(segment)
            self.written[_storage(target)] += target.numel()
            return target
        if func in (aten.fill_.Scalar, aten.zero_.default):  # padding
            filled, *value = args
            self.fills.append((filled.detach(), value[0] if value else 0.0))
            self.written[_storage(filled)] += filled.numel()
            return filled
        if func._schema.is_mutable or func is aten._local_scalar_dense.default:
            raise NotTraceable(f"loading calls {func}")
        return func(*args, **(kwargs or {}))


def trace_load(
    model: torch.nn.Module, tensors: Sequence[TensorMeta], load: LoadWeights
) -> tuple[CopyRecorder, list[str]]:
    """The targets of the copies of `load`, and the parameters of `model` that it would not write in full.

    Raises:
        NotTraceable: loading consists of more than copies.
        ValueError: from the model, for an unknown name.
    """
    sources = [torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta") for meta in tensors]
    recorder = CopyRecorder(sources)
    with torch.no_grad(), recorder:
        load((meta.name, source) for meta, source in zip(tensors, sources, strict=True))
    return recorder, unwritten(model, recorder.written)


def unwritten(model: torch.nn.Module, written: Counter[int]) -> list[str]:
    """The parameters whose storage has more elements than were `written` there."""
    sizes: Counter[int] = Counter()  # parameters may share a storage
    for parameter in model.parameters():
        sizes[_storage(parameter)] += parameter.numel()
    return [name for name, p in model.named_parameters() if written[_storage(p)] < sizes[_storage(p)]]


def refuse_stale(transport: Transport, names: Iterable[str]) -> None:
    """Raise RefitError if there is a name: of the engine's parameters that a sync does not write in full."""
    if stale := sorted(names):
        raise RefitError(
            f"{transport}: the policy does not send (all of) {len(stale)} of the engine's parameters, which would keep "
            f"their old values: {', '.join(stale[:10])}"
        )


class CapturedWeights:
    """Where a model's weights were when graphs of a device were captured: that is where the graphs go on reading them.

    `model`: as it is captured, or will be. `remedy`: how its engine runs without graphs.
    """

    def __init__(self, model: torch.nn.Module, remedy: str) -> None:
        self._model, self._remedy = model, remedy
        self._addresses = _addresses(model)

    def refuse_moved(self, transport: Transport) -> None:
        """Raise RefitError if a weight has another address now: graphs would compute with what is left at the old."""
        now = _addresses(self._model)
        if moved := sorted(name for name, address in self._addresses.items() if now.get(name) != address):
            raise RefitError(
                f"{transport}: {len(moved)} of the engine's weights lie elsewhere in memory than when it captured its "
                f"graphs, which would go on with the old values: {', '.join(moved[:10])}; {self._remedy}"
            )


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class WriteCounter(TorchDispatchMode):
    """Counts the elements that operations write into each storage, and performs them."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[number] if number < len(args) else kwargs.get(argument.name)
                if isinstance(target, torch.Tensor):
                    self.written[_storage(target)] += target.numel()
        return func(*args, **kwargs)


class InPlace:
    """The copies of a sync into a model's memory, traced once for a layout and again when that memory has moved.

    Weights that the engine keeps can be compared with buckets, too.
    """

    def __init__(self) -> None:
        self.targets: list[list[Segment]] | None = None  # of each weight of the layout; None: not traced
        self.differences: dict[str, float] = {}
        self._padding: list[tuple[torch.Tensor, float]] = []
        self._addresses: dict[str, int] = {}

    def trace(self, model: torch.nn.Module, layout: PackLayout, transport: Transport, load: LoadWeights) -> None:
        """Find the targets. `load` is the model's own `load_weights`.

        Raises:
            NotTraceable: loading consists of more than copies.
            RefitError: parameters would keep their old values.
        """
        addresses = _addresses(model)
        if self.targets is not None and addresses == self._addresses:
            return
        self.targets, self._addresses = None, addresses
        recorder, stale = trace_load(model, layout.weights, load)
        refuse_stale(transport, stale)
        self.targets, self._padding = recorder.segments, recorder.fills

    def fill_padding(self) -> None:
        """Write what is not of the policy: an engine that slept without its weights has lost it."""
        for target, value in self._padding:
            target.fill_(value)

    def begin_comparison(self, receiver: WeightReceiver) -> None:
        """Compare the tensors that `receiver` will receive; those that differ come into `differences`."""
        self.differences = {}
        receiver.begin(COMPARISON, targets=None, load=lambda weights: self._compare(receiver.layout, weights))

    def _compare(self, layout: PackLayout, weights: list[tuple[str, torch.Tensor]]) -> None:
        assert self.targets is not None
        targets = dict(zip((meta.name for meta in layout.weights), self.targets, strict=True))
        for name, tensor in weights:
            if (difference := largest_difference(tensor, targets[name])) > 0:
                self.differences[name] = difference

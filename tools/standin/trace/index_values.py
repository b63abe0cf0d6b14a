"""True values of index arithmetic on a device that does not compute.

Offsets of packed rows, rows of each expert, orders and masks decide shapes, and the host reads them. Operations on
integers, and on constants that are made of them, are computed on the host and written to the device's memory (it must
allow writes). Numbers that are computed of weights have no values. Experts are chosen in turn, so all get as many rows,
and ranks that are absent send what this one has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

ATEN = torch.ops.aten
WRITES = 1 << 24
"""Bytes up to which a copy to the device takes place."""

MOST_NUMBERS = WRITES // 8

UNTOUCHED = {
    ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided, ATEN.detach, ATEN.alias,
    ATEN.set_, ATEN._local_scalar_dense, ATEN._pin_memory, ATEN.is_pinned, ATEN.record_stream, ATEN.lift_fresh,
    ATEN.resize_,
}  # fmt: skip
"""They compute nothing."""

FILLS = {ATEN.zeros_like, ATEN.ones_like, ATEN.full_like, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full}
"""Their values do not depend on those of their argument."""

COPIES = {ATEN._to_copy, ATEN.copy_, ATEN.clone}
RANDOM = {ATEN.rand, ATEN.randn, ATEN.randint}


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


class IndexValues(TorchDispatchMode):
    """Active around everything that a rank does."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakIdKeyDictionary()  # tensors of the device that hold no integers and have true values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, leaves = func.overloadpacket, tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            out = func(*args, **kwargs)
            _answer(func, args, out)
            return out
        if packet is ATEN.topk and tensors[0].is_cuda:
            return _in_turn(func(*args, **kwargs), tensors[0].shape[-1])
        if packet is ATEN.sort and tensors[0].is_cuda and not self._has_value(tensors[0]):
            return _from_row(func(*args, **kwargs))
        if packet in UNTOUCHED or func.namespace != "aten" or not all(map(_is_plain, tensors)):
            return func(*args, **kwargs)
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)
        if alias is not None and not writes:  # a view
            out = func(*args, **kwargs)
            return self._mark(out) if tensors and tensors[0].is_cuda and self._has_value(tensors[0]) else out
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if self._is_computed(func, args, kwargs, tensors, device):
            place = next((tensor.device for tensor in tensors if tensor.is_cuda), device)
            return self._on_host(func, args, kwargs, place, writes=writes)
        out = func(*args, **kwargs)
        if writes and isinstance(args[0], torch.Tensor):
            self._known.pop(args[0], None)
        return out

    def _has_value(self, tensor: torch.Tensor) -> bool:
        return _is_index(tensor) or not tensor.is_cuda or tensor in self._known

    def _mark(self, out: Any) -> Any:
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and not _is_index(tensor):
                self._known[tensor] = True
        return out

    def _is_computed(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], device: torch.device | None
    ) -> bool:
        """Whether the host computes this operation in the device's place."""
        packet = func.overloadpacket
        if not tensors:
            return device is not None and device.type == "cuda" and packet not in RANDOM
        if sum(tensor.numel() for tensor in tensors) > MOST_NUMBERS or not any(tensor.is_cuda for tensor in tensors):
            return False
        if packet not in FILLS and not all(map(self._has_value, tensors)):
            return False
        if packet in COPIES:  # those between host and device take place as they are
            source, target = (args[1], args[0].device) if packet is ATEN.copy_ else (args[0], kwargs.get("device"))
            return target is None or source.device == target
        return True

    def _on_host(self, func: Any, args: Any, kwargs: Any, place: Any, *, writes: bool) -> Any:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the device's tensor: both tensors

        def down(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor):
                return value
            if func.overloadpacket in FILLS:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if id(value) not in copies:
                copies[id(value)] = value, value.cpu() if value.is_cuda else value
            return copies[id(value)][1]

        host_kwargs = tree_map(down, kwargs)
        if host_kwargs.get("pin_memory"):
            host_kwargs["pin_memory"] = False
        out = func(*tree_map(down, args), **host_kwargs)
        originals = {}
        if writes:
            for original, copy in copies.values():
                originals[id(copy)] = original
                if original.is_cuda:
                    original.copy_(copy)

        def up(value: Any) -> Any:
            return originals.get(id(value), value.to(place)) if isinstance(value, torch.Tensor) else value

        return self._mark(tree_map(up, out))


def _in_turn(out: Any, number: int) -> Any:
    """Chosen experts [..., K]: one after the other."""
    values, index = out
    index.copy_((torch.arange(index.numel()) % number).view(index.shape))
    return values, index


def _from_row(out: Any) -> Any:
    """The order of scores [T, E] by which Megatron chooses experts: token t prefers expert t, then the next ones."""
    values, index = out
    order = torch.arange(index.numel() // index.shape[-1])[:, None] + torch.arange(index.shape[-1])
    index.copy_((order % index.shape[-1]).view(index.shape))
    return values, index


def _answer(func: Any, args: Any, out: Any) -> None:
    """Integers that other ranks send are those that this rank sends."""
    packet = func.overloadpacket
    if packet is torch.ops.c10d.alltoall_base_ and _is_index(args[0]) and args[0].shape == args[1].shape:
        args[0].copy_(args[1])
    elif packet is torch.ops.c10d._allgather_base_ and _is_index(args[0]):
        args[0].copy_(_of_all(args[1], args[0]))
    elif packet is torch.ops._c10d_functional.all_gather_into_tensor and _is_index(out):
        out.copy_(_of_all(args[0], out))


def _of_all(own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The gathered values of ranks that all have `own`, on the host: a kernel would have to repeat them."""
    return own.cpu().flatten().repeat(whole.numel() // own.numel()).view(whole.shape)

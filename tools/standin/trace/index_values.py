"""True values of index arithmetic on a device that does not compute.

Offsets of packed rows, rows of each expert, orders and masks decide shapes, and the host reads them. Operations on
integers, and on constants that are made of them, are computed on the host, which reads and writes the device's memory
by its address. Numbers that are computed of weights have no values: the host reads them as 0. Experts are chosen in
turn, so all get as many rows, and ranks that are absent send what this one has.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

ATEN = torch.ops.aten
MOST_NUMBERS = 1 << 23
"""Of an operation's arguments together: above, it is not computed."""

MOST_FLOATS = 1 << 21
"""Of a result that holds no integers: above, it is taken for weights or gradients, and has no value."""

WRITES = 1 << 18
"""Bytes up to which any copy to the device takes place: torch.tensor() makes one that no mode sees."""

UNTOUCHED = {
    ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided, ATEN.detach, ATEN.alias,
    ATEN.set_, ATEN._local_scalar_dense, ATEN._pin_memory, ATEN.is_pinned, ATEN.record_stream, ATEN.lift_fresh,
    ATEN.resize_,
}  # fmt: skip
"""They compute nothing."""

FILLS = {ATEN.zeros_like, ATEN.ones_like, ATEN.full_like, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full}
"""Their values do not depend on those of their argument."""

ZEROS = {ATEN.zeros, ATEN.zeros_like, ATEN.new_zeros}
LIBC = ctypes.CDLL(None)

BYTES = (torch.uint8, torch.int8)
"""Of weights that move between host and device."""

COPIES = {ATEN._to_copy, ATEN.copy_, ATEN.clone}
CONVOLUTIONS = {ATEN.convolution, ATEN.convolution_backward}
"""Of cuDNN, which has no stand-in: they have no values, and torch's own kernels would go from patch to patch."""

INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
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
        if packet in CONVOLUTIONS and tensors[0].is_cuda:
            return _without_values(func, args, kwargs)
        if packet is ATEN.topk and tensors[0].is_cuda:
            return _in_turn(func(*args, **kwargs), tensors[0].shape[-1])
        if packet is ATEN.sort and tensors[0].is_cuda:
            if not self._has_value(tensors[0]):
                return _from_row(func(*args, **kwargs))
            if tensors[0].dtype is torch.bool and tensors[0].ndim == 1 and kwargs.get("descending"):
                return chosen_first(func(*args, **kwargs), tensors[0])
        if packet is ATEN._local_scalar_dense and not self._has_value(tensors[0]):
            return 0.0
        if packet in UNTOUCHED or func.namespace != "aten" or not all(map(_is_plain, tensors)):
            return func(*args, **kwargs)
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)
        if alias is not None and not writes:  # a view
            out = func(*args, **kwargs)
            return self._mark(out) if tensors and tensors[0].is_cuda and self._has_value(tensors[0]) else out
        if packet in FILLS or not tensors:
            out = func(*args, **kwargs)
            is_filled = isinstance(out, torch.Tensor) and out.is_cuda and packet not in RANDOM
            return self._filled(func, args, kwargs, out) if is_filled else out
        if self._is_computed(func, args, kwargs, tensors):
            place = next(tensor.device for tensor in tensors if tensor.is_cuda)
            return self._on_host(func, args, kwargs, place, writes=writes)
        if packet in INDEXED:  # kernels that count what a mask holds have not run
            args = (args[0], _positions(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if packet in COPIES:
            source, target = (args[1], args[0]) if packet is ATEN.copy_ else (args[0], out)
            if source.is_cuda != target.is_cuda and _is_index(source) and source.dtype not in BYTES:
                at_host(target).copy_(at_host(source))
            elif source.is_cuda and not target.is_cuda and target.nbytes <= WRITES and not self._has_value(source):
                target.zero_()
        if writes and isinstance(args[0], torch.Tensor):
            self._known.pop(args[0], None)
        return out

    def _has_value(self, tensor: torch.Tensor) -> bool:
        return _is_index(tensor) or not tensor.is_cuda or tensor in self._known

    def _mark(self, out: Any) -> Any:
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and not _is_index(tensor) and _is_small(tensor):
                self._known[tensor] = True
        return out

    def _filled(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        """A new tensor of the device whose values depend on no other tensor's."""
        if not (_is_index(out) or _is_small(out)):
            return out
        if func.overloadpacket in ZEROS:
            clear(out)
        else:
            at_host(out).copy_(self._host_call(func, args, kwargs, {}))
        return self._mark(out)

    def _is_computed(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether the host computes this operation in the device's place."""
        packet = func.overloadpacket
        if sum(tensor.numel() for tensor in tensors) > MOST_NUMBERS or not any(tensor.is_cuda for tensor in tensors):
            return False
        if not all(map(self._has_value, tensors)):
            return False
        if packet in COPIES:  # those between host and device take place as they are
            source, target = (args[1], args[0].device) if packet is ATEN.copy_ else (args[0], kwargs.get("device"))
            return target is None or source.device == target
        return True

    def _on_host(self, func: Any, args: Any, kwargs: Any, place: Any, *, writes: bool) -> Any:
        places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        out = self._host_call(func, args, kwargs, places)
        originals = {id(there): value for value, there in places.values()} if writes else {}

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or id(value) in originals:
                return originals.get(id(value), value)
            made = torch.empty_like(value, device=place)
            at_host(made).copy_(value)
            return made

        return self._mark(tree_map(up, out))

    def _host_call(
        self, func: Any, args: Any, kwargs: Any, places: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> Any:
        """What the operation returns on the host. `places` gets the device's tensors by their ids, and those there."""

        def down(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor):
                return value
            if func.overloadpacket in FILLS:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if id(value) not in places:
                places[id(value)] = value, at_host(value)
            return places[id(value)][1]

        host_kwargs = tree_map(down, kwargs)
        if host_kwargs.get("pin_memory"):
            host_kwargs["pin_memory"] = False
        return func(*tree_map(down, args), **host_kwargs)


class FalseAnswers(TorchDispatchMode):
    """Active in a weight sync, which asks whether any bits differ: bits of weights have no values, so none do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_cuda and out.dtype is torch.bool:
            clear(out)
        return out


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= MOST_FLOATS


def clear(tensor: torch.Tensor) -> None:
    """Set a new tensor of the device to 0. Its whole pages are given back to the machine, and read as 0."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        ctypes.memset(first, 0, tensor.nbytes)
        return
    ctypes.memset(first, 0, begin - first)
    ctypes.memset(end, 0, last - end)
    failed = LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
    assert not failed, f"madvise of {end - begin} bytes"


def at_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host over the same bytes, which on this device are memory of the process."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    view = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    numbers = torch.frombuffer(view, dtype=tensor.dtype, count=storage.nbytes() // tensor.itemsize)
    return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """New tensors of the device with the shapes of the results."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    made = func(*args, **kwargs)
    return tree_map(lambda leaf: None if leaf is None else torch.empty_like(leaf, device=tensors[0].device), made)


def _positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The indices of an operation, with the positions of what each mask holds in its place."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.is_cuda and index.dtype is torch.bool:
            found += [places.to(index.device) for places in at_host(index).nonzero().unbind(1)]
        else:
            found.append(index)
    return found


def _in_turn(out: Any, number: int) -> Any:
    """Chosen experts [..., K]: one after the other."""
    values, index = out
    at_host(index).copy_((torch.arange(index.numel()) % number).view(index.shape))
    return values, index


def _from_row(out: Any) -> Any:
    """The order of scores [T, E] by which Megatron chooses experts: token t prefers expert t, then the next ones."""
    values, index = out
    order = torch.arange(index.numel() // index.shape[-1])[:, None] + torch.arange(index.shape[-1])
    at_host(index).copy_((order % index.shape[-1]).view(index.shape))
    return values, index


def chosen_first(out: Any, mask: torch.Tensor) -> Any:
    """The order of Megatron's map of chosen experts bool [E T], as a stable sort has it, which takes longer."""
    values, index = out
    chosen = at_host(mask).nonzero().flatten()
    at_host(values).copy_(torch.arange(mask.numel()) < chosen.numel())
    at_host(index).copy_(torch.cat([chosen, at_host(mask).logical_not().nonzero().flatten()]))
    return values, index


def _answer(func: Any, args: Any, out: Any) -> None:
    """Integers that other ranks send are those that this rank sends."""
    packet = func.overloadpacket
    if packet is torch.ops.c10d.alltoall_base_ and _is_index(args[0]) and args[0].shape == args[1].shape:
        at_host(args[0]).copy_(at_host(args[1]))
    elif packet is torch.ops.c10d._allgather_base_ and _is_index(args[0]):
        at_host(args[0]).copy_(_of_all(args[1], args[0]))
    elif packet is torch.ops._c10d_functional.all_gather_into_tensor and _is_index(out):
        at_host(out).copy_(_of_all(args[0], out))


def _of_all(own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The gathered values of ranks that all have `own`."""
    return at_host(own).flatten().repeat(whole.numel() // own.numel()).view(whole.shape)

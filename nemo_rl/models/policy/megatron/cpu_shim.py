"""Megatron Core on a machine without a GPU, and its warnings. Import this module before any module of Megatron.

`install` gives Megatron's modules a stand-in for `torch` in their own namespace: "cuda" devices are the CPU; streams
and events are those of `torch.cpu`, which do nothing. The real torch is unchanged. Workers without a GPU call it.
`close_gaps` is for every machine: it closes gaps of megatron-core 0.19 without Transformer Engine.

Importing this module silences warnings that Megatron and its dependencies repeat in every process.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like", "rand")

_IRRELEVANT_WITHOUT_GPU = (  # about kernels, CUDA queues and CUDA graphs
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "When using async grad allreduce it is recommended",
    "When using sequence parallelism it is recommended",
    "full scope is deprecated",
)
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    category=FutureWarning,
)
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental", category=UserWarning)
for module in (  # which warn that they get no new features, and that they lay out parameters themselves
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
):
    logging.getLogger(module).setLevel(logging.ERROR)
if not torch.cuda.is_available():
    for message in _IRRELEVANT_WITHOUT_GPU:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns that no CUDA runtime is found


class _Stream(torch.cpu.Stream):
    """A stream in which everything has happened already."""

    def record_event(self) -> torch.cpu.Event:  # pyrefly: ignore[bad-override]  (annotated None)
        return torch.cpu.Event()


class _StandIn(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


_stand_in: _StandIn | None = None


def install() -> None:
    """Make the modules of Megatron that are imported by now run on the host.

    Raises:
        RuntimeError: there is a GPU.
    """
    global _stand_in
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: Megatron runs on it as it is, without stand-ins for torch.cuda")
    if _stand_in is None:
        logger.info("no GPU: Megatron Core runs on the CPU, with host stand-ins for torch.cuda (megatron/cpu_shim.py)")
        replaced = {name: _on_host(getattr(torch, name)) for name in _FACTORIES}
        cuda = {name: vars(torch.cpu)[name] for name in ("current_device", "stream", "synchronize", "Event")}
        cuda |= {"Stream": _Stream, "current_stream": _Stream}
        cuda |= {name: vars(torch)[name] for name in ("manual_seed", "get_rng_state")}
        _stand_in = _StandIn(torch, {"cuda": _StandIn(torch.cuda, cuda), **replaced})
        _replace_tensor_methods()
        _replace_functions()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            vars(module)["torch"] = _stand_in


def _is_megatron(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("megatron.")


def _replace_tensor_methods() -> None:
    to_cuda, type_of = torch.Tensor.cuda, torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _is_megatron(sys._getframe(1)) else to_cuda(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and _is_megatron(sys._getframe(1)):  # which compares it with the names of CUDA types
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        return type_of(self) if dtype is None else type_of(self, dtype, *args, **kwargs)

    torch.Tensor.cuda = cuda
    torch.Tensor.type = type_


def _replace_functions() -> None:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import token_dispatcher

    parallel_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()  # pyrefly: ignore[bad-assignment]
    parallel_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    mappings._gather_along_first_dim = _gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter(mappings._reduce_scatter_along_first_dim)
    # gloo needs split sizes as numbers; Megatron converts CUDA tensors only.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (  # pyrefly: ignore[bad-assignment]
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # Megatron gathers shards of unequal sizes, which gloo refuses.
    LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params
    # Megatron compiles a C++ extension that shares memory, which takes half a minute and a compiler.
    parallel_random._get_share_storage = lambda: _copy_storage


def _copy_storage(released: torch.Tensor, computed: torch.Tensor) -> None:
    """Give `released`, whose memory was freed, the values that were computed again."""
    values = computed.untyped_storage()
    released.untyped_storage().resize_(values.size())
    released.untyped_storage().copy_(values)


def close_gaps() -> None:
    """Define the names that Megatron uses, and leaves undefined without Transformer Engine."""
    from megatron.core.tensor_parallel import random as parallel_random

    fp8_is_off = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    parallel_random.__dict__.setdefault("FP8GlobalStateManager", fp8_is_off)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        parallel_random.__dict__.setdefault(name, lambda **settings: contextlib.nullcontext())


def _gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gathers shards [n, ...] of any n; gloo supports equal shapes only."""

    def gather(part: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return even(part, group, output_split_sizes, *args)
        parts = [part.new_empty(size, *part.shape[1:]) for size in output_split_sizes]
        parts[group.rank()].copy_(part)
        for rank, one in enumerate(parts):
            dist.broadcast(one, src=dist.get_global_rank(group, rank), group=group)
        return torch.cat(parts)

    return gather


def _reduce_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Reduce-scatter into shards of any length."""

    def scatter(
        whole: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or len(set(input_split_sizes)) == 1:
            return even(whole, group, input_split_sizes, *args)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    return scatter

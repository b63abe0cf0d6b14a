"""Megatron Core on a machine without a GPU, and its warnings. Import this module before any module of Megatron.

`install` gives Megatron's modules a stand-in for `torch` in their own namespace, in which CUDA's streams and events do
nothing and "cuda" devices are the CPU; the real torch is unchanged. It also closes gaps of megatron-core 0.16 without
Transformer Engine. It is installed only without a GPU, and logged.

Importing this module silences warnings that Megatron and its dependencies repeat in every process.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
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
_PACKAGES = (
    "parallel_state", "utils", "timers", "rerun_state_machine", "num_microbatches_calculator", "fp8_utils",
    "tensor_parallel", "transformer", "models.gpt", "models.common", "pipeline_parallel", "distributed", "optimizer",
    "dist_checkpointing", "fusions",
)  # fmt: skip
_NOT_IMPORTED = ("fsdp", "cuda_graphs", "bert", "mamba", "kitchen", "fine_grained", "combined_1f1b", "fused_a2a")
_installed = False

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
if not torch.cuda.is_available():
    for message in _IRRELEVANT_WITHOUT_GPU:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns that no CUDA runtime is found


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Queue(contextlib.AbstractContextManager["_Queue"]):
    """A CUDA stream or event where everything has happened already. All are equal: there is one queue."""

    __init__ = __exit__ = record = wait = wait_stream = wait_event = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Queue) -> float:
        return 0.0

    def record_event(self, event: _Queue | None = None) -> _Queue:
        return event or _Queue()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Queue)

    def __hash__(self) -> int:
        return 0


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


def _cuda() -> _StandIn:
    replaced: dict[str, Any] = dict.fromkeys(
        ("synchronize", "empty_cache", "set_device", "nvtx_range_push", "reset_peak_memory_stats"), _nothing
    )
    replaced |= {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "memory_allocated": lambda *args: 0,
        "Stream": _Queue,
        "Event": _Queue,
        "current_stream": _Queue,
        "default_stream": _Queue,
        "stream": lambda given: contextlib.nullcontext(),
    }
    return _StandIn(torch.cuda, replaced)


def install() -> None:
    """Make Megatron run on the host. A no-op after the first call.

    Raises:
        RuntimeError: there is a GPU.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: Megatron runs on it as it is, without stand-ins for torch.cuda")
    _installed = True
    logger.info("no GPU: Megatron Core runs on the CPU, with host stand-ins for torch.cuda (megatron/cpu_shim.py)")
    factories = {name: _on_host(getattr(torch, name)) for name in _FACTORIES}
    stand_in = _StandIn(torch, {"cuda": _cuda(), **factories})
    for module in _megatron_modules():
        if module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = stand_in
    _replace_tensor_methods()
    _close_gaps()


def _megatron_modules() -> list[types.ModuleType]:
    import megatron.core

    modules = []
    for name in _PACKAGES:
        module = importlib.import_module(f"megatron.core.{name}")
        modules.append(module)
        for found in pkgutil.walk_packages(vars(module).get("__path__", ()), f"{module.__name__}."):
            if not any(part in found.name for part in _NOT_IMPORTED):
                with contextlib.suppress(ImportError):  # modules of optional packages
                    modules.append(importlib.import_module(found.name))
    return [*modules, megatron.core]


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


def _close_gaps() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    parallel_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Megatron uses these names, which are undefined without Transformer Engine.
    fp8_is_off = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    parallel_random.__dict__.setdefault("FP8GlobalStateManager", fp8_is_off)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        parallel_random.__dict__.setdefault(name, lambda **settings: contextlib.nullcontext())
    mappings._gather_along_first_dim = _gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter(mappings._reduce_scatter_along_first_dim)
    moe_utils.__dict__.setdefault("te_general_gemm", None)
    # Without Transformer Engine its classes are mocks, which isinstance does not accept.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    # gloo needs split sizes as numbers; Megatron converts CUDA tensors only.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


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

"""The entries of SGLang's processes on a CPU, and what they replace in SGLang 0.5.23 in memory.

SGLang's engine starts its scheduler and its detokenizer with functions that a subclass may name. Ours import this
module first, so that SGLang finds what it needs:

* A stand-in for `sgl_kernel`. SGLang's operators for CPUs are in no package of a registry, and are imported by name in
  any case. With the settings of `worker.engine_arguments` none is called; one that is raises.
* Samples by the seed and the position alone. SGLang takes seeds into account only with its deterministic inference,
  which the attention for CPUs does not have, and then in a kernel for GPUs.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any

import numpy as np
import torch

_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class KernelsOfCpu(types.ModuleType):
    """Has every name, as a function that raises NotImplementedError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"SGLang called sgl_kernel.{name}, which is not installed on a CPU")

        return absent


def prepare_import() -> None:
    """Let sglang be imported on a machine without a GPU. Call before the first import of it in a process."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    kernels = KernelsOfCpu("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    sys.modules["sgl_kernel"] = kernels


def run_scheduler(*args: Any) -> None:
    """SGLang's scheduler, which has the model."""
    prepare_import()
    torch.set_num_threads(1)

    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", with_seeds, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", draw, HookType.REPLACE)
    run_scheduler_process(*args)


def run_detokenizer(*args: Any) -> None:
    """SGLang's detokenizer, which finds stop strings."""
    prepare_import()

    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args)


def with_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """The sampling information of a batch with the seeds of its requests."""
    info.sampling_seed = torch.tensor([request.sampling_params.sampling_seed for request in batch.reqs])
    return info


def draw(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token of each row of `logprobs` [B, V], by `seed` and `positions` (int64 [B]) of the row: int64 [B, 1].

    The rows need not be normalised. The bits of `seed` and position are mixed as in SplitMix64.
    """
    bits = seed.numpy().astype(np.uint64) * _GOLDEN + positions.numpy().astype(np.uint64)
    for _ in range(2):
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX[0]
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX[1]
        bits ^= bits >> np.uint64(31)
    uniform = torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    below = logprobs.double().exp().cumsum(-1)
    drawn = torch.searchsorted(below, (uniform * below[:, -1])[:, None], right=True)
    return drawn.clamp(max=logprobs.shape[1] - 1)

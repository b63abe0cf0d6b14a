"""The entries of SGLang's processes.

SGLang's engine starts its schedulers (one for each rank) and its detokenizer with functions that a subclass may name.
Ours first install `hooks` in a scheduler. On a CPU they also put a stand-in in the place of `sgl_kernel`: SGLang's
operators for CPUs are in no package of a registry, and are imported by name in any case. With the settings of
`worker.engine_arguments` none is called; one that is raises.
"""

from __future__ import annotations

import gc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl.models.generation.sglang import hooks
from nemo_rl.models.generation.sglang.config import files_of_models, models_of


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


def leave_out_models(architectures: Sequence[str]) -> None:
    """Let the processes that this one starts from now on import only the models named in config.json.

    SGLang otherwise imports all of its 250 modules of models, which takes most of the start's CPU time.
    """
    files = files_of_models()
    if named := models_of(architectures, files):
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(path.stem for path in files if path not in named)


def run_scheduler_on_cpu(*args: Any) -> None:
    """SGLang's scheduler, which has the model."""
    prepare_import()
    torch.set_num_threads(1)

    from sglang.srt.managers.scheduler import run_scheduler_process

    hooks.install(hooks.ON_CPUS)
    # SGLang collects garbage whenever it drops its cache, in every sync: most of a second over what imports have made.
    gc.freeze()
    run_scheduler_process(*args)


def run_scheduler_on_gpu(*args: Any) -> None:
    """The scheduler of one rank, which has that rank's part of the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    hooks.install(hooks.ON_GPUS)
    run_scheduler_process(*args)


def run_detokenizer_on_cpu(*args: Any) -> None:
    """SGLang's detokenizer, which finds stop strings."""
    prepare_import()

    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args)

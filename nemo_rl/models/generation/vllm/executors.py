"""vLLM's executors, which end with the worker that started the engine.

vLLM starts the engine as a child process and stops it on an orderly shutdown only. If the parent is killed, the engine
stays and keeps its memory. These executors ask the kernel to kill the process with its parent. The other ranks of an
engine watch the engine's process themselves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_PR_SET_PDEATHSIG = 1


class BoundUniProcExecutor(UniProcExecutor):
    """Computes in the engine's process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class BoundMultiprocExecutor(MultiprocExecutor):
    """Computes in one process per rank."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()
        if self.parallel_config.pipeline_parallel_size > 1 and current_platform.is_cpu():
            self.collective_rpc("make_pipeline_buffers")


def executor_class(config: VllmConfig) -> type[Executor]:
    """The bound form of the executor that vLLM chose."""
    chosen = Executor.get_class(config)
    return next(bound for bound in (BoundUniProcExecutor, BoundMultiprocExecutor) if bound.__base__ is chosen)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Exit now if the parent is already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine runs in a process of its own"
    if os.getppid() != parent.pid:
        os._exit(1)

"""The nodes of one engine. vLLM's executor with one process per rank spans nodes without Ray of its own: the executors
of all nodes meet at an address of the first, whose scheduler they then obey.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from nemo_rl.distributed.collectives import own_address, release_port

# -- vLLM's executors, tied to the life of the process that started the engine.
#
# vLLM starts the engine as a child and ends it on an orderly shutdown only: when the parent is killed, the engine stays
# and holds its memory. These are made inside the engine's process and ask the kernel to end it with its parent. The
# other ranks of a tensor-parallel engine follow, as they watch the engine's process themselves.

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
    """The tied executor in place of the one vLLM chose. Raises ValueError for one there is no tied form of."""
    chosen = Executor.get_class(config)
    for bound in (BoundUniProcExecutor, BoundMultiprocExecutor):
        if bound.__base__ is chosen:
            return bound
    raise ValueError(
        f"vLLM chose {chosen.__name__} to run the engine: remove distributed_executor_backend from "
        "policy.generation.vllm_kwargs"
    )


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and end it now if the parent is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine runs in a process of its own"
    if os.getppid() != parent.pid:
        os._exit(1)


@dataclass(frozen=True, kw_only=True)
class EngineNodes:
    """How many nodes an engine has, which one this is, and where they meet."""

    num_nodes: int
    rank: int
    address: str
    port: int

    @classmethod
    def join(cls) -> EngineNodes:
        """From the environment of the worker group, which has one worker on each node of the engine.

        The first node's port, held until now, is free for vLLM to bind. Outside of a worker group there is one node.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls(num_nodes=1, rank=0, address="127.0.0.1", port=0)
        nodes = cls(
            num_nodes=int(os.environ["WORLD_SIZE"]),
            rank=int(os.environ["RANK"]),
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
        )
        if nodes.num_nodes > 1:
            os.environ["VLLM_HOST_IP"] = own_address(nodes.address, nodes.port)
            if nodes.rank == 0:
                release_port()
        return nodes

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What vLLM is told of it."""
        if self.num_nodes == 1:
            return {}
        return {
            "nnodes": self.num_nodes,
            "node_rank": self.rank,
            "master_addr": self.address,
            "master_port": self.port,
        }

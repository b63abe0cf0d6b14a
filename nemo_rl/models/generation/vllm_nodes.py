"""The nodes of one engine. vLLM's executor with one process per rank spans nodes without Ray of its own: the executors
of all nodes meet at an address of the first, whose scheduler they then obey.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from nemo_rl.distributed.collectives import own_address, release_port


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

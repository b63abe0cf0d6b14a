"""Configuration of the machines a run uses."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.config.rules import NotYet, one_of


class ClusterConfig(StrictModel):
    """Machines: how many nodes, and how many GPUs or CPU workers of each."""

    gpus_per_node: int = Field(default=1, ge=0)
    """GPUs used on each node. 0 runs everything on CPU."""

    num_nodes: int = Field(default=1, ge=1)
    """Nodes of the run."""

    cpu_workers_per_node: int = Field(default=1, ge=1)
    """Training ranks on each node when `gpus_per_node` is 0."""

    worker_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for a worker; past it the run ends and shows which worker hangs, where, with its Python stack."""

    not_yet: ClassVar = (
        NotYet("segment_size", one_of(None)),
        NotYet("master_port_range_low", one_of(None), harmless=True),
        NotYet("master_port_range_high", one_of(None), harmless=True),
    )

    @property
    def use_gpus(self) -> bool:
        return self.gpus_per_node > 0

    @property
    def unit(self) -> str:
        """The key that counts the workers of a node."""
        return "gpus_per_node" if self.use_gpus else "cpu_workers_per_node"

    @property
    def kind(self) -> str:
        """`GPUs` or `CPU workers`, for messages."""
        return "GPUs" if self.use_gpus else "CPU workers"

    @property
    def workers_per_node(self) -> int:
        """Workers of one group on each node: one per GPU, or `cpu_workers_per_node`."""
        return self.gpus_per_node if self.use_gpus else self.cpu_workers_per_node

    @property
    def num_workers(self) -> int:
        return self.workers_per_node * self.num_nodes

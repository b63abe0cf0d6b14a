"""The driver's handle of all replicas of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.distributed.worker_template import HOST_ENVIRONMENT
from nemo_rl.models.generation.config import ENGINES, GenerationConfig
from nemo_rl.models.generation.interfaces import (
    GENERATION,
    DraftCounts,
    EngineSettings,
    EngineWorkerInterface,
    GenerationInterface,
)
from nemo_rl.refit.layout import Transport
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.venvs import python_executable_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """How the workers of an engine's replicas start.

    `extra`: of the project, whose environment the worker needs. `worker` and `worker_of_node`: of an engine on one node
    and of one node of an engine on several, as `nemo_rl.utils.registry` finds them. `environment`: variables on a CPU.
    """

    extra: Callable[[bool], str]  # of whether there are GPUs
    worker: str
    worker_of_node: str
    environment: Mapping[str, str]


class EngineGeneration(GenerationInterface):
    """One engine per data-parallel replica, on `engine_size` bundles: neighbours on one node, or whole nodes.

    Args:
        cluster: the bundles, all of which are used. With colocated generation it is the policy's own cluster.
        settings: of each engine; `device` and `weight_transfer` are set here.
        accelerator: generation registers there.
    """

    kind: ClassVar[EngineKind]

    def __init__(
        self,
        cluster: RayVirtualCluster,
        settings: EngineSettings,
        *,
        accelerator: Accelerator,
        timeout_s: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._accelerator = accelerator
        self._bundle_groups = engine_bundles(cluster, settings.cfg.engine.engine_size)
        self._timeout_s = timeout_s
        self._py_executable = python_executable_for(self.kind.extra(cluster.use_gpus))
        self.transport: Transport = "packed_ipc" if cluster.use_gpus else "packed_shm"
        if not settings.cfg.colocated.enabled:
            self.transport = "packed_collective"
        device = "cuda" if cluster.use_gpus else "cpu"
        self._settings = replace(settings, device=device, weight_transfer=self.transport)
        cluster.bundles()  # reserve them once, before the replicas start in parallel
        super().__init__(len(self._bundle_groups), self._start_replica)
        self.weights_follow = settings.load_format == "dummy"
        accelerator.register(GENERATION, self.onload, self.offload, is_awake=True)

    @classmethod
    def check(cls, generation: GenerationConfig, model: PretrainedConfig, *, on_gpus: bool) -> None:
        """Raise ValueError, before anything starts, if this engine cannot run or cannot generate with `model`."""

    @property
    def num_engine_ranks(self) -> int:
        """Number of ranks of all engines together."""
        return sum(len(bundles) for nodes in self._bundle_groups for bundles in nodes)

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Move "weights", "kv_cache", or both (None) back onto the device."""
        self._call_all(EngineWorkerInterface.onload, tags)

    def offload(self) -> None:
        """Free the device. No request may be in flight. The weights are saved unless a sync will replace them all."""
        self._call_all(EngineWorkerInterface.offload, keep_weights=not self.weights_follow)

    def draft_counts(self) -> dict[Any, DraftCounts]:
        return dict(zip(self.workers, self._call_all(EngineWorkerInterface.draft_counts), strict=True))

    def describe_model(self) -> dict[str, Any]:
        return self._call_all(EngineWorkerInterface.describe_model)[0]

    def dead_workers(self) -> list[int]:
        dead = []
        limit_s = self._timeout_s / 4 if self._timeout_s is not None else None  # as `EngineClient` waits
        for index, replica in enumerate(self._replicas):
            try:
                replica.wait(replica.start_all(EngineWorkerInterface.check_health), limit_s)
            except WorkerError as error:
                logger.warning("%s", first_line(error))
                dead.append(index)
        return dead

    def restart_worker(self, index: int) -> None:
        awake = self._accelerator.awake
        if awake is not None and awake != GENERATION:
            self._accelerator.release(awake)  # an engine measures the free memory of its device when it starts
        super().restart_worker(index)
        self.weights_follow = True

    def shutdown(self) -> None:
        for replica in self._replicas:
            replica.shutdown(EngineWorkerInterface.shutdown)

    def _start_replica(self, index: int) -> RayWorkerGroup:
        nodes = self._bundle_groups[index]
        on_gpus, own = self._cluster.use_gpus, self._settings.cfg.engine.env_vars
        env_vars = own if on_gpus else HOST_ENVIRONMENT | own | dict(self.kind.environment)
        group = RayWorkerGroup(
            self._cluster,
            RayWorkerBuilder(
                self.kind.worker if len(nodes) == 1 else self.kind.worker_of_node,
                replace(self._settings, replica=index),
            ),
            name_prefix=f"{GENERATION}-{index}",
            bundle_groups=nodes,
            py_executable=self._py_executable,
            env_vars=env_vars,
            timeout_s=self._timeout_s,
        )
        if len(nodes) > 1:
            group.wait([group.start_one(0, EngineWorkerInterface.end_with, group.workers[1:])])
        return group


def engines_of(backend: str) -> type[EngineGeneration]:
    """The class of `generation.backend`. Raises ValueError if an import path leads to none."""
    found = import_object(ENGINES.get(backend, backend), "generation.backend")
    if not (isinstance(found, type) and issubclass(found, EngineGeneration)):
        raise ValueError(f"generation.backend {backend!r} must be a subclass of {EngineGeneration.__name__}")
    return found


def engine_bundles(cluster: RayVirtualCluster, size: int) -> list[list[list[int]]]:
    """The bundles of each engine, by node: neighbours on one node, or all bundles of several nodes."""
    by_node = cluster.bundles_by_node()
    per_node = len(by_node[0])
    assert size % per_node == 0 or per_node % size == 0, "the configuration was checked against the cluster"
    if (num_nodes := size // per_node) > 1:
        return [by_node[start : start + num_nodes] for start in range(0, len(by_node), num_nodes)]
    return [[node[start : start + size]] for node in by_node for start in range(0, len(node), size)]

"""Generation by the policy's own workers: the driver's handle, and the sync of weights that has nothing to move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.hf_worker import PolicyRanks
from nemo_rl.models.generation.interfaces import GenerationInterface

WORKER = "nemo_rl.models.generation.hf_worker.HfWorker"


class GeneratingPolicy(Protocol):
    """A policy whose workers have `generate`."""

    def prepare_generation(self) -> None:
        """Make the workers ready to generate. Called again after they were replaced."""
        ...

    @property
    def generating_workers(self) -> list[Any]:
        """Actor handles by rank."""
        ...

    @property
    def data_coordinates(self) -> list[int]:
        """The data-parallel coordinate of each worker."""
        ...

    def check_health(self) -> None:
        """Raises WorkerDied, naming the worker, when one is gone."""
        ...


class HfGeneration(GenerationInterface):
    """One front actor, through which the policy's workers answer requests.

    Weights are never sent: what is trained is what generates.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        policy: GeneratingPolicy,
        *,
        max_model_len: int,
        name_prefix: str = "generation",
        timeout_s: float | None = None,
    ) -> None:
        self._policy = policy
        self._name_prefix = name_prefix
        self._bytes_of_ended = 0
        self._version = -1

        def start() -> RayWorkerGroup:
            return RayWorkerGroup(
                cluster,
                RayWorkerBuilder(WORKER, max_model_len),
                name_prefix=name_prefix,
                num_workers=1,
                timeout_s=timeout_s,
            )

        self._start: Callable[[], RayWorkerGroup] = start
        self._front = start()

    @property
    def name_prefix(self) -> str:
        return self._name_prefix

    @property
    def workers(self) -> list[Any]:
        return self._front.workers

    @property
    def controller_tensor_bytes(self) -> int:
        return self._bytes_of_ended + self._front.controller_tensor_bytes

    def use_policy(self) -> None:
        """Send requests to the policy's present workers."""
        self._policy.prepare_generation()
        self._use_policy()

    def _use_policy(self) -> None:
        ranks = PolicyRanks(workers=self._policy.generating_workers, data_ranks=self._policy.data_coordinates)
        self._front.call_one(0, "use", ranks)

    def rest(self) -> None:
        """Forget what nobody waits for; when this returns the policy's workers are free."""
        self._front.call_one(0, "rest")

    # Weights

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        raise NotImplementedError("the policy's workers generate: no weights are sent")

    def start_weight_update(self, *, clear_cache: bool = True) -> None:
        self.rest()

    def receive_bucket_async(self, info: dict[str, Any], *, turn: int) -> list[Any]:
        raise NotImplementedError("the policy's workers generate: no weights are sent")

    def wait(self, futures: Sequence[Any]) -> None:
        assert not futures

    def finish_weight_update(self, version: int) -> None:
        self._front.call_one(0, "set_weight_version", version)
        self._version = version

    # Device: the policy's, which is there

    def onload(self, tags: Sequence[str] | None = None) -> None:
        pass

    def offload(self) -> None:
        self.rest()

    def reset_prefix_cache(self) -> None:
        pass

    # Life

    def dead_workers(self) -> list[int]:
        """The front's number when it is gone. Raises WorkerDied of the policy when one of its workers is."""
        self._policy.check_health()
        try:
            self._front.call_one(0, "counters")
        except WorkerDied:
            return [0]
        return []

    def abandon_requests(self) -> None:
        self._front.call_one(0, "abandon_requests")

    def restart_worker(self, index: int) -> None:
        assert index == 0
        self._bytes_of_ended += self._front.controller_tensor_bytes
        self._front.shutdown()
        self._front = self._start()
        self._use_policy()

    def num_generated_tokens(self) -> int:
        return self._front.call_one(0, "counters")["num_generated_tokens"]

    def shutdown(self) -> None:
        self._front.shutdown()


class SharedWeights:
    """In place of a refit where policy and generation are the same workers: a sync stamps the version."""

    def __init__(self, generation: HfGeneration) -> None:
        self.generation = generation

    def prepare(self) -> None:
        """Once, and again after workers of the policy were replaced."""
        self.generation.use_policy()

    def sync(self, version: int) -> dict[str, float]:
        """Samples from now on are stamped with `version`. Returns `sync_s`, and zeros for what a refit would move."""
        started = time.perf_counter()
        self.generation.start_weight_update()
        self.generation.finish_weight_update(version)
        seconds = time.perf_counter() - started
        return {"sync_s": seconds, "gather_s": 0.0, "pack_s": 0.0, "bytes": 0.0, "num_buckets": 0.0}

"""The interface of generation backends."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl.distributed.worker_groups import RayWorkerGroup, start_groups, wait_groups
from nemo_rl.models.generation.config import GenerationConfig

if TYPE_CHECKING:  # every rollout worker imports this module, and none needs the tensors of the refit
    from nemo_rl.refit.layout import Transport

logger = logging.getLogger(__name__)

GENERATION = "generation"
"""Name of generation in the `Accelerator`, and prefix of its workers' names, which appear in errors."""


class EngineDied(RuntimeError):
    """The engine of a generation worker has ended. The worker must be restarted and receive the weights again."""


@dataclass
class DraftCounts:
    """Statistics of speculative decoding."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class GenerationInterface(ABC):
    """Replicas of an engine that completes token sequences. Each replica is a worker group, so it can restart alone.

    A client sends a list of `GenerationRequest` with `worker.call.remote("submit", requests)` to one of `workers`, and
    awaits `worker.call.remote("drain")`, which returns a list of `GenerationAnswer`. A completion depends neither on
    the replica nor on the other requests of the replica. `"abort"` with request ids stops sampling for requests that
    are no longer needed. `"check_health"` answers while the engine is busy.

    A weight sync is `init_weight_transfer` once, then `start_weight_update`, one `receive_bucket_async` per bucket, and
    `finish_weight_update`.
    """

    def __init__(self, num_replicas: int, start: Callable[[int], RayWorkerGroup]) -> None:
        self._start = start
        self.weights_follow = False  # the next weights come whole, before any further request
        self._replicas = start_groups(num_replicas, start)

    @property
    def workers(self) -> list[Any]:
        """Actor handles, one per replica."""
        return [replica.workers[0] for replica in self._replicas]

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Tell every engine where the weights will be. Call again after a replica was restarted.

        The keys of `init_info` depend on the transport.
        """
        self._call_all("init_weight_transfer", init_info)

    def start_weight_update(self, *, clear_cache: bool = True) -> list[Any]:
        """Begin to pause sampling and to prepare for buckets. Returns one future per replica, for `wait`.

        Requests in flight wait, then continue with the new weights. With `clear_cache` their KV cache is recomputed
        with the new weights; otherwise they keep it. Requests that begin after the update never use KV of the old
        weights.
        """
        return self._start_all("start_weight_update", clear_cache=clear_cache)

    def receive_bucket_async(self, info: dict[str, Any], *, turn: int) -> list[Any]:
        """Begin to read one bucket on every replica. Returns one future per replica, for `wait`.

        `turn` counts the buckets of a sync from 0. Buckets are read in this order, even if calls arrive in another.
        """
        return self._start_all("receive_bucket", info, turn=turn)

    def wait(self, futures: Sequence[Any]) -> None:
        """Wait for futures of `start_weight_update` or `receive_bucket_async`."""
        wait_groups(self._replicas, futures)

    def finish_weight_update(self, version: int) -> bool:
        """Activate the new weights as `version`, which stamps every later request, and resume sampling.

        Returns whether the engines would keep weights that a later update does not bring.
        """
        kept = self._call_all("finish_weight_update", version)
        self.weights_follow = False
        return all(kept)

    def describe_model(self) -> dict[str, Any]:
        """The settings in config.json of the model, as the engine reads them. Empty: it is the policy's own model."""
        return {}

    def compare_weights(self, step: str, **info: Any) -> list[Any]:
        """A step of a comparison of the engines' weights, which do not change, with buckets.

        Returns the results of all ranks of all engines: of `begin_comparison` why a rank cannot compare (None: it can),
        of `end_comparison` the tensors that differ, with the largest difference of a value. `compare_bucket` takes
        `bucket` and `fingerprints`.
        """
        return [result for ranks in self._call_all("compare_weights", step, **info) for result in ranks]

    @abstractmethod
    def dead_workers(self) -> list[int]:
        """Replicas whose process or engine is gone."""

    def abandon_requests(self) -> None:
        """Drop the requests in flight on every replica."""
        self._call_all("abandon_requests")

    def restart_worker(self, index: int) -> None:
        """Stop replica `index`, dead or alive, and start a new one. It has no weights until the next sync."""
        old = self._replicas[index]
        logger.warning("restarting %s", old.name_prefix)
        old.shutdown()
        self._replicas[index] = self._start(index)

    def restart_dead_workers(self) -> list[Any]:
        """Start dead replicas again, and drop all requests. Returns the handles of all replicas."""
        for index in self.dead_workers():
            self.restart_worker(index)
        self.abandon_requests()
        return self.workers

    def draft_counts(self) -> dict[Any, DraftCounts]:
        """Statistics of speculative decoding, by worker, since it was started; empty where there are no engines."""
        return {}

    def shutdown(self) -> None:
        """Stop the workers and their engines. May be called more than once."""
        for replica in self._replicas:
            replica.shutdown()

    def _start_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [replica.start_one(0, method, *args, **kwargs) for replica in self._replicas]

    def _call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return wait_groups(self._replicas, self._start_all(method, *args, **kwargs))


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Arguments of an engine, the same on each of its nodes."""

    model: str  # directory or hub name; with `load_format="dummy"` only its configuration is read
    tokenizer: str  # directory or hub name
    cfg: GenerationConfig  # `policy.generation`; its sampling defaults are not used, as each request has its own
    seed: int  # of the engine; each request has its own
    device: Literal["cpu", "cuda"] = "cpu"
    load_format: Literal["dummy", "auto"] = "dummy"  # "dummy": the policy sends the weights; "auto": from `model`
    weight_transfer: Transport = "packed_shm"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)  # replace values of config.json, as in training
    replica: int = 0  # number of this replica, for messages
    return_routed_experts: bool = False  # return the experts of every token with completions
    max_images: int | None = None  # of a prompt, for a model that sees images
    draft: Mapping[str, Any] | None = None  # config.json of a draft whose weights the policy sends

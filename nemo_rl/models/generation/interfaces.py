"""The interfaces of generation backends: of the controller's handle of all replicas, and of one replica."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ray import ObjectRef

from nemo_rl.distributed.actor_host import Method
from nemo_rl.distributed.worker_groups import RayWorkerGroup, start_groups, wait_groups
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.types import GenerationAnswer, GenerationRequest

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


class GenerationWorkerInterface(ABC):
    """One replica, in its own process: what clients and the controller call there.

    A client calls `submit`, and `drain` until it has all answers. A completion depends neither on the replica nor on
    the other requests of the replica.
    """

    @abstractmethod
    async def submit(self, requests: Sequence[GenerationRequest], client_id: str = "") -> None:
        """Begin to answer `requests`; `drain` with the same `client_id` returns the answers."""

    @abstractmethod
    async def drain(self, client_id: str = "") -> list[GenerationAnswer]:
        """Wait for an answer to this client and return all that are ready; see `AnswerQueue.take`."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Drop these requests, of which some may be unknown, and do not answer them."""

    @abstractmethod
    async def abandon_requests(self) -> None:
        """Drop every request. Clients must send them again."""

    @abstractmethod
    async def check_health(self) -> None:
        """Return, also while completions are sampled. Raises EngineDied if the engine has ended."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> bool:
        """Activate the new weights as `version`; see `GenerationInterface.finish_weight_update`."""


class EngineWorkerInterface(GenerationWorkerInterface):
    """A replica that has weights and a device of its own."""

    @abstractmethod
    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Tell the engine where the weights will be. The keys of `init_info` depend on the transport."""

    @abstractmethod
    async def start_weight_update(self, *, clear_cache: bool) -> None:
        """Hold back new requests and pause those in flight; see `GenerationInterface.start_weight_update`."""

    @abstractmethod
    async def receive_bucket(self, info: dict[str, Any], *, turn: int) -> None:
        """Read one bucket from the transport, after bucket `turn - 1`."""

    @abstractmethod
    async def begin_comparison(self) -> list[str | None]:
        """See `GenerationInterface.begin_comparison`, as the next two. Of every rank. Sampling may go on."""

    @abstractmethod
    async def compare_bucket(self, bucket: int, fingerprints: bytes) -> None: ...

    @abstractmethod
    async def end_comparison(self) -> list[dict[str, float]]: ...

    @abstractmethod
    async def describe_model(self) -> dict[str, Any]:
        """The settings in config.json, as the engine reads them."""

    async def end_with(self, nodes: Sequence[Any]) -> None:
        """From now on, end this process when another node of the engine is lost. `nodes`: handles of their workers."""
        raise AssertionError("this engine never has several nodes")

    @abstractmethod
    async def onload(self, tags: Sequence[str] | None = None) -> None:
        """Move "weights", "kv_cache" or both (None) back onto the device, unless they are there."""

    @abstractmethod
    async def offload(self, *, keep_weights: bool) -> None:
        """Free the device, and drop the weights unless `keep_weights`. No request may be in flight."""

    @abstractmethod
    async def draft_counts(self) -> DraftCounts:
        """Statistics of speculative decoding since the start."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the processes of the engine."""


class GenerationInterface(ABC):
    """Replicas of an engine that completes token sequences. Each is a worker group, so it can restart by itself.

    Clients send requests to `workers` themselves; see `GenerationWorkerInterface`.

    A weight sync is `init_weight_transfer` once, then `start_weight_update`, one `receive_bucket_async` per bucket, and
    `finish_weight_update`.
    """

    def __init__(self, num_replicas: int, start: Callable[[int], RayWorkerGroup]) -> None:
        self._start = start
        self.weights_follow = False  # the next weights come whole, before any further request
        self._replicas = start_groups(num_replicas, start)

    @property
    def workers(self) -> list[Any]:
        """Actor handles, one per replica, for `call_worker`."""
        return [replica.workers[0] for replica in self._replicas]

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Tell every engine where the weights will be. Call again after a replica was restarted.

        The keys of `init_info` depend on the transport.
        """
        self._call_all(EngineWorkerInterface.init_weight_transfer, init_info)

    def start_weight_update(self, *, clear_cache: bool = True) -> list[Any]:
        """Begin to pause sampling and to prepare for buckets. Returns one future per replica, for `wait`.

        Requests in flight wait, then continue with the new weights. With `clear_cache` their KV cache is recomputed
        with the new weights; otherwise they keep it. Requests that begin after the update never use KV of the old
        weights.
        """
        return self._start_all(EngineWorkerInterface.start_weight_update, clear_cache=clear_cache)

    def receive_bucket_async(self, info: dict[str, Any], *, turn: int) -> list[Any]:
        """Begin to read one bucket on every replica. Returns one future per replica, for `wait`.

        `turn` counts the buckets of a sync from 0. Buckets are read in this order, even if calls arrive in another.
        """
        return self._start_all(EngineWorkerInterface.receive_bucket, info, turn=turn)

    def wait(self, futures: Sequence[Any]) -> None:
        """Wait for futures of `start_weight_update` or `receive_bucket_async`."""
        wait_groups(self._replicas, futures)

    def finish_weight_update(self, version: int) -> bool:
        """Activate the new weights as `version`, which stamps every later request, and resume sampling.

        Returns whether the engines would keep weights that a later update does not bring.
        """
        kept = self._call_all(GenerationWorkerInterface.finish_weight_update, version)
        self.weights_follow = False
        return all(kept)

    def describe_model(self) -> dict[str, Any]:
        """The settings in config.json of the model, as the engine reads them. Empty: it is the policy's own model."""
        return {}

    # A comparison of the engines' weights, which do not change, with buckets. Results are of all ranks of all engines.

    def begin_comparison(self) -> list[str | None]:
        """Why a rank cannot compare; None: it can."""
        return _joined(self._call_all(EngineWorkerInterface.begin_comparison))

    def compare_bucket(self, bucket: int, fingerprints: bytes) -> None:
        """Read bucket number `bucket` and compare the tensors that it completes."""
        self._call_all(EngineWorkerInterface.compare_bucket, bucket, fingerprints)

    def end_comparison(self) -> list[dict[str, float]]:
        """The tensors that differ, with the largest difference of a value."""
        return _joined(self._call_all(EngineWorkerInterface.end_comparison))

    @abstractmethod
    def dead_workers(self) -> list[int]:
        """Replicas whose process or engine is gone."""

    def abandon_requests(self) -> None:
        """Drop the requests in flight on every replica."""
        self._call_all(GenerationWorkerInterface.abandon_requests)

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

    def _start_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[ObjectRef[R]]:
        return [replica.start_one(0, method, *args, **kwargs) for replica in self._replicas]

    def _call_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return wait_groups(self._replicas, self._start_all(method, *args, **kwargs))


def _joined[T](results: Sequence[Sequence[T]]) -> list[T]:
    return [result for ranks in results for result in ranks]


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
    can_share_prompts: bool = False  # an engine on a CPU may compute a prompt of several requests once
    return_routed_experts: bool = False  # return the experts of every token with completions
    max_images: int | None = None  # of a prompt, for a model that sees images
    draft: Mapping[str, Any] | None = None  # config.json of a draft whose weights the policy sends

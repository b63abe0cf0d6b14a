"""Generation by the policy's own workers (`backend: hf` or `megatron`).

`HfGeneration` is the driver's handle. It starts one actor, `HfWorker`, which has the interface of an engine replica: it
batches requests and calls `generate` on the ranks of the policy. Weights are never sent, as the ranks sample from the
weights that they train.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from nemo_rl.distributed.actor_host import call_worker
from nemo_rl.distributed.errors import ACTOR_DEATHS, WorkerDied, death_text
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.answers import AnswerQueue, prompt_problem
from nemo_rl.models.generation.interfaces import GENERATION, EngineDied, GenerationInterface, GenerationWorkerInterface
from nemo_rl.refit.layout import WeightComparison
from nemo_rl.types import GenerationAnswer, GenerationRequest

WORKER = "nemo_rl.models.generation.hf.HfWorker"
_ONE_CLIENT = "the policy generates for one client, the rollout worker"
_GATHER_S = 0.005  # a batch leaves when no request has arrived for this long


class GeneratingRank(Protocol):
    """A worker of a policy that generates."""

    def generate(self, requests: Sequence[GenerationRequest], weight_version: int) -> list[GenerationAnswer]: ...


class GeneratingPolicy(Protocol):
    """A policy whose workers are a `GeneratingRank` each."""

    def prepare_generation(self) -> None: ...  # called again after workers were replaced
    @property
    def generating_workers(self) -> list[Any]: ...  # actor handles by rank
    @property
    def data_coordinates(self) -> list[int]: ...  # the data-parallel coordinate of each worker
    def check_health(self) -> None: ...  # raises WorkerDied or WorkerHang, with the worker's name


class HfGeneration(GenerationInterface):
    """Generation by the workers of `policy`, through one `HfWorker` actor.

    It replaces `Refit` too: the weights are the policy's, so a sync only sets their version.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        policy: GeneratingPolicy,
        *,
        max_model_len: int,
        length_key: str,
        max_batch_size: int,
        timeout_s: float | None = None,
    ) -> None:
        self._policy = policy
        builder = RayWorkerBuilder(WORKER, max_model_len, length_key, max_batch_size)

        def start(index: int) -> RayWorkerGroup:
            return RayWorkerGroup(cluster, builder, name_prefix=GENERATION, num_workers=1, timeout_s=timeout_s)

        super().__init__(1, start)

    def prepare(self) -> None:
        """Prepare the policy's current workers and send requests to them from now on."""
        self._policy.prepare_generation()
        self._send_ranks()

    def announce(self) -> None: ...

    def sync(self, version: int) -> dict[str, float]:
        """Stamp later samples with `version`. Returns `sync_s`, and zeros for the other metrics of a refit."""
        started = time.perf_counter()
        self.rest()
        self.finish_weight_update(version)
        no_transfer = dict.fromkeys(("gather_s", "pack_s", "bytes", "num_buckets"), 0.0)
        return {"sync_s": time.perf_counter() - started} | no_transfer

    def compare(self) -> WeightComparison:
        return WeightComparison(not_compared="generation uses the weights that are trained")

    def _send_ranks(self) -> None:
        self._call_all(HfWorker.use, self._policy.generating_workers, self._policy.data_coordinates)

    def rest(self) -> None:
        """Drop all requests and return when the policy's workers are free."""
        self._call_all(HfWorker.rest)

    def dead_workers(self) -> list[int]:
        """[0] if the actor is gone. Raises WorkerDied or WorkerHang if a worker of the policy is gone or hangs."""
        self._policy.check_health()
        try:
            self._call_all(HfWorker.ping)
        except WorkerDied:
            return [0]
        return []

    def restart_worker(self, index: int) -> None:
        super().restart_worker(index)
        self._send_ranks()


class HfWorker(GenerationWorkerInterface):
    """Accepts requests as an engine does, and has the policy's ranks answer them, one batch after another.

    A batch consists of all requests that wait when the previous batch ends. Each call has at most `max_batch_size` of
    them for a rank, so that a long batch shows progress. The death of a rank is reported as the death of an engine.
    """

    def __init__(self, max_model_len: int, length_key: str, max_batch_size: int) -> None:
        self._max_model_len = max_model_len
        self._length_key = length_key  # sets it
        self._max_batch_size = max_batch_size
        self._ranks: Sequence[Any] = ()  # actor handles of the policy's workers, by rank
        self._data_ranks: Sequence[int] = ()
        self._weight_version = -1  # no weights yet
        self._waiting: dict[str, GenerationRequest] = {}
        self._in_batch: set[str] = set()  # requests of the current batch that were not aborted
        self._answers = AnswerQueue()
        self._generating: asyncio.Task[None] | None = None
        self._death: str | None = None

    async def use(self, ranks: Sequence[Any], data_ranks: Sequence[int]) -> None:
        """Send batches to these actor handles from now on.

        A batch calls all of them, because they gather the weights together. Ranks with the same data-parallel
        coordinate in `data_ranks` generate the same completions.
        """
        await self.rest()
        self._ranks, self._data_ranks = ranks, data_ranks
        self._death = None

    async def finish_weight_update(self, version: int) -> bool:
        assert self._generating is None, "the weights changed while completions were generated"
        self._weight_version = version
        return True

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str = "") -> None:
        assert not client_id, _ONE_CLIENT
        for request in requests:
            problem = prompt_problem(len(request.prompt_token_ids), self._max_model_len, self._length_key)
            if problem is None:
                self._waiting[request.request_id] = request
            else:
                self._answers.put(_failures([request.request_id], "ValueError", problem))
        if self._waiting and self._generating is None:
            self._generating = asyncio.create_task(self._generate_all())

    async def drain(self, client_id: str = "") -> list[GenerationAnswer]:
        assert not client_id, _ONE_CLIENT
        return await self._answers.take()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
        self._in_batch.difference_update(request_ids)  # they end with their call, without an answer

    async def abandon_requests(self) -> None:
        self._waiting = {}
        self._in_batch.clear()
        self._answers.clear()

    async def rest(self) -> None:
        """Drop every request and return when the policy's ranks are free."""
        await self.abandon_requests()
        if self._generating is not None:
            await self._generating

    async def check_health(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)
        try:  # waits as long as a rank is stopped
            await asyncio.gather(*(rank.phase.remote() for rank in self._ranks))
        except ACTOR_DEATHS as error:
            raise EngineDied(f"a worker of the policy died: {death_text(error)}") from error

    async def ping(self) -> None:
        """Return while this process lives."""

    async def _generate_all(self) -> None:
        try:
            while self._waiting:
                # A large batch costs little more than a small one, so wait until no more requests arrive.
                num_before = -1
                while num_before != len(self._waiting):
                    num_before = len(self._waiting)
                    await asyncio.sleep(_GATHER_S)
                batch, self._waiting = self._waiting, {}
                if batch:
                    await self._generate(batch)
        finally:
            self._generating = None

    async def _generate(self, batch: dict[str, GenerationRequest]) -> None:
        assert self._ranks, "use() comes first"
        self._in_batch = set(batch)
        shares = split_requests(list(batch.values()), max(self._data_ranks) + 1)
        for start in range(0, max(map(len, shares)), self._max_batch_size):
            part = [share[start : start + self._max_batch_size] for share in shares]
            part = [[request for request in share if request.request_id in self._in_batch] for share in part]
            if any(part):
                await self._call_ranks(part)
        self._in_batch = set()

    async def _call_ranks(self, shares: Sequence[Sequence[GenerationRequest]]) -> None:
        """Answer requests of the batch, or after an error all that are left."""
        calls = [
            call_worker(worker, GeneratingRank.generate, shares[data_rank], self._weight_version)
            for worker, data_rank in zip(self._ranks, self._data_ranks, strict=True)
        ]
        try:
            answers = [answer for part in await asyncio.gather(*calls) for answer in part]
        except ACTOR_DEATHS as error:
            self._death = f"a worker of the policy died: {death_text(error)}"
            answers = _failures(self._in_batch, EngineDied.__name__, self._death)
        except RayTaskError as error:
            answers = _failures(
                self._in_batch, "RuntimeError", f"the policy cannot generate completions: {error.cause}"
            )
        except RayError as error:  # an error of Ray itself, such as a lost answer
            answers = _failures(self._in_batch, "RuntimeError", f"the policy's completions did not arrive: {error!r}")
        if wanted := [answer for answer in answers if answer.request_id in self._in_batch]:
            self._answers.put(wanted)
            self._in_batch.difference_update(answer.request_id for answer in wanted)


def _failures(request_ids: Iterable[str], failure_type: str, failure: str) -> list[GenerationAnswer]:
    return [GenerationAnswer(request_id=key, failure_type=failure_type, failure=failure) for key in request_ids]


def split_requests(requests: Sequence[GenerationRequest], num_shares: int) -> list[list[GenerationRequest]]:
    """Split into shares of nearly equal size.

    Equal prompts, which are computed once, and prompts of similar length stay together.
    """
    ordered = sorted(requests, key=lambda request: (len(request.prompt_token_ids), request.prompt_token_ids))
    ends = [len(ordered) * share // num_shares for share in range(num_shares + 1)]
    return [ordered[start:end] for start, end in itertools.pairwise(ends)]

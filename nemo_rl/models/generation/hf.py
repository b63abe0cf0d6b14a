"""Generation by the policy's own workers: the driver's handle, and the sync of weights that has nothing to move."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import EngineDied, GenerationInterface
from nemo_rl.types import GenerationAnswer, GenerationRequest

# -- The desk between episodes and a policy that draws completions itself: requests gather here and leave in batches.

_GATHER_S = 0.005  # between looks at whether more requests arrive before a batch leaves


@dataclass(frozen=True, kw_only=True)
class PolicyRanks:
    """The workers that draw completions."""

    workers: Sequence[Any]
    """Actor handles, by rank; all are called every time, as they gather the weights together."""

    data_ranks: Sequence[int]
    """The data-parallel coordinate of each: those with the same one draw the same completions."""


class HfWorker:
    """Takes requests like an engine and has the policy's ranks answer them, one batch after another.

    A batch is all that waits when the last one is done. Who asked is told of the death of a rank as of an engine's.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._ranks: PolicyRanks | None = None
        self._weight_version = -1  # no weights yet
        self._waiting: dict[str, GenerationRequest] = {}
        self._under_way: set[str] = set()  # requests of the batch that is drawn, less those that were given up
        self._answers: list[GenerationAnswer] = []
        self._has_answers = asyncio.Event()
        self._drawing: asyncio.Task[None] | None = None
        self._death: str | None = None
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    async def use(self, ranks: PolicyRanks) -> None:
        """Send batches to these from now on. Those before, if they are others, are gone."""
        await self.rest()
        self._ranks = ranks
        self._death = None

    async def set_weight_version(self, version: int) -> None:
        """The policy's weights are now `version`. No batch is under way."""
        assert self._drawing is None, "the weights changed while completions were drawn"
        self._weight_version = version

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin to answer `requests`; `drain` hands out the answers."""
        for request in requests:
            reason = self._refusal(len(request.prompt_token_ids))
            if reason is None:
                self._waiting[request.request_id] = request
            else:
                self._give([GenerationAnswer(request_id=request.request_id, failure_type="ValueError", failure=reason)])
        if self._waiting and self._drawing is None:
            self._drawing = asyncio.create_task(self._draw_all())

    async def drain(self) -> list[GenerationAnswer]:
        """Wait until a submitted request is answered; all answers there are then.

        A call that still waits when the next one comes returns nothing: whoever made it may be dead.
        """
        self._has_answers.set()
        has_answers = self._has_answers = asyncio.Event()
        if not self._answers:
            await has_answers.wait()
        if has_answers is not self._has_answers:
            return []
        answers, self._answers = self._answers, []
        return answers

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests. One that is being drawn ends with its batch and is not answered."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
        self._under_way.difference_update(request_ids)

    async def abandon_requests(self) -> None:
        """Forget every request: whoever asked asks anew."""
        self._waiting, self._answers = {}, []
        self._under_way.clear()
        self._has_answers.set()  # whoever drains gets nothing

    async def rest(self) -> None:
        """Forget every request and return when the policy's ranks are free for something else."""
        await self.abandon_requests()
        if self._drawing is not None:
            await self._drawing

    async def check_health(self) -> None:
        """Raises EngineDied when a rank of the policy died."""
        if self._death is not None:
            raise EngineDied(self._death)

    async def counters(self) -> dict[str, int]:
        """Finished requests, and their prompt and sampled tokens, since the start."""
        return {
            "num_requests": self._num_requests,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_generated_tokens": self._num_generated_tokens,
        }

    async def _draw_all(self) -> None:
        try:
            while self._waiting:
                await self._gathered()
                batch, self._waiting = self._waiting, {}
                if batch:
                    await self._draw(batch)
        finally:
            self._drawing = None

    async def _gathered(self) -> None:
        """Until no more requests arrive: a batch of many costs little more than one of few."""
        before = -1
        while before != len(self._waiting):
            before = len(self._waiting)
            await asyncio.sleep(_GATHER_S)

    async def _draw(self, batch: dict[str, GenerationRequest]) -> None:
        assert self._ranks is not None, "use comes first"
        self._under_way = set(batch)
        shares = shared_out(list(batch.values()), max(self._ranks.data_ranks) + 1)
        calls = [
            worker.call.remote("generate", shares[data_rank], self._weight_version)
            for worker, data_rank in zip(self._ranks.workers, self._ranks.data_ranks, strict=True)
        ]
        try:
            answers = [answer for part in await asyncio.gather(*calls) for answer in part]
        except RayActorError as error:
            self._death = f"a worker of the policy died: {error}"
            answers = _failures(batch, EngineDied.__name__, self._death)
        except RayTaskError as error:
            answers = _failures(batch, "RuntimeError", f"the policy cannot draw completions: {error.cause}")
        except RayError as error:  # of Ray itself, such as an answer that is lost
            answers = _failures(batch, "RuntimeError", f"the policy's completions did not arrive: {error!r}")
        self._count(batch, answers)
        self._give([answer for answer in answers if answer.request_id in self._under_way])
        self._under_way = set()

    def _count(self, batch: dict[str, GenerationRequest], answers: Sequence[GenerationAnswer]) -> None:
        for answer in answers:
            if answer.completion is not None:
                self._num_requests += 1
                self._num_prompt_tokens += len(batch[answer.request_id].prompt_token_ids)
                self._num_generated_tokens += len(answer.completion.token_ids)

    def _give(self, answers: Sequence[GenerationAnswer]) -> None:
        if answers:
            self._answers += answers
            self._has_answers.set()

    def _refusal(self, num_prompt_tokens: int) -> str | None:
        if num_prompt_tokens < 1:
            return "the prompt has no tokens: check the prompt file and the chat template"
        if num_prompt_tokens >= self._max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer: "
                f"policy.generation.vllm_cfg.max_model_len is {self._max_model_len}; raise it or shorten the prompts "
                "with data.max_input_seq_length"
            )
        return None


def _failures(request_ids: Any, failure_type: str, failure: str) -> list[GenerationAnswer]:
    return [GenerationAnswer(request_id=key, failure_type=failure_type, failure=failure) for key in request_ids]


def shared_out(requests: Sequence[GenerationRequest], num_shares: int) -> list[list[GenerationRequest]]:
    """Shares of nearly equal size. Equal prompts, which are computed once, and similar lengths stay together."""
    ordered = sorted(requests, key=lambda request: (len(request.prompt_token_ids), request.prompt_token_ids))
    ends = [len(ordered) * share // num_shares for share in range(num_shares + 1)]
    return [ordered[start:end] for start, end in itertools.pairwise(ends)]


WORKER = "nemo_rl.models.generation.hf.HfWorker"


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

"""Requests and answers of the workers of every backend, and what all workers of engines share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np

from nemo_rl.distributed.actor_host import BUSY
from nemo_rl.models.generation.interfaces import DraftCounts, EngineDied, EngineSettings, EngineWorkerInterface
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, OnTokens, SampledTokens, StopReason

logger = logging.getLogger(__name__)

_PATIENCE = 0.05  # an answer waits for others for at most this part of the time that it took
_MAX_PATIENCE_S = 0.1
_STREAM_PATIENCE_S = 0.02  # tokens of a stream wait for tokens of other streams
_LIVENESS_S = 1.0  # between checks that the engine lives, while a call waits for it
_SLEEP_TAGS = ("weights", "kv_cache")


class AnswerQueue:
    """Answers of a generation worker, kept separately for each client until the client takes them."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, list[GenerationAnswer]] = defaultdict(list)
        self._ready: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # of the latest `take`
        self._due: dict[str, float] = {}  # when the answers leave at the latest, in time of the event loop

    def put(self, answers: Iterable[GenerationAnswer], client_id: str = "", *, patience_s: float = 0.0) -> None:
        """Add answers, which may wait for further ones for `patience_s` seconds."""
        self._answers[client_id] += answers
        due = asyncio.get_running_loop().time() + patience_s
        self._due[client_id] = min(due, self._due.get(client_id, due))
        self._ready[client_id].set()

    async def take(self, client_id: str = "") -> list[GenerationAnswer]:
        """Wait for an answer to `client_id`, and for more as long as all have patience. Returns all of them.

        A call that still waits when the client calls again returns an empty list: its caller may be dead.
        """
        self._ready[client_id].set()
        ready = self._ready[client_id] = asyncio.Event()
        if not self._answers[client_id]:
            await ready.wait()
        loop = asyncio.get_running_loop()
        while ready is self._ready[client_id] and (left_s := self._due.get(client_id, 0.0) - loop.time()) > 0.0:
            ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ready.wait(), left_s)
        if ready is not self._ready[client_id]:
            return []
        self._due.pop(client_id, None)
        return self._answers.pop(client_id, [])

    def clear(self) -> None:
        """Drop all answers. A waiting `take` returns an empty list."""
        self._answers.clear()
        self._due.clear()
        for ready in self._ready.values():
            ready.set()


def prompt_problem(num_prompt_tokens: int, max_model_len: int, key: str) -> str | None:
    """Why a prompt of this length cannot be completed; None if it can. `key` sets `max_model_len`."""
    if num_prompt_tokens < 1:
        return "the prompt has no tokens: check the prompt file and the chat template"
    if num_prompt_tokens >= max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer: "
            f"{key} is {max_model_len}; raise it or shorten the prompts with data.max_input_seq_length"
        )
    return None


class EngineWorker(EngineWorkerInterface):
    """Hosts one engine, which computes in processes of its own.

    This class has the requests and their answers, the order of a sync, sleep, and the watch over the engine's life. A
    subclass starts its engine and says what to call there. Sampling waits as long as a sync runs or the engine sleeps.
    """

    engine_name: ClassVar[str]

    def __init__(self, settings: EngineSettings) -> None:
        self.weight_version = -1  # no weights yet
        self._name = f"generation-{settings.replica}"
        self._device = settings.device
        self._replica = settings.replica
        self._max_model_len = settings.cfg.engine.longest_sequence
        self._length_key = settings.cfg.key(settings.cfg.length_path)
        self._request_ids = itertools.count()
        self._serving: dict[str, asyncio.Task[Completion]] = {}  # by request id
        self._num_serving: Counter[str] = Counter()  # requests by client
        self._answers = AnswerQueue()
        self._sampling_allowed = asyncio.Event()
        self._sampling_allowed.set()
        self._turns = asyncio.Condition()
        self._turn = 0  # of the bucket to read next
        self._num_syncs = 0  # started or aborted
        self._num_updates = 0
        self._sleep_mode = settings.device == "cuda" and settings.cfg.colocated.enabled
        self._asleep: set[str] = set()
        self._has_weights = True  # false from a sleep that dropped them until the next sync
        self._sleep = ExitStack()  # while it sleeps

    # -- requests

    @abstractmethod
    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a prompt.

        The completion holds every sampled token, including the stop token or the tokens of the stop string. It is cut
        at `sampling.max_new_tokens` or at the engine's longest sequence. `on_tokens` gets the tokens as they come.

        Raises:
            ValueError: for an empty prompt, or one that leaves no room for a token.
            EngineDied: the engine has ended.
        """

    def _max_tokens(self, request: GenerationRequest) -> int:
        """The most tokens of the completion. Raises ValueError if none has room."""
        num_prompt_tokens = len(request.prompt_token_ids)
        if (problem := prompt_problem(num_prompt_tokens, self._max_model_len, self._length_key)) is not None:
            raise ValueError(problem)
        return min(request.sampling.max_new_tokens, self._max_model_len - num_prompt_tokens)

    def _completion(self, token_ids: list[int], logprobs: list[float], reason: Any, **more: Any) -> Completion:
        """An answer of the engine, whose word for its end is `reason`."""
        if reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name} ended a request early: {reason}")
        if not math.isfinite(sum(logprobs)):
            raise RuntimeError(f"{self._name} sampled a token with the logprob nan or inf: its logits are not finite")
        return Completion(token_ids=token_ids, logprobs=logprobs, stop_reason=StopReason(reason), **more)

    def _salt(self, prompt_token_ids: Sequence[int]) -> str:
        """A text that requests have in common if one may read the KV that another has written.

        The version would not separate weights: after a return to a checkpoint the same version comes again with other
        weights. On a CPU only requests of the same prompt share KV. Sampled tokens, with which the prompt of a later
        turn begins, have been computed one by one, and a prompt is computed in parts, which may give other bits.
        """
        salt = f"update {self._num_updates}"
        if self._device != "cpu":
            return salt
        return f"{salt} {sha256(np.asarray(prompt_token_ids, np.int64).tobytes()).hexdigest()}"

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str = "") -> None:
        began = asyncio.get_running_loop().time()
        for request in requests:
            on_tokens = partial(self._on_tokens, request.request_id, client_id) if request.streams else None
            task = self._serving[request.request_id] = asyncio.create_task(self.generate(request, on_tokens))
            task.add_done_callback(partial(self._on_served, request.request_id, client_id, began))
        self._num_serving[client_id] += len(requests)

    async def drain(self, client_id: str = "") -> list[GenerationAnswer]:
        # Every batch costs this process, the client and the environment about a millisecond, whatever its size. So an
        # answer waits a little for further ones, unless it is the last that the client waits for: see `_on_served`.
        return await self._answers.take(client_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        tasks = [self._serving[request_id] for request_id in request_ids if request_id in self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon_requests(self) -> None:
        await self.abort(list(self._serving))
        self._answers.clear()

    def _on_served(self, request_id: str, client_id: str, began: float, task: asyncio.Task[Completion]) -> None:
        """Queue the answer for the client. An aborted request gets no answer."""
        del self._serving[request_id]
        self._num_serving[client_id] -= 1
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            answer = GenerationAnswer(request_id=request_id, completion=task.result())
        else:
            text = str(error)
            if not isinstance(error, ValueError | RuntimeError):
                logger.error("%s: an unexpected failure of request %s", self._name, request_id, exc_info=error)
                text = repr(error)
            answer = GenerationAnswer(request_id=request_id, failure_type=type(error).__name__, failure=text)
        took_s = asyncio.get_running_loop().time() - began
        is_last = self._num_serving[client_id] == 0
        self._answers.put([answer], client_id, patience_s=0.0 if is_last else min(_PATIENCE * took_s, _MAX_PATIENCE_S))

    def _on_tokens(self, request_id: str, client_id: str, tokens: SampledTokens) -> None:
        answer = GenerationAnswer(request_id=request_id, tokens=tokens)
        self._answers.put([answer], client_id, patience_s=_STREAM_PATIENCE_S)

    async def draft_counts(self) -> DraftCounts:
        return DraftCounts()

    # -- weights

    async def start_weight_update(self, *, clear_cache: bool) -> None:
        self._sampling_allowed.clear()
        async with self._turns:
            self._num_syncs, self._turn = self._num_syncs + 1, 0
            self._turns.notify_all()
        await self._prepare_update(clear_cache=clear_cache)

    async def receive_bucket(self, info: dict[str, Any], *, turn: int) -> None:
        # Ray does not preserve the order of calls to an actor with coroutines, but a collective needs it.
        sync = self._num_syncs
        async with self._turns:
            await self._turns.wait_for(lambda: self._turn == turn or self._num_syncs != sync)
            if self._num_syncs != sync:
                raise RuntimeError("a bucket before this one could not be read")
            try:
                await self._load_bucket(info)
            except BaseException:
                self._num_syncs += 1
                self._turns.notify_all()
                raise
            self._turn += 1
            self._turns.notify_all()

    async def finish_weight_update(self, version: int) -> bool:
        sync = self._num_syncs
        kept = await self._activate(version)
        if self._num_syncs != sync:  # begun by a controller that no longer waits for this one
            raise RuntimeError("another sync has begun")
        self.weight_version = version
        self._num_updates += 1
        self._has_weights = True
        await self._resume()
        return kept

    async def _resume(self) -> None:
        """Let requests reach the engine, unless its KV cache sleeps or its weights are gone."""
        if self._has_weights and not self._asleep:
            await self._continue()
            self._sampling_allowed.set()

    @abstractmethod
    async def _prepare_update(self, *, clear_cache: bool) -> None:
        """Pause the engine, which may be in the middle of a sync whose sender died, and prepare it for buckets."""

    @abstractmethod
    async def _load_bucket(self, info: dict[str, Any]) -> None:
        """Have the engine read and load a bucket."""

    @abstractmethod
    async def _activate(self, version: int) -> bool:
        """End a sync in the engine, which still pauses; see `GenerationInterface.finish_weight_update`."""

    @abstractmethod
    async def _continue(self) -> None:
        """End the pause of the engine, if it pauses."""

    # -- device

    async def onload(self, tags: Sequence[str] | None = None) -> None:
        wanted = [tag for tag in (tags if tags is not None else _SLEEP_TAGS) if tag in self._asleep]
        if wanted:
            await self._wake(wanted)
            self._asleep.difference_update(wanted)
            if not self._asleep:
                self._sleep.close()
            await self._resume()

    async def offload(self, *, keep_weights: bool) -> None:
        """Free the GPU. Without sleep mode, only drop the prefix cache.

        `keep_weights` saves the weights in host memory; otherwise they are gone, and requests wait for the next sync.

        Drops all requests and holds back new ones until the engine is awake: while another replica is replaced,
        episodes still send requests to this one. Without sleep mode, requests in flight are a RuntimeError.
        """
        if self._sleep_mode and not self._asleep:
            self._sampling_allowed.clear()
            await self.abandon_requests()
        if not await self._drop_cache():
            raise RuntimeError(f"{self._name}: requests in flight hold the KV cache")
        if self._sleep_mode and not self._asleep:
            await self._fall_asleep(keep_weights=keep_weights)
            self._asleep = set(_SLEEP_TAGS)
            self._sleep.enter_context(BUSY.track("asleep"))
            self._has_weights = self._has_weights and keep_weights

    @abstractmethod
    async def _drop_cache(self) -> bool:
        """Drop the prefix cache. False: requests in flight use it."""

    @abstractmethod
    async def _fall_asleep(self, *, keep_weights: bool) -> None:
        """Free the memory of weights and KV cache on the device."""

    @abstractmethod
    async def _wake(self, tags: Sequence[str]) -> None:
        """Take back the memory of "weights", "kv_cache" or both."""

    # -- health

    @abstractmethod
    def _has_died(self) -> bool:
        """Whether the engine has ended."""

    def _death(self) -> EngineDied:
        return EngineDied(f"the {self.engine_name} engine of {self._name} died; the end of its log has the reason")

    async def _engine_call[T](self, call: Awaitable[T]) -> T:
        """Await `call`. Raises EngineDied if the engine has ended, as calls to it may then never return."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_LIVENESS_S))[0]:
                if self._has_died():
                    raise self._death()
        except BaseException:
            task.cancel()
            raise
        if self._has_died():
            raise self._death()
        return task.result()

"""Clients of engine replicas for many concurrent episodes. Requests that are ready at the same time travel together."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ray.exceptions import RayTaskError

from nemo_rl.distributed.actor_host import Method, call_worker
from nemo_rl.distributed.batched_calls import BatchedCalls
from nemo_rl.distributed.errors import ACTOR_DEATHS, WorkerCallError, death_text
from nemo_rl.models.generation.interfaces import EngineDied, GenerationWorkerInterface
from nemo_rl.types import Completion, GenerationRequest, OnTokens, SampledTokens

logger = logging.getLogger(__name__)

MAX_PATIENCE_S = 1.0  # the longest wait of finished groups for others that end soon


class RequestFailed(RuntimeError):
    """A living engine did not answer a request; the message says why."""


class _RequestDropped(Exception):
    """The replica was told to drop its requests; the request must be sent again."""


class Engines:
    """All replicas, for the episodes of one event loop.

    A request whose replica dies moves to another one. If none is left, it waits for new replicas (`replace`), so that
    an episode keeps its earlier turns.

    A replica counts as dead if it neither accepts a request, nor answers one, nor answers `check_health` for
    `timeout_s`. Processes that share replicas need different `client_id`s, because a replica keeps answers by client.
    """

    def __init__(self, timeout_s: float, client_id: str = "") -> None:
        self._timeout_s = timeout_s
        self._client_id = client_id
        self._clients: list[EngineClient] = []
        self._death: EngineDied | None = None  # of a current replica
        self._died = asyncio.Event()
        self._replaced = asyncio.Event()
        self._limits: dict[asyncio.Timeout, float] = {}  # time limits, with the seconds left while they are suspended

    def replace(self, replicas: Sequence[Any]) -> None:
        """Use these actor handles from now on, and send all unanswered requests again."""
        known = {client.replica: client for client in self._clients if not client.is_dead}
        for client in self._clients:
            client.fail_all(_RequestDropped())  # the replica was told to drop its requests
        self._clients = [
            known.get(replica) or EngineClient(number, replica, self._timeout_s, self._client_id)
            for number, replica in enumerate(replicas)
        ]
        if self._death is not None:
            self._death = None
            self._died.clear()
            # Episodes get the time back that they waited for the new engine.
            for limit, left_s in self._limits.items():
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time() + left_s)
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a prompt on the least loaded replica. The tokens do not depend on the replica.

        `on_tokens` gets tokens as they are sampled, as far as the engine sends them before the completion.

        RequestFailed if a living engine does not answer, or if one is lost that has sent tokens to `on_tokens`.
        """
        has_sent = False

        def send(tokens: SampledTokens) -> None:
            nonlocal has_sent
            assert on_tokens is not None
            has_sent = True
            on_tokens(tokens)

        while True:
            if has_sent:  # another engine may have other weights by now, and would say something else
                raise RequestFailed("an engine was replaced while it answered; ask again")
            replaced = self._replaced
            alive = [client for client in self._clients if not client.is_dead]
            if not alive:
                await replaced.wait()
                continue
            client = min(alive, key=lambda client: len(client.results))  # any would do: the tokens are the same
            try:
                return await client.generate(request, on_tokens and send)
            except _RequestDropped:
                continue
            except EngineDied as death:
                if not replaced.is_set() and self._death is None:  # many requests see one death, and one reports it
                    self._death = death
                    self._died.set()
                    now = asyncio.get_running_loop().time()
                    for limit in self._limits:
                        if (when := limit.when()) is not None and not limit.expired():
                            self._limits[limit] = when - now
                            limit.reschedule(None)

    async def died(self) -> EngineDied:
        """Wait until a replica is dead."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def wait(self, *playing: asyncio.Future[Any], patience: float = 0.0) -> None:
        """Return when one of `playing` is done; others may then take `patience` times as long as this one took.

        EngineDied as soon as a replica is dead, while `playing` go on.
        """
        began = time.monotonic()
        died = asyncio.create_task(self.died())
        try:
            await asyncio.wait([*playing, died], return_when=asyncio.FIRST_COMPLETED)
            late = [future for future in playing if not future.done()]
            if patience and late and not died.done():
                await asyncio.wait(late, timeout=min(MAX_PATIENCE_S, patience * (time.monotonic() - began)))
        finally:
            died.cancel()
        if not any(future.done() for future in playing):
            raise EngineDied(str(died.result()))

    @asynccontextmanager
    async def time_limit(self, seconds: float | None) -> AsyncGenerator[asyncio.Timeout]:
        """Like `asyncio.timeout`, but suspended from the death of a replica until it is replaced."""
        async with asyncio.timeout(None) as limit:
            if seconds is not None:
                self._limits[limit] = seconds
                if self._death is None:
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
            try:
                yield limit
            finally:
                self._limits.pop(limit, None)


class EngineClient:
    """The client of one replica, in one event loop. It makes one call per batch of requests, not per sample.

    `replica` is the actor handle of a generation worker (`GenerationInterface.workers`).
    """

    def __init__(self, number: int, replica: Any, timeout_s: float, client_id: str) -> None:
        self.name = f"generation-{number}"
        self.replica = replica
        self.is_dead = False
        self._timeout_s = timeout_s
        self._client_id = client_id
        self._ids = map(f"{uuid.uuid4().hex}-{{}}".format, itertools.count())
        self._submits, self._aborts = BatchedCalls(self._submit), BatchedCalls(self._abort)
        self._sent: set[str] = set()  # accepted by the replica, not answered
        self.results: dict[str, asyncio.Future[Completion]] = {}  # of the requests in flight
        self._streams: dict[str, OnTokens] = {}  # of requests in flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None) -> Completion:
        """Complete a prompt. Raises EngineDied, or RequestFailed with the engine's message.

        If the caller is cancelled, the engine stops sampling.
        """
        request = replace(request, request_id=next(self._ids), streams=on_tokens is not None)
        if on_tokens is not None:
            self._streams[request.request_id] = on_tokens
        result = self.results[request.request_id] = asyncio.get_running_loop().create_future()
        self._watch(self._submits.add(request))
        try:
            return await result
        finally:
            del self.results[request.request_id]
            self._streams.pop(request.request_id, None)
            if request.request_id in self._sent:
                self._sent.discard(request.request_id)
                self._cancel(request.request_id)

    def fail_all(self, error: Exception) -> None:
        for result in self.results.values():
            if not result.done():
                result.set_exception(error)

    def _watch(self, task: asyncio.Task[None]) -> None:
        """Have an exception of the task fail all requests, so that no caller waits forever."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, EngineDied):
                self.is_dead = True
                self.fail_all(error)
            elif error is not None:
                logger.error("%s: a call failed", self.name, exc_info=error)
                self.fail_all(RequestFailed(f"{self.name}: {error!r}"))

        if task not in self._tasks:
            self._tasks.add(task)
            task.add_done_callback(done)

    async def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        batch = [request for request in requests if request.request_id in self.results]  # others were cancelled
        await self._call(GenerationWorkerInterface.submit, batch, self._client_id)
        for request in batch:
            if request.request_id in self.results:
                self._sent.add(request.request_id)
            else:  # cancelled during the call
                self._cancel(request.request_id)
        if not self._is_draining:
            self._is_draining = True
            self._watch(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        try:
            while self.results:
                for answer in await self._call(GenerationWorkerInterface.drain, self._client_id):
                    if answer.tokens is not None:
                        if answer.request_id in self._streams:
                            self._streams[answer.request_id](answer.tokens)
                        continue
                    self._sent.discard(answer.request_id)
                    result = self.results.get(answer.request_id)
                    if result is None or result.done():  # the caller was cancelled
                        continue
                    if answer.completion is not None:
                        result.set_result(answer.completion)
                        continue
                    text = f"{self.name}: {answer.failure}"
                    if answer.failure_type == EngineDied.__name__:
                        raise EngineDied(text)
                    result.set_exception(RequestFailed(text))
                await asyncio.sleep(0)  # callers remove their entry, or send the next request
        finally:
            self._is_draining = False

    def _cancel(self, request_id: str) -> None:
        """Have the replica abort a request."""
        if not self.is_dead:
            self._watch(self._aborts.add(request_id))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        await self._call(GenerationWorkerInterface.abort, request_ids)

    async def _call[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the replica. Raises EngineDied if it is gone, or gives no sign of life for `timeout_s`.

        A call may take any time as long as the replica answers `check_health` meanwhile.
        """
        call = asyncio.ensure_future(call_worker(self.replica, method, *args, **kwargs))
        try:
            while not (await asyncio.wait([call], timeout=self._timeout_s / 2))[0]:
                if self.results:  # a long prompt may keep a healthy engine busy: it is asked, not judged by the time
                    health = call_worker(self.replica, GenerationWorkerInterface.check_health)
                    await asyncio.wait_for(health, self._timeout_s / 2)
            return call.result()
        except ACTOR_DEATHS as error:
            raise EngineDied(f"{self.name}: {death_text(error)}") from error
        except TimeoutError:
            name, limit_s = method.__name__, self._timeout_s
            raise EngineDied(f"{self.name} ({name}) gave no sign of life within {limit_s:g} s") from None
        except RayTaskError as error:
            if not isinstance(error.cause, WorkerCallError) or error.cause.exception_type != EngineDied.__name__:
                raise
            raise EngineDied(f"{self.name}: {error.cause.text}") from error
        finally:
            call.cancel()

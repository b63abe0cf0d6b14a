"""Engine replicas as many concurrent episodes use them: requests that are ready together travel together."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from nemo_rl.distributed.errors import WorkerCallError
from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)


class RequestFailed(RuntimeError):
    """An engine that lives did not answer a request; the message says why."""


class _AskAgain(Exception):
    """The engines were replaced, and what they were asked is forgotten."""


class EngineClient:
    """One replica. Belongs to one event loop. Calls to the replica are as many as there are batches, not samples.

    `replica` is the actor handle of a generation worker (`GenerationInterface.workers`). One that for `timeout_s`
    neither takes requests, nor answers one, nor says that it lives counts as dead. `asker`: see `Engines`.
    """

    def __init__(self, number: int, replica: Any, timeout_s: float, asker: str = "") -> None:
        self.number = number
        self.replica = replica
        self.is_dead = False
        self._timeout_s = timeout_s
        self._asker = (asker,) if asker else ()
        self._ids = (f"{uuid.uuid4().hex}-{n}" for n in itertools.count())
        self._waiting: list[GenerationRequest] = []  # not sent yet
        self._sent: set[str] = set()  # taken by the replica, not answered
        self._given_up: list[str] = []
        self._results: dict[str, asyncio.Future[Completion]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def in_flight(self) -> int:
        return len(self._results)

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        """Complete one prompt. Raises EngineDied, or RequestFailed with what the engine said.

        When the caller is cancelled, the engine stops sampling.
        """
        request = GenerationRequest(
            request_id=next(self._ids), prompt_token_ids=list(prompt_token_ids), sampling=sampling, seed=seed
        )
        result = self._results[request.request_id] = asyncio.get_running_loop().create_future()
        self._waiting.append(request)
        if len(self._waiting) == 1:
            self._start(self._submit())
        try:
            return await result
        finally:
            del self._results[request.request_id]
            if request.request_id in self._sent:
                self._sent.discard(request.request_id)
                self._give_up(request.request_id)

    def ask_again(self) -> None:
        """The replica was told to forget its requests: whoever waits for one asks anew."""
        for result in self._results.values():
            if not result.done():
                result.set_exception(_AskAgain())

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What nobody expected of a call must not leave its callers waiting."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        logger.error("generation worker %d: a call failed", self.number, exc_info=error)
        for result in self._results.values():
            if not result.done():
                result.set_exception(RequestFailed(f"generation worker {self.number}: {error!r}"))

    async def _submit(self) -> None:
        await asyncio.sleep(0)  # let the other episodes that are ready ask as well
        batch = [request for request in self._waiting if request.request_id in self._results]
        self._waiting = []
        try:
            await self._answer_of("submit", batch, *self._asker)
        except EngineDied as death:
            self._die(death)
            return
        for request in batch:
            if request.request_id in self._results:
                self._sent.add(request.request_id)
            else:  # given up while it travelled
                self._give_up(request.request_id)
        if not self._is_draining:
            self._is_draining = True
            self._start(self._drain())

    async def _drain(self) -> None:
        try:
            while self._results:
                for answer in await self._answer_of("drain", *self._asker):
                    self._settle(answer)
                await asyncio.sleep(0)  # whoever got an answer takes its entry out, or asks again
        except EngineDied as death:
            self._die(death)
        finally:
            self._is_draining = False

    def _settle(self, answer: GenerationAnswer) -> None:
        self._sent.discard(answer.request_id)
        result = self._results.get(answer.request_id)
        if result is None or result.done():  # the episode was given up
            return
        if answer.completion is not None:
            result.set_result(answer.completion)
        elif answer.failure_type == EngineDied.__name__:
            self._die(EngineDied(f"generation worker {self.number}: {answer.failure}"))
        else:
            result.set_exception(RequestFailed(f"generation worker {self.number}: {answer.failure}"))

    def _give_up(self, request_id: str) -> None:
        """Have the replica stop sampling for a request, together with others that are given up now."""
        self._given_up.append(request_id)
        if len(self._given_up) == 1 and not self.is_dead:
            self._start(self._abort())

    async def _abort(self) -> None:
        await asyncio.sleep(0)
        request_ids, self._given_up = self._given_up, []
        try:
            await self._answer_of("abort", request_ids)
        except EngineDied as death:
            self._die(death)

    async def _answer_of(self, method: str, *args: Any) -> Any:
        """What the replica returns. Raises EngineDied when it is gone, or says nothing at all for `timeout_s`.

        A call may take as long as it likes while the replica answers `check_health` in between.
        """
        call = asyncio.ensure_future(_value(self.replica.call.remote(method, *args)))
        try:
            while not (await asyncio.wait([call], timeout=self._timeout_s / 2))[0]:
                if self._results:
                    await asyncio.wait_for(_value(self.replica.call.remote("check_health")), self._timeout_s / 2)
            return call.result()
        except RayActorError as error:
            raise EngineDied(f"generation worker {self.number}: {error}") from error
        except TimeoutError:
            raise EngineDied(
                f"generation worker {self.number} ({method}) gave no sign of life within {self._timeout_s:g} s"
            ) from None
        except RayTaskError as error:
            if not isinstance(error.cause, WorkerCallError) or error.cause.exception_type != EngineDied.__name__:
                raise
            raise EngineDied(f"generation worker {self.number}: {error.cause.text}") from error
        finally:
            call.cancel()

    def _die(self, death: EngineDied) -> None:
        self.is_dead = True
        self._given_up = []
        for result in self._results.values():
            if not result.done():
                result.set_exception(death)


class Engines:
    """All replicas, for the episodes of one event loop.

    When a replica dies, whoever waits for it goes on with another; where none is left it waits until `replace` brings
    new ones and asks them the same, so that the turns an episode has behind it are not lost. `died` tells at once.

    Of several processes that use the same replicas, each is an `asker` with a name of its own: answers are kept apart
    by it.
    """

    def __init__(self, timeout_s: float, asker: str = "") -> None:
        self._timeout_s = timeout_s
        self._asker = asker
        self._clients: list[EngineClient] = []
        self._death: EngineDied | None = None  # of one of these replicas
        self._died = asyncio.Event()
        self._replaced = asyncio.Event()
        self._limits: dict[asyncio.Timeout, float] = {}  # time limits, with the seconds left to those that stand still

    def replace(self, replicas: Sequence[Any]) -> None:
        """Use these actor handles from now on. Requests to those before are asked anew."""
        known = {client.replica: client for client in self._clients if not client.is_dead}
        for client in self._clients:
            client.ask_again()
        self._clients = [
            known.get(replica) or EngineClient(number, replica, self._timeout_s, self._asker)
            for number, replica in enumerate(replicas)
        ]
        if self._death is not None:
            self._death = None
            self._died.clear()
            for limit, left_s in self._limits.items():
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time() + left_s)
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        """The least loaded replica answers; which one it is does not change the tokens. Raises RequestFailed."""
        while True:
            replaced = self._replaced
            alive = [client for client in self._clients if not client.is_dead]
            if not alive:
                await replaced.wait()
                continue
            client = min(alive, key=lambda client: client.in_flight)
            try:
                return await client.generate(prompt_token_ids, sampling, seed)
            except _AskAgain:
                continue
            except EngineDied as death:
                if not replaced.is_set():
                    self._note(death)

    async def died(self) -> EngineDied:
        """Wait until one of the replicas is dead."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    @asynccontextmanager
    async def time_limit(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`; from the death of a replica until it is replaced, time stands still."""
        async with asyncio.timeout(None) as limit:
            if seconds is None:
                yield limit
                return
            self._limits[limit] = seconds
            if self._death is None:
                limit.reschedule(asyncio.get_running_loop().time() + seconds)
            try:
                yield limit
            finally:
                del self._limits[limit]

    def _note(self, death: EngineDied) -> None:
        if self._death is not None:
            return
        self._death = death
        self._died.set()
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            when = limit.when()
            if when is not None and not limit.expired():
                self._limits[limit] = when - now
                limit.reschedule(None)


async def _value(ref: Any) -> Any:
    return await ref

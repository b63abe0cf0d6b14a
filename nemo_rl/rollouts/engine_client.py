"""An engine replica as many concurrent episodes use it: requests that are ready together travel together."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError

from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, SamplingParams


class RequestFailed(RuntimeError):
    """An engine that lives did not answer a request; the message says why."""


class EngineClient:
    """Belongs to one event loop. Calls to the replica are as many as there are batches, not samples.

    `replica` is the actor handle of a generation worker (`GenerationInterface.workers`).
    """

    def __init__(self, number: int, replica: Any) -> None:
        self.number = number
        self.replica = replica
        self._ids = (f"{uuid.uuid4().hex}-{n}" for n in itertools.count())
        self._waiting: list[GenerationRequest] = []
        self._results: dict[str, asyncio.Future[Completion]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def in_flight(self) -> int:
        return len(self._results)

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        """Complete one prompt. Raises EngineDied, or RequestFailed with what the engine said."""
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
            self._results.pop(request.request_id, None)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self) -> None:
        await asyncio.sleep(0)  # let the other episodes that are ready ask as well
        batch, self._waiting = self._waiting, []
        try:
            await self.replica.call.remote("submit", batch)
        except RayActorError as error:
            self._fail_all(str(error))
            return
        if not self._is_draining:
            self._is_draining = True
            self._start(self._drain())

    async def _drain(self) -> None:
        try:
            while self._results:
                for answer in await self.replica.call.remote("drain"):
                    self._settle(answer)
                await asyncio.sleep(0)  # whoever got an answer takes its entry out, or asks again
        except RayActorError as error:
            self._fail_all(str(error))
        finally:
            self._is_draining = False

    def _settle(self, answer: GenerationAnswer) -> None:
        result = self._results.get(answer.request_id)
        if result is None or result.done():  # the episode was given up
            return
        if answer.completion is not None:
            result.set_result(answer.completion)
        elif answer.failure_type == EngineDied.__name__:
            result.set_exception(EngineDied(f"generation worker {self.number}: {answer.failure}"))
        else:
            result.set_exception(RequestFailed(f"generation worker {self.number}: {answer.failure}"))

    def close(self) -> None:
        """Give up what is not answered: the replica, or another one, was replaced."""
        self._fail_all("the engines were replaced")

    def _fail_all(self, reason: str) -> None:
        for result in self._results.values():
            if not result.done():
                result.set_exception(EngineDied(f"generation worker {self.number}: {reason}"))

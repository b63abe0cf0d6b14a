"""Groups to ask for, and engine replicas without an engine, as `EngineClient` and `RolloutWorker` see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

from ray.exceptions import RayTaskError

from nemo_rl.distributed.errors import WorkerCallError, WorkerError
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import Completion, GenerationAnswer, GenerationRequest, Prompt, SamplingParams, StopReason


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, for a minute at most."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def error(kind: type[WorkerError], worker: str, exception_type: str = "") -> WorkerError:
    return kind(f"{worker} failed", worker=worker, rank=0, method="m", exception_type=exception_type)


def group_request(number: int, num_generations: int = 1, *, name: str = "g", **prompt: Any) -> GroupRequest:
    return GroupRequest(
        group_id=f"{name}{number}",
        prompt=Prompt(prompt_id=f"t:{number}", idx=number, **{"row": {}, "task_name": "t", **prompt}),
        num_generations=num_generations,
        sampling=SamplingParams(max_new_tokens=8),
        seed_step=0,
    )


def request_of(prompt: list[int], seed: int = 0, request_id: str = "", **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, seed=seed)


def completion(token_ids: list[int], logprobs: list[float] | None = None, version: int = 0) -> Completion:
    """It has stopped by itself."""
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return Completion(token_ids=token_ids, logprobs=logprobs, stop_reason=StopReason.STOP, weight_version=version)


def numbers(request: GenerationRequest) -> Completion:
    """Two tokens that depend on prompt and seed alone."""
    return completion([(sum(request.prompt_token_ids) + request.seed) % 90 + 10, 3], [-0.5, -0.1])


class FakeReplica:
    """Answers at once with the result of `answers`; None: never. `remote(...)` stands for the call of an actor."""

    def __init__(self, answers: Callable[[GenerationRequest], Completion | None] = numbers) -> None:
        self.answers = answers
        self.asked: list[GenerationRequest] = []
        self.under_way: set[str] = set()
        self.aborted: list[str] = []
        self.is_dead = False
        self.is_silent = False  # like a stopped process
        self.call = self
        self._answers: list[GenerationAnswer] = []
        self._wake = asyncio.Event()

    def remote(self, method: str, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._call(method, *args))

    async def _call(self, method: str, *args: Any) -> Any:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.is_dead:
            raise _death(method)
        return await getattr(self, method)(*args)

    async def submit(self, requests: Sequence[GenerationRequest], asker: str = "") -> None:
        self.asked += requests
        for request in requests:
            completion = self.answers(request)
            if completion is None:
                self.under_way.add(request.request_id)
            else:
                self._answers.append(GenerationAnswer(request_id=request.request_id, completion=completion))
        self._wake.set()

    async def drain(self, asker: str = "") -> list[GenerationAnswer]:
        while not self._answers:
            await self._wake.wait()
            self._wake.clear()
            if self.is_dead:
                raise _death("drain")
        answers, self._answers = self._answers, []
        return answers

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.under_way.difference_update(request_ids)

    async def check_health(self) -> None: ...

    def die(self) -> None:
        self.is_dead = True
        self._wake.set()


def _death(method: str) -> RayTaskError:
    """As it arrives from an actor."""
    cause = WorkerCallError("EngineDied", "the engine is gone", "")
    return RayTaskError(method, "", cause)

"""An environment as many concurrent episodes use it: one awaitable step per conversation, batched on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn

logger = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 120.0
RESTART_POLL_S = 0.2


class EnvironmentFailure(RuntimeError):
    """The environment raised, died twice, took too long or returned what is no answer. The episode has no reward."""


class _Dead(Exception):
    """The actor's process is gone; Ray starts it again."""


class _Refused(Exception):
    """The environment raised, or returned something wrong, for this batch."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentStep:
    """One conversation's part of an EnvironmentReturn."""

    observation: dict[str, str]
    reward: float
    terminated: bool
    metadata: Any
    next_stop_strings: Sequence[str] | None
    answer: str | None = None


@dataclass
class _Request:
    messages: list[dict[str, str]]
    metadata: Any
    result: asyncio.Future[EnvironmentStep]


class EnvironmentClient:
    """Belongs to one event loop. While a call to the actor is in flight, requests gather; then they go as one batch.

    A batch whose actor died is sent once more. A batch the environment refuses (it raises, or returns wrong shapes) is
    sent again one conversation at a time, so that one bad conversation fails alone. A batch that takes longer than
    `step_timeout_s` fails as a whole, and the actor is ended and started anew.
    """

    def __init__(self, name: str, actor: Any, step_timeout_s: float) -> None:
        self.name = name
        self.actor = actor
        self.step_timeout_s = step_timeout_s
        self._waiting: list[_Request] = []
        self._sender: asyncio.Task[None] | None = None

    async def step(self, message_log: Sequence[Mapping[str, Any]], metadata: Any) -> EnvironmentStep:
        """The environment's answer to the last turn of a conversation; only role and content of messages are sent.

        Raises:
            EnvironmentFailure: naming the environment and what went wrong.
        """
        messages = [{"role": message["role"], "content": message["content"]} for message in message_log]
        request = _Request(messages, metadata, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await request.result

    async def metrics(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """The metrics of `global_post_process_and_metrics`.

        Raises:
            EnvironmentFailure: when it raises, dies or takes longer than a step may.
        """
        try:
            ref = self.actor.global_post_process_and_metrics.remote(batch)
            _, metrics = await asyncio.wait_for(_value(ref), self.step_timeout_s)
        except (RayTaskError, RayActorError, TimeoutError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise EnvironmentFailure(
                f"environment {self.name!r}: global_post_process_and_metrics failed: {cause!r}"
            ) from error
        return dict(metrics)

    async def _send(self) -> None:
        await asyncio.sleep(0)  # let the other episodes that are ready ask as well
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._answer(batch)

    async def _answer(self, batch: list[_Request]) -> None:
        try:
            steps = await self._call_twice(batch)
        except _Refused as refusal:
            if len(batch) == 1:
                _fail(batch, EnvironmentFailure(str(refusal)))
                return
            for request in batch:
                await self._answer([request])
        except EnvironmentFailure as failure:
            _fail(batch, failure)
        else:
            for request, step in zip(batch, steps, strict=True):
                if not request.result.done():  # the episode may have been cancelled
                    request.result.set_result(step)

    async def _call_twice(self, batch: list[_Request]) -> list[EnvironmentStep]:
        try:
            return await self._call(batch)
        except _Dead as first:
            logger.warning("environment %s died and is started again; the same %d steps follow", self.name, len(batch))
            try:
                await self._restarted()
                return await self._call(batch)
            except _Dead as second:
                raise EnvironmentFailure(f"environment {self.name!r} died twice in a row: {second}") from first

    async def _restarted(self) -> None:
        """Wait until the actor's new process answers: until then Ray fails every call at once."""
        deadline = asyncio.get_running_loop().time() + RESTART_TIMEOUT_S
        while True:
            try:
                await self.actor.__ray_ready__.remote()
                return
            except ActorUnavailableError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise _Dead(f"no new process within {RESTART_TIMEOUT_S:g} s: {error}") from error
                await asyncio.sleep(RESTART_POLL_S)
            except RayActorError as error:  # gone for good, e.g. its constructor raises
                raise _Dead(str(error)) from error

    async def _call(self, batch: list[_Request]) -> list[EnvironmentStep]:
        logs = [request.messages for request in batch]
        ref = self.actor.step.remote(logs, [request.metadata for request in batch])
        try:
            returned = await asyncio.wait_for(_value(ref), self.step_timeout_s)
        except RayTaskError as error:  # first: Ray makes it an instance of what the environment raised as well
            raise _Refused(f"environment {self.name!r} raised {error.cause!r}") from error
        except TimeoutError:
            ray.kill(self.actor, no_restart=False)
            raise EnvironmentFailure(
                f"environment {self.name!r} did not answer {len(batch)} conversations within {self.step_timeout_s:g} s "
                "and is started again"
            ) from None
        except RayActorError as error:
            raise _Dead(str(error)) from error
        return split_return(returned, len(batch), self.name)


async def _value(ref: Any) -> Any:
    return await ref


def connect_environments(
    actors: Mapping[str, Any], task_to_env: Mapping[str, str], step_timeout_s: float
) -> dict[str, EnvironmentClient]:
    """Task name -> client of its environment; tasks of one environment share the client, and so its batches."""
    clients = {name: EnvironmentClient(name, actor, step_timeout_s) for name, actor in actors.items()}
    return {task: clients[env_name] for task, env_name in task_to_env.items()}


def _fail(batch: list[_Request], failure: EnvironmentFailure) -> None:
    for request in batch:
        if not request.result.done():
            request.result.set_exception(failure)


def split_return(returned: Any, size: int, name: str) -> list[EnvironmentStep]:
    """An EnvironmentReturn for `size` conversations, checked and cut into one step each."""
    fields = returned if isinstance(returned, tuple) else ()
    if len(fields) not in (5, 6):
        raise _Refused(f"environment {name!r} returned a {type(returned).__name__}, not an EnvironmentReturn")
    result = EnvironmentReturn(*fields)
    answers = result.answers if result.answers is not None else [None] * size
    lists = {
        "observations": result.observations,
        "metadata": result.metadata,
        "next_stop_strings": result.next_stop_strings,
        "answers": answers,
    }
    for field, values in lists.items():
        if not isinstance(values, list | tuple) or len(values) != size:
            raise _Refused(f"environment {name!r}: {field} must be a list of {size}, got {_describe(values)}")
    for observation in result.observations:
        if not isinstance(observation, Mapping) or not {"role", "content"} <= set(observation):
            raise _Refused(f"environment {name!r}: an observation needs role and content, got {observation!r}")
    rewards = _numbers(result.rewards, "rewards", size, name)
    terminateds = _numbers(result.terminateds, "terminateds", size, name)
    return [
        EnvironmentStep(
            observation={"role": str(observation["role"]), "content": str(observation["content"])},
            reward=reward,
            terminated=bool(terminated),
            metadata=metadata,
            next_stop_strings=stop_strings,
            answer=answer,
        )
        for observation, reward, terminated, metadata, stop_strings, answer in zip(
            result.observations, rewards, terminateds, result.metadata, result.next_stop_strings, answers, strict=True
        )
    ]


def _numbers(values: Any, field: str, size: int, name: str) -> list[float]:
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _Refused(f"environment {name!r}: {field} must be a tensor [{size}], got {_describe(values)}") from error
    if tensor.shape == (size, 1):
        tensor = tensor[:, 0]
    if tensor.shape != (size,):
        raise _Refused(f"environment {name!r}: {field} must have shape [{size}], got {list(tensor.shape)}")
    if not torch.isfinite(tensor).all():
        raise _Refused(f"environment {name!r}: {field} must be finite, got {tensor.tolist()}")
    return tensor.tolist()


def _describe(values: Any) -> str:
    return f"a list of {len(values)}" if isinstance(values, list | tuple) else f"a {type(values).__name__}"

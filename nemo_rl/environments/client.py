"""An environment as many concurrent episodes use it: one awaitable step per conversation, batched on the way."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
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
END_TIMEOUT_S = 15.0  # in which Ray ends a process, one that is stopped too
MAX_GROUPS_REMEMBERED = 100_000


class EnvironmentFailure(RuntimeError):
    """The environment raised, died twice, took too long or returned what is no answer. The episode has no reward."""


class _Dead(Exception):
    """The actor's process is gone; Ray starts it again."""


class StepRefused(Exception):
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
    sample_id: str
    messages: list[dict[str, str]]
    metadata: Any
    result: asyncio.Future[EnvironmentStep]

    def answer(self, step: EnvironmentStep | EnvironmentFailure) -> None:
        """The episode goes on; a failure is told the sample it belongs to."""
        if self.result.done():  # the episode was cancelled
            return
        if isinstance(step, EnvironmentFailure):
            failure = EnvironmentFailure(f"{step} (sample {self.sample_id})")
            failure.__cause__ = step
            self.result.set_exception(failure)
        else:
            self.result.set_result(step)


class EnvironmentClient:
    """One actor of an environment. Belongs to one event loop.

    While a call to the actor is in flight, requests gather; then they go as one batch.
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
        self._ended_at: float | None = None  # when the process was ended; None once the next one answers

    async def step(self, message_log: Sequence[Mapping[str, Any]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        """The environment's answer to the last turn of a conversation; only role and content of messages are sent.

        Raises:
            EnvironmentFailure: naming the environment, the sample and what went wrong.
        """
        messages = [{"role": message["role"], "content": message["content"]} for message in message_log]
        request = _Request(sample_id, messages, metadata, asyncio.get_running_loop().create_future())
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
        except StepRefused as refusal:
            if len(batch) == 1:
                _fail(batch, EnvironmentFailure(str(refusal)))
                return
            for request in batch:
                await self._answer([request])
        except EnvironmentFailure as failure:
            _fail(batch, failure)
        else:
            for request, step in zip(batch, steps, strict=True):
                request.answer(step)

    async def _call_twice(self, batch: list[_Request]) -> list[EnvironmentStep | EnvironmentFailure]:
        try:
            return await self._call(batch)
        except _Dead as first:
            logger.warning("environment %s died and is started again; the same %d steps follow", self.name, len(batch))
            try:
                await self._restarted()
                return await self._call(batch)
            except _Dead as second:
                raise EnvironmentFailure(f"environment {self.name!r} died twice in a row: {second}") from first

    def _end(self) -> None:
        """End the process, which does not answer; Ray starts it again."""
        ray.kill(self.actor, no_restart=False)
        self._ended_at = asyncio.get_running_loop().time()

    async def _restarted(self) -> None:
        """Wait until the actor's new process answers: until then Ray fails every call at once."""
        loop = asyncio.get_running_loop()
        limit = max(RESTART_TIMEOUT_S, self.step_timeout_s)
        deadline = loop.time() + limit
        while True:
            try:
                ready = _value(self.actor.__ray_ready__.remote())
                await asyncio.wait_for(ready, max(0.0, deadline - loop.time()))
                self._ended_at = None
                return
            except TimeoutError as error:
                self._end()
                raise _Dead(f"its new process does not answer within {limit:g} s") from error
            except RayActorError as error:
                # What was sent to a process that is about to be ended dies with it, and says nothing of the next one.
                is_ending = self._ended_at is not None and loop.time() < self._ended_at + END_TIMEOUT_S
                if not is_ending and not isinstance(error, ActorUnavailableError):
                    raise _Dead(str(error)) from error  # gone for good, e.g. its constructor raises
                if loop.time() > deadline:
                    raise _Dead(f"no new process within {limit:g} s: {error}") from error
                await asyncio.sleep(RESTART_POLL_S)

    async def _call(self, batch: list[_Request]) -> list[EnvironmentStep | EnvironmentFailure]:
        if self._ended_at is not None:  # its restart is no part of the time for a step
            await self._restarted()
        logs = [request.messages for request in batch]
        ref = self.actor.step.remote(logs, [request.metadata for request in batch])
        try:
            returned = await asyncio.wait_for(_value(ref), self.step_timeout_s)
        except RayTaskError as error:  # first: Ray makes it an instance of what the environment raised as well
            raise StepRefused(f"environment {self.name!r} raised {error.cause!r}") from error
        except TimeoutError:
            self._end()
            raise EnvironmentFailure(
                f"environment {self.name!r} did not answer {len(batch)} conversations within {self.step_timeout_s:g} s "
                "and is started again"
            ) from None
        except RayActorError as error:
            raise _Dead(str(error)) from error
        return split_return(returned, len(batch), self.name)


async def _value(ref: Any) -> Any:
    return await ref


class EnvironmentPool:
    """The actors of one environment, which take turns with groups of samples; an episode stays on its actor.

    While one actor answers a slow batch, the others go on with theirs.
    """

    def __init__(self, name: str, actors: Sequence[Any], step_timeout_s: float) -> None:
        assert actors
        self.name = name
        self.clients = [EnvironmentClient(name, actor, step_timeout_s) for actor in actors]
        self._number_of: OrderedDict[str, int] = OrderedDict()  # group id -> actor
        self._next_number = 0

    def _client_of(self, group_id: str) -> int:
        if group_id not in self._number_of:
            self._number_of[group_id] = self._next_number
            self._next_number = (self._next_number + 1) % len(self.clients)
            if len(self._number_of) > MAX_GROUPS_REMEMBERED:
                self._number_of.popitem(last=False)
        return self._number_of[group_id]

    async def step(self, message_log: Sequence[Mapping[str, Any]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        """As `EnvironmentClient.step`; `sample_id` is "<group id>/<index>"."""
        client = self.clients[self._client_of(sample_id.rpartition("/")[0])]
        return await client.step(message_log, metadata, sample_id=sample_id)

    async def metrics(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """As `EnvironmentClient.metrics`. Every actor is asked about the groups that it answered.

        Their metrics are averaged, each weighing as many samples as it saw; those called `num_...` are added up.
        """
        numbers = [self._client_of(group_id) for group_id in batch["group_id"]]
        parts = {number: [i for i, mine in enumerate(numbers) if mine == number] for number in sorted(set(numbers))}
        found = await asyncio.gather(
            *(self.clients[number].metrics(batch.select_indices(rows)) for number, rows in parts.items())
        )
        joined: dict[str, float] = {}
        for name in dict.fromkeys(name for metrics in found for name in metrics):
            told = [(metrics, len(rows)) for metrics, rows in zip(found, parts.values(), strict=True)]
            pairs = [(metrics[name], size) for metrics, size in told if name in metrics]
            if name.startswith("num_"):
                joined[name] = sum(value for value, _ in pairs)
            else:
                joined[name] = sum(value * size for value, size in pairs) / sum(size for _, size in pairs)
        return joined


def _fail(batch: list[_Request], failure: EnvironmentFailure) -> None:
    for request in batch:
        request.answer(failure)


def split_return(returned: Any, size: int, name: str) -> list[EnvironmentStep | EnvironmentFailure]:
    """An EnvironmentReturn for `size` conversations, checked and cut into one step, or failure, each.

    A reward that is no finite number is a failure of its conversation.

    Raises:
        StepRefused: it is none.
    """
    fields = returned if isinstance(returned, tuple) else ()
    if len(fields) not in (5, 6, 7):
        raise StepRefused(f"environment {name!r} returned a {type(returned).__name__}, not an EnvironmentReturn")
    result = EnvironmentReturn(*fields)
    answers = result.answers if result.answers is not None else [None] * size
    failures = result.failures if result.failures is not None else [None] * size
    lists = {
        "observations": result.observations,
        "metadata": result.metadata,
        "next_stop_strings": result.next_stop_strings,
        "answers": answers,
        "failures": failures,
    }
    for field, values in lists.items():
        if not isinstance(values, list | tuple) or len(values) != size:
            raise StepRefused(f"environment {name!r}: {field} must be a list of {size}, got {_describe(values)}")
    for observation in result.observations:
        if not isinstance(observation, Mapping) or not {"role", "content"} <= set(observation):
            raise StepRefused(f"environment {name!r}: an observation needs role and content, got {observation!r}")
    rewards = _numbers(result.rewards, "rewards", size, name)
    for i, reward in enumerate(rewards):
        if failures[i] is None and not math.isfinite(reward):
            failures = [*failures[:i], f"rewards must be finite, got {reward}", *failures[i + 1 :]]
    terminateds = _numbers(result.terminateds, "terminateds", size, name)
    return [
        EnvironmentStep(
            observation={"role": str(observation["role"]), "content": _encodable(str(observation["content"]))},
            reward=reward,
            terminated=bool(terminated),
            metadata=metadata,
            next_stop_strings=stop_strings,
            answer=answer,
        )
        if failure is None
        else EnvironmentFailure(f"environment {name!r}: {failure}")
        for observation, reward, terminated, metadata, stop_strings, answer, failure in zip(
            result.observations,
            rewards,
            terminateds,
            result.metadata,
            result.next_stop_strings,
            answers,
            failures,
            strict=True,
        )
    ]


def _encodable(text: str) -> str:
    """Without half characters (lone surrogates), which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _numbers(values: Any, field: str, size: int, name: str) -> list[float]:
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StepRefused(
            f"environment {name!r}: {field} must be a tensor [{size}], got {_describe(values)}"
        ) from error
    if tensor.shape == (size, 1):
        tensor = tensor[:, 0]
    if tensor.shape != (size,):
        several = tensor.dim() == 2 and tensor.shape[0] == size and field == "rewards"
        raise StepRefused(
            f"environment {name!r}: {field} must have shape [{size}], got {list(tensor.shape)}"
            + (": add up what a conversation is judged by, or make each an environment of one with type: composite")
            * several
        )
    return tensor.tolist()


def _describe(values: Any) -> str:
    return f"a list of {len(values)}" if isinstance(values, list | tuple) else f"a {type(values).__name__}"

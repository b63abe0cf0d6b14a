"""Calls of an environment. Its result is checked and cut into one step for each conversation.

Episodes await `EnvironmentPool.step`, one conversation each. The clients of the pool collect the requests into batches
for the actors of the environment. `step_each` calls an environment in the same process.
"""

import asyncio
import copy
import itertools
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pickle import PicklingError
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.distributed.actor_host import BUSY
from nemo_rl.distributed.batched_calls import BatchedCalls
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.errors import ACTOR_DEATHS, death_text
from nemo_rl.environments.interfaces import (
    MESSAGE_KEYS,
    EnvironmentInterface,
    EnvironmentReturn,
    FinishedSamples,
    mean_metrics,
    total,
)
from nemo_rl.types import (
    EnvironmentFailure,
    EnvironmentStep,
    LLMMessageLogType,
    Sample,
    SampleStatus,
    are_stop_strings,
    row_number,
)

logger = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 120.0
RESTART_POLL_S = 0.2
END_TIMEOUT_S = 15.0  # within this time Ray ends a process, a stopped one included
MAX_GROUPS_REMEMBERED = 100_000
MAX_EXCERPT = 120  # characters
_UNSENDABLE = (PicklingError, TypeError, ValueError, LookupError, AttributeError, RuntimeError)  # of pickling
PART_TYPES = ("text", "image", "image_url")  # of a content that is a list
OPTIONAL_LISTS = ("next_stop_strings", "answers", "failures", "metrics")  # of a return; None is a list of None


class StepRefused(Exception):
    """The environment raised, or returned something wrong, for this batch."""


class _NotSent(StepRefused):
    """The batch cannot be pickled: the environment has not seen it."""


class _ActorDied(Exception):
    """The actor's process is gone; Ray restarts it."""


Outcome = EnvironmentStep | EnvironmentFailure


@dataclass
class _Request:
    sample_id: str
    messages: LLMMessageLogType
    metadata: Any
    result: asyncio.Future[EnvironmentStep]


class EnvironmentClient:
    """One actor of an environment. Belongs to one event loop.

    Requests that arrive during a call to the actor wait, and are sent as one batch after it.
    A batch whose actor died is sent once more. A batch that the environment refuses (it raises, or returns wrong
    shapes) is sent again one conversation at a time, so that only a bad conversation fails; a batch of one too, so
    that no outcome depends on which requests arrive together. An environment without `may_repeat_step` gets no batch
    twice: either event fails the batch as a whole. So does a batch that takes longer than `step_timeout_s`, and then
    the actor is restarted.
    """

    def __init__(self, name: str, actor: Any, step_timeout_s: float) -> None:
        self.name = name
        self.actor = actor
        self.step_timeout_s = step_timeout_s
        self._steps = BatchedCalls(self._answer, one_at_a_time=True)
        self._may_repeat: bool | None = None  # None: it was not asked yet
        self._told = set[str]()  # metrics of which it was said that they are no numbers
        self._ended_at: float | None = None  # when the process was ended; None once the next one answers

    async def step(self, message_log: Sequence[Mapping[str, Any]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        """The environment's answer to the last turn of a conversation; of messages only `MESSAGE_KEYS` are sent.

        EnvironmentFailure names the environment, the sample and the problem.
        """
        messages = [{key: message[key] for key in MESSAGE_KEYS if key in message} for message in message_log]
        request = _Request(sample_id, messages, metadata, asyncio.get_running_loop().create_future())
        self._steps.add(request)
        return await request.result

    async def metrics(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """The metrics of `global_post_process_and_metrics`; one that is no number is left out, with a warning.

        EnvironmentFailure when it raises or dies twice in a row, takes longer than a step may, or returns no metrics.
        An absent field of the batch is absent the second time, too, so its KeyError is reported at once.
        """
        try:
            try:
                found = await self._post_process(batch)
            except RayError as error:
                if isinstance(cause_of(error), KeyError):
                    raise
                logger.warning("environment %s: metrics are asked for again: %r", self.name, cause_of(error))
                await self._restarted()
                found = await self._post_process(batch)
        except (RayError, TimeoutError, _ActorDied) as error:
            cause = cause_of(error)
            fields = f"; the batch has {', '.join(batch)}" if isinstance(cause, KeyError) else ""
            raise EnvironmentFailure(f"{self._metrics_failed}: {cause!r}{fields}") from error
        if not isinstance(found, Mapping):
            raise EnvironmentFailure(f"{self._metrics_failed}: it returned {_describe(found)}, not numbers by name")
        return self._numbers(found)

    @property
    def _metrics_failed(self) -> str:
        return f"environment {self.name!r}: global_post_process_and_metrics failed"

    async def _post_process(self, batch: BatchedDataDict[Any]) -> Any:
        # Two results, of which the batch stays where it is.
        kept, ref = self.actor.global_post_process_and_metrics.options(num_returns=2).remote(batch)
        try:
            return await asyncio.wait_for(ref, self.step_timeout_s)
        except RayError:
            await asyncio.gather(kept, return_exceptions=True)  # or Ray logs a traceback of what nobody asked for
            raise

    def _numbers(self, metrics: Mapping[Any, Any]) -> dict[str, float]:
        """Numbers and tensors of one number."""
        plain = {str(name): value.item() if _is_one_number(value) else value for name, value in metrics.items()}
        for name in [name for name, value in plain.items() if not isinstance(value, Real)]:
            value = plain.pop(name)
            if name not in self._told:
                self._told.add(name)
                logger.warning("environment %r: metric %r is no number, and left out: %.80r", self.name, name, value)
        return {name: float(value) for name, value in plain.items()}

    async def _answer(self, batch: list[_Request], *, is_repeated: bool = False) -> None:
        try:
            with BUSY.track(f"environment {self.name!r}"):
                outcomes = await self._call_twice(batch)
        except StepRefused as refusal:
            if not is_repeated and (isinstance(refusal, _NotSent) or await self._may_repeat_step()):
                for request in batch:
                    await self._answer([request], is_repeated=True)
                return
            outcomes = [EnvironmentFailure(str(refusal))] * len(batch)
        except EnvironmentFailure as failure:
            outcomes = [failure] * len(batch)
        for request, outcome in zip(batch, outcomes, strict=True):
            if request.result.done():  # the episode was cancelled
                continue
            if isinstance(outcome, EnvironmentFailure):
                failure = EnvironmentFailure(f"{outcome} (sample {request.sample_id})")
                failure.__cause__ = outcome
                request.result.set_exception(failure)
            else:
                request.result.set_result(outcome)

    async def _call_twice(self, batch: list[_Request]) -> list[Outcome]:
        try:
            return await self._call(batch)
        except _ActorDied as first:
            logger.warning("environment %s died during %d steps and is restarted", self.name, len(batch))
            try:
                await self._restarted()
                if not await self._may_repeat_step():
                    raise EnvironmentFailure(
                        f"environment {self.name!r} died during a step, which may not be repeated: {first}"
                    ) from first
                return await self._call(batch)
            except _ActorDied as second:
                raise EnvironmentFailure(f"environment {self.name!r} died twice in a row: {second}") from first

    async def _may_repeat_step(self) -> bool:
        """`may_repeat_step` of the environment; False if it does not answer."""
        if self._may_repeat is None:
            try:
                asked = self.actor.__ray_call__.remote(_may_repeat_step)
                self._may_repeat = bool(await asyncio.wait_for(asked, self.step_timeout_s))
            except (RayError, TimeoutError) as error:
                logger.warning("environment %s: no step is repeated, as it does not answer: %r", self.name, error)
                return False
        return self._may_repeat

    async def _call(self, batch: list[_Request]) -> list[Outcome]:
        if self._ended_at is not None:  # a restart does not count as time of the step
            await self._restarted()
        try:
            ref = self.actor.step.remote([one.messages for one in batch], [one.metadata for one in batch])
        except _UNSENDABLE as error:
            raise _NotSent(f"what is sent to environment {self.name!r} cannot be pickled: {error!r}") from error
        try:
            returned = await asyncio.wait_for(ref, self.step_timeout_s)
        except RayTaskError as error:  # first: Ray makes it an instance of the environment's exception as well
            raise StepRefused(f"environment {self.name!r} raised {error.cause!r}") from error
        except TimeoutError:
            self._end()
            raise EnvironmentFailure(
                f"environment {self.name!r} did not answer {len(batch)} conversations within {self.step_timeout_s:g} s "
                "and is restarted"
            ) from None
        except ACTOR_DEATHS as error:
            raise _ActorDied(death_text(error)) from error
        except RayError as error:  # e.g. this process cannot import the class of a value
            raise StepRefused(f"the answer of environment {self.name!r} cannot be read: {error}") from error
        return split_return(returned, len(batch), self.name)

    def _end(self) -> None:
        """End the process, which does not answer; Ray restarts it."""
        ray.kill(self.actor, no_restart=False)
        self._ended_at = asyncio.get_running_loop().time()

    async def _restarted(self) -> None:
        """Wait until the actor's new process answers: until then every call to it fails immediately."""
        loop = asyncio.get_running_loop()
        limit = max(RESTART_TIMEOUT_S, self.step_timeout_s)
        deadline = loop.time() + limit
        while True:
            try:
                await asyncio.wait_for(self.actor.__ray_ready__.remote(), max(0.0, deadline - loop.time()))
                self._ended_at = None
                return
            except TimeoutError as error:
                self._end()
                raise _ActorDied(f"its new process does not answer within {limit:g} s") from error
            except ACTOR_DEATHS as error:
                # A call that still reached the ending process fails with it. That says nothing about the next process.
                is_ending = self._ended_at is not None and loop.time() < self._ended_at + END_TIMEOUT_S
                if not is_ending and not isinstance(error, ActorUnavailableError):
                    raise _ActorDied(death_text(error)) from error  # gone for good, e.g. its constructor raises
                if loop.time() > deadline:
                    raise _ActorDied(f"no new process within {limit:g} s: {error}") from error
                await asyncio.sleep(RESTART_POLL_S)


class EnvironmentPool:
    """The actors of one environment. They take groups of samples in turn; an episode stays on its actor.

    A slow batch delays the episodes of its own actor only. `of_nemo_rl`: see `finished_samples`.
    """

    def __init__(self, name: str, actors: Sequence[Any], step_timeout_s: float, *, of_nemo_rl: bool = False) -> None:
        self.name = name
        self.of_nemo_rl = of_nemo_rl
        self._told = set[str]()
        self.clients = [EnvironmentClient(name, actor, step_timeout_s) for actor in actors]
        turns = itertools.cycle(range(len(actors)))
        self._actor_of = lru_cache(MAX_GROUPS_REMEMBERED)(lambda group_id: next(turns))

    async def step(self, message_log: Sequence[Mapping[str, Any]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        """As `EnvironmentClient.step`; `sample_id` is "<group id>/<index>"."""
        client = self.clients[self._actor_of(sample_id.rpartition("/")[0])]
        return await client.step(message_log, metadata, sample_id=sample_id)

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """The means of the `metrics` of (group id, sample) pairs, and the metrics of the actors.

        Each actor sees the groups that it answered. Of several actors, metrics are averaged, weighted by their numbers
        of samples; those called `num_...` are added up. A failure is logged once and gives no metrics.
        """
        batch = finished_samples(samples, of_nemo_rl=self.of_nemo_rl)
        numbers = [self._actor_of(group_id) for group_id, _ in samples]
        rows = {number: [i for i, mine in enumerate(numbers) if mine == number] for number in sorted(set(numbers))}
        try:
            found = await asyncio.gather(
                *(self.clients[number].metrics(batch.select_indices(of_actor)) for number, of_actor in rows.items())
            )
        except EnvironmentFailure as failure:  # training can continue without these metrics
            if str(failure) not in self._told:  # the next steps would repeat it
                self._told.add(str(failure))
                logger.warning("%s", failure)
            return {}
        sizes = [len(of_actor) for of_actor in rows.values()]
        joined = mean_metrics(sample.metrics for _, sample in samples)
        for name in dict.fromkeys(itertools.chain.from_iterable(found)):
            pairs = [(metrics[name], size) for metrics, size in zip(found, sizes, strict=True) if name in metrics]
            is_count = name.rpartition("/")[2].startswith("num_")  # a composite writes `<part>/num_...`
            total = sum(value if is_count else value * size for value, size in pairs)
            joined[name] = total if is_count else total / sum(size for _, size in pairs)
        return joined


TENSORS = frozenset({"text", "rewards", "total_reward", "is_end", "prompt_lengths", "generation_lengths"})
"""Fields of a batch of finished samples; the others are lists."""


def finished_samples(samples: Sequence[tuple[str, Sample]], *, of_nemo_rl: bool = False) -> FinishedSamples:
    """The batch of `global_post_process_and_metrics` from (group id, sample) pairs.

    Tensors are [B], and `text` has the tokens of the prompts, int64 [B, longest prompt], 0 behind shorter ones.
    `of_nemo_rl`: `rewards` are [B, n] where samples have n of them, and `generation_lengths` count the prompt, too.
    """
    metas = [sample.meta for _, sample in samples]
    prompts = [torch.from_numpy(sample.token_ids[: sample.meta.num_prompt_tokens]) for _, sample in samples]
    total_reward = torch.tensor([meta.reward for meta in metas])
    prompt_lengths = torch.tensor([meta.num_prompt_tokens for meta in metas])
    generated = torch.tensor([meta.num_generated_tokens for meta in metas])
    several = of_nemo_rl and len({len(meta.reward_parts) for meta in metas} | {0}) == 2
    return BatchedDataDict[Any](
        group_id=[group_id for group_id, _ in samples],
        idx=[row_number(group_id) for group_id, _ in samples],
        text=pad_sequence(prompts, batch_first=True),
        message_log=[sample.messages for _, sample in samples],
        metrics=[sample.metrics for _, sample in samples],
        rewards=torch.tensor([meta.reward_parts for meta in metas]) if several else total_reward,
        total_reward=total_reward,
        is_end=torch.tensor([meta.status is SampleStatus.COMPLETED for meta in metas]),
        prompt_lengths=prompt_lengths,
        generation_lengths=generated + prompt_lengths if of_nemo_rl else generated,
    )


def _may_repeat_step(environment: EnvironmentInterface[Any]) -> bool:
    """Runs in the actor's process."""
    return environment.may_repeat_step


def _is_one_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) == 1


def cause_of(error: Exception) -> Exception:
    """The exception of the environment, in place of Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) else error


def split_return(returned: Any, size: int, name: str) -> list[Outcome]:
    """Check an EnvironmentReturn for `size` conversations and cut it into one step, or failure, each.

    A reward or metric that is not finite is a failure of its conversation. StepRefused for no valid EnvironmentReturn.
    """
    fields = returned if isinstance(returned, tuple) else ()
    if not 5 <= len(fields) <= len(EnvironmentReturn._fields):
        raise StepRefused(f"environment {name!r} returned a {type(returned).__name__}, not an EnvironmentReturn")
    result = EnvironmentReturn(*fields)
    lists = result._asdict()
    lists |= {field: [None] * size for field in OPTIONAL_LISTS if lists[field] is None}
    rewards = _rewards(lists.pop("rewards"), size, name)
    [terminateds] = _numbers(lists.pop("terminateds"), "terminateds", size, name).T.tolist()
    for field_name, values in lists.items():
        if not isinstance(values, list | tuple) or len(values) != size:
            raise StepRefused(f"environment {name!r}: {field_name} must be a list of {size}, got {_describe(values)}")
    outcomes: list[Outcome] = []
    for observation, metadata, stop_strings, answer, failure, metrics, parts, terminated in zip(
        *lists.values(), rewards.tolist(), terminateds, strict=True
    ):
        reward = total(parts)
        if not isinstance(observation, Mapping) or not {"role", "content"} <= set(observation):
            raise StepRefused(f"environment {name!r}: an observation needs role and content, got {observation!r}")
        metrics = {} if metrics is None else metrics
        if not isinstance(metrics, Mapping) or not all(isinstance(value, Real) for value in metrics.values()):
            raise StepRefused(f"environment {name!r}: metrics of a conversation are numbers by name, got {metrics!r}")
        if not are_stop_strings(stop_strings):
            raise StepRefused(
                f"environment {name!r}: next_stop_strings are lists of texts or None, got {stop_strings!r}"
            )
        if not isinstance(answer, str | None):
            raise StepRefused(f"environment {name!r}: an answer is a text or None, got {answer!r}")
        if failure is None and not math.isfinite(reward):
            failure = f"rewards must be finite, got {reward}"
        # math.isfinite raises for integers that are too large for a float.
        if failure is None and (bad := [key for key, value in metrics.items() if not abs(value) <= sys.float_info.max]):
            failure = f"metrics must be finite: {', '.join(map(str, bad))}"
        if failure is not None:
            outcomes.append(EnvironmentFailure(f"environment {name!r}: {failure}"))
            continue
        outcomes.append(
            EnvironmentStep(
                observation={"role": str(observation["role"]), "content": _content(observation["content"], name)},
                reward=reward,
                terminated=bool(terminated),
                metadata=metadata,
                next_stop_strings=stop_strings,
                answer=answer,
                metrics={str(key): float(value) for key, value in metrics.items()},
                reward_parts=parts if len(parts) > 1 else [],
            )
        )
    return outcomes


def as_return(outcomes: Sequence[Outcome]) -> EnvironmentReturn[Any]:
    """Inverse of `split_return`. Beside conversations with several rewards, a single one is the first of several."""
    nothing = {"role": "environment", "content": ""}
    ended = EnvironmentStep(observation=nothing, reward=0.0, terminated=True, metadata=None)
    steps = [ended if isinstance(outcome, EnvironmentFailure) else outcome for outcome in outcomes]
    width = max((len(step.reward_parts) for step in steps), default=0)
    rewards = [step.reward_parts or [step.reward] + [0.0] * (width - 1) for step in steps]
    return EnvironmentReturn(
        observations=[step.observation for step in steps],
        metadata=[step.metadata for step in steps],
        next_stop_strings=[None if step.next_stop_strings is None else [*step.next_stop_strings] for step in steps],
        rewards=torch.tensor(rewards if width else [step.reward for step in steps], dtype=torch.float64),
        terminateds=torch.tensor([step.terminated for step in steps]),
        answers=[step.answer for step in steps],
        failures=[str(outcome) if isinstance(outcome, EnvironmentFailure) else None for outcome in outcomes],
        metrics=[step.metrics for step in steps],
    )


def _content(content: Any, name: str) -> Any:
    """A text, or a list of parts, of which some may be images. StepRefused for parts of neither kind."""
    if not isinstance(content, list | tuple):
        # Lone surrogates, which no tokenizer accepts, become question marks.
        return str(content).encode("utf-8", "replace").decode("utf-8")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in PART_TYPES or part.get(kind) is None:
            raise StepRefused(
                f'environment {name!r}: a part of an observation is {{"type": "text", "text": ...}} or {{"type": '
                f'"image", "image": ...}}, not {part!r:.80}'
            )
        parts.append({"type": "text", "text": _content(str(part["text"]), name)} if kind == "text" else dict(part))
    return parts


def _rewards(values: Any, size: int, name: str) -> torch.Tensor:
    """float64 [B, n]; the columns of named rewards are in the order of their names."""
    if not isinstance(values, Mapping):
        return _numbers(values, "rewards", size, name)
    if not values:
        raise StepRefused(f"environment {name!r}: rewards must have at least one name, got an empty mapping")
    return torch.cat([_numbers(values[key], f"rewards[{key!r}]", size, name) for key in sorted(values, key=str)], dim=1)


def _numbers(values: Any, field_name: str, size: int, name: str) -> torch.Tensor:
    """float64 [B, n]; n is 1 unless there are several rewards."""
    where = f"environment {name!r}: {field_name}"
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise StepRefused(f"{where} must be a tensor [{size}], got {_describe(values)}") from error
    matrix = tensor[:, None] if tensor.dim() == 1 else tensor
    may_be_several = field_name == "rewards" and matrix.dim() == 2 and matrix.shape[1] > 0
    if matrix.shape != (size, matrix.shape[1] if may_be_several else 1):
        several = f", or [{size}, n]" if field_name == "rewards" else ""
        raise StepRefused(f"{where} must have shape [{size}]{several}, got {list(tensor.shape)}")
    return matrix


def _describe(values: Any) -> str:
    return f"a list of {len(values)}" if isinstance(values, list | tuple) else f"a {type(values).__name__}"


def step_each(
    environment: EnvironmentInterface[Any],
    logs: Sequence[LLMMessageLogType],
    metadata: Sequence[Any],
    *,
    name: str,
    executor: Executor,
) -> list[Outcome]:
    """The steps of `environment` in this process. A batch that it refuses is tried again one conversation at a time, or
    fails as a whole without `may_repeat_step`.

    `step` gets copies of the metadata. It runs in `executor`, whose futures hold its exceptions.
    """
    if not logs:
        return []
    running = executor.submit(environment.step, list(logs), copy.deepcopy(list(metadata)))
    error = running.exception()
    if error is None:
        try:
            return split_return(running.result(), len(logs), name)
        except StepRefused as refusal:
            error = refusal
    if len(logs) > 1 and environment.may_repeat_step:
        return [
            step_each(environment, [log], [known], name=name, executor=executor)[0]
            for log, known in zip(logs, metadata, strict=True)
        ]
    reason = str(error) if isinstance(error, StepRefused) else f"environment {name!r} raised {error!r}"
    return [EnvironmentFailure(f"{reason} ({excerpt(log)})") for log in logs]


def excerpt(messages: LLMMessageLogType) -> str:
    """The end of a conversation, which identifies it in an error message."""
    text = str(messages[-1]["content"])
    shown = text if len(text) <= MAX_EXCERPT else "..." + text[-MAX_EXCERPT:]
    return f"in the conversation that ends {shown!r}"

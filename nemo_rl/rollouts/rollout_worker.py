"""The process that plays episodes: prompts -> finished groups in the object store.

`RolloutWorker` runs in its own actor. It tokenises prompts, plays all episodes of a group concurrently, one coroutine
each, and hands the finished group to `GroupKeeper`. The controller's side is `collector.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray

from nemo_rl.distributed.batched_calls import BatchedCalls
from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.rollouts.episode import EpisodeLimits, run_episode, without_reward
from nemo_rl.rollouts.group_keeper import Places, store
from nemo_rl.rollouts.records import read_groups
from nemo_rl.types import (
    Completion,
    DatumSpec,
    EnvironmentFailure,
    EnvironmentStep,
    GenerateFn,
    GenerationRequest,
    GroupHandle,
    LLMMessageLogType,
    OnTokens,
    Pixels,
    Prompt,
    RenderedObservation,
    RolloutGroup,
    Sample,
    SampleStatus,
    SamplingParams,
)
from nemo_rl.utils.seeds import sample_seed
from nemo_rl.utils.timer import BusyTime, GenerationUse

T = TypeVar("T")

_PATIENCE = 0.05  # of the time that the first group of a call took, for others to end


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt, to be played `num_generations` times."""

    group_id: str
    prompt: Prompt
    num_generations: int
    sampling: SamplingParams
    seed_step: int  # part of every sample's seed


class _HasMetrics(Protocol):
    @property
    def name(self) -> str: ...  # section of `env`

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """The environment's own metrics over finished (group id, sample) pairs."""
        ...


class Environment(_HasMetrics, Protocol):
    """An environment as the rollout worker uses it."""

    async def step(self, message_log: LLMMessageLogType, metadata: Any, *, sample_id: str) -> EnvironmentStep:
        """Answer one turn of the episode `sample_id`. EnvironmentFailure, which names the sample, if it cannot."""
        ...


class AgentEnvironment(_HasMetrics, Protocol):
    """Agents that own their loop, as the rollout worker uses them."""

    async def play(
        self,
        prompt: Prompt,
        datum: DatumSpec,
        *,
        sample_id: str,
        generate: GenerateFn,
        sampling: SamplingParams,
        seed_of_turn: Callable[[int], int],
    ) -> Sample:
        """Play one episode to its end."""
        ...


@dataclass
class _Images:
    """The images of a group, by digest. The engines fetch each once, whatever the number of samples and turns."""

    pixels: dict[str, Pixels] = field(default_factory=dict)
    refs: dict[str, ray.ObjectRef] = field(default_factory=dict)

    def add(self, pixels: Mapping[str, Pixels]) -> None:
        for digest in pixels.keys() - self.pixels.keys():
            self.pixels[digest] = pixels[digest]
            self.refs[digest] = ray.put(pixels[digest])


@dataclass(kw_only=True)
class RolloutWorkerSettings:
    """Settings of a rollout worker. All of them can be pickled."""

    process: Callable[[Prompt], DatumSpec]
    decode: Callable[[Sequence[int]], str]
    survives_text: Callable[[Sequence[int]], bool]  # whether tokens stay the same when decoded and tokenised again
    # As `RenderFn`, with `pixels`, the pixels of new images. ValueError for an observation that cannot be shown.
    render: Callable[..., RenderedObservation]
    connect_environments: Callable[[], Mapping[str, Environment]]  # by task name; called inside the worker
    limits: EpisodeLimits
    run_seed: int
    raw_text: Collection[str] = ()  # tasks whose environments have the contract of NeMo RL; see `run_episode`
    # A row of the dataset, with open images in the place of their sources; ValueError for one that cannot be read.
    open_images: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]] | None = None  # None: a model of text
    connect_agents: Callable[[], Mapping[str, AgentEnvironment]] = dict  # by task name; called inside the worker
    engine_timeout_s: float = 900.0  # an engine without a sign of life for so long counts as dead


class RolloutWorker:
    """Plays many groups at a time. A plain class with async methods."""

    def __init__(self, settings: RolloutWorkerSettings, generation_workers: Sequence[Any], keeper: Any) -> None:
        self.settings = settings
        self._playing: dict[str, asyncio.Task[GroupHandle]] = {}  # by group id
        # `keeper`: handle of a GroupKeeper. Groups that end at the same time travel to it together.
        self._stores = BatchedCalls(partial(store, keeper, limit_s=settings.engine_timeout_s))
        self.environments = settings.connect_environments()
        self.agents = settings.connect_agents()
        self.engines = Engines(settings.engine_timeout_s)
        self.engines.replace(generation_workers)
        self.busy = BusyTime()

    async def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Set the actor handles of the engine replicas, after a replica was restarted."""
        self.engines.replace(workers)

    async def generate(
        self, pixels: Mapping[str, ray.ObjectRef], request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Complete a prompt; see `Engines.generate`. `pixels`: of each image, by digest."""
        if request.images:
            request = replace(request, pixels={span.digest: pixels[span.digest] for span in request.images})
        with self.busy.request():
            completion = await self.engines.generate(request, on_tokens)
        self.busy.num_tokens += len(completion.token_ids)
        return completion

    async def generation_use(self) -> GenerationUse:
        """Use of the engines since the last call."""
        return self.busy.take()

    async def collect(self, requests: Sequence[GroupRequest]) -> list[GroupHandle]:
        """Play groups to their ends and store them. Returns those that have ended, at least one; see `collect_rest`.

        Raises EngineDied as soon as an engine dies, while the groups continue. The caller replaces the engines and
        calls again with the same requests.
        """
        for request in requests:
            if request.group_id not in self._playing:
                self._playing[request.group_id] = asyncio.create_task(self._play(request))
        return await self.collect_rest([request.group_id for request in requests])

    async def collect_rest(self, group_ids: Sequence[str]) -> list[GroupHandle]:
        """`collect` for groups that it did not return."""
        playing = {group_id: self._playing[group_id] for group_id in group_ids}
        try:
            await self.engines.wait(*playing.values(), patience=_PATIENCE)
        finally:
            ended = {group_id: task for group_id, task in playing.items() if task.done()}
            for group_id, task in ended.items():
                if self._playing.get(group_id) is task:
                    del self._playing[group_id]
        return [task.result() for task in ended.values()]

    async def abandon(self) -> None:
        """Cancel all groups that are being played."""
        for task in self._playing.values():
            task.cancel()
        self._playing = {}

    async def _play(self, request: GroupRequest) -> GroupHandle:
        prompt = request.prompt
        if self.settings.open_images is not None:
            try:
                prompt = replace(prompt, row=await self.settings.open_images(prompt.row))
            except ValueError as error:
                raise ValueError(f"row {prompt.prompt_id}: {error}") from error
        datum = self.settings.process(prompt)
        images = _Images()
        images.add(datum.pop("pixels", {}))
        play = (self._sample(request, datum, i, images) for i in range(request.num_generations))
        samples = await asyncio.gather(*play)
        group = RolloutGroup(
            group_id=request.group_id, prompt_id=prompt.prompt_id, samples=samples, pixels=images.pixels
        )
        return await self.keep(group, prompt.task_name)

    async def keep(self, group: RolloutGroup, task_name: str) -> GroupHandle:
        """Store a finished group in the keeper. `task_name` goes into the handle."""
        # Shielded: one group that is abandoned does not take the others with it.
        ref, place = (await asyncio.shield(self._stores.add(group)))[group.group_id]
        return GroupHandle(
            group_id=group.group_id,
            prompt_id=group.prompt_id,
            task_name=task_name,
            ref=ref,
            samples=[sample.meta for sample in group.samples],
            place=place,
        )

    async def _sample(self, request: GroupRequest, datum: DatumSpec, index: int, images: _Images) -> Sample:
        sample_id, prompt, limits = f"{request.group_id}/{index}", request.prompt, self.settings.limits
        if datum["loss_multiplier"] == 0.0 or datum["length"] >= limits.max_total_tokens:
            failure = f"prompt {prompt.prompt_id} has {datum['length']} tokens and leaves no room for an answer"
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.PROMPT_TOO_LONG, failure=failure)
        limit = None
        try:
            async with self.engines.time_limit(limits.timeout_s) as limit:
                run_seed = self.settings.run_seed
                common: dict[str, Any] = {
                    "sample_id": sample_id,
                    "generate": partial(self.generate, images.refs),
                    "sampling": request.sampling,
                    "seed_of_turn": partial(sample_seed, run_seed, request.seed_step, prompt.prompt_id, index),
                }
                if prompt.task_name in self.agents:
                    return await self.agents[prompt.task_name].play(prompt, datum, **common)
                raw_text = prompt.task_name in self.settings.raw_text
                return await run_episode(
                    datum,
                    env_step=partial(self.environments[prompt.task_name].step, sample_id=sample_id),
                    decode=self.settings.decode,
                    render=partial(self._render, sample_id, images, raw_text=raw_text),
                    limits=limits,
                    raw_text=raw_text,
                    **common,
                )
        except (EnvironmentFailure, RequestFailed) as error:
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.FAILED, failure=str(error))
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            failure = f"episode {sample_id} was not over after {limits.timeout_s:g} s"
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.TIMED_OUT, failure=failure)

    async def _render(
        self, sample_id: str, images: _Images, observation: dict[str, Any], **known: Any
    ) -> RenderedObservation:
        """`settings.render`; images that are new to the group join `images`."""
        new: dict[str, Pixels] = {}
        try:
            if self.settings.open_images is not None:
                observation = (await self.settings.open_images({"messages": [observation]}))["messages"][0]
            rendered = self.settings.render(observation, pixels=new, **known)
        except ValueError as error:
            raise EnvironmentFailure(f"sample {sample_id}: {error}") from error
        images.add(new)
        return rendered

    async def with_groups(
        self, function: Callable[..., Awaitable[T]], args: Sequence[Any], places: Places, *stored: list[RolloutGroup]
    ) -> T:
        """`await function(self, *args, *groups)`. The keeper has the groups in lists; see `places_and_refs`."""
        return await function(self, *args, *(stored[number][place] for number, place in places))

    async def write(self, write: Callable[..., T], task_names: Sequence[str], *groups: RolloutGroup) -> T:
        """`write(groups, task_names)`, in a thread."""
        return await asyncio.to_thread(write, groups, task_names)

    async def load(self, folder: Path) -> list[GroupHandle]:
        """Read the groups of a folder and store them."""
        groups, task_names = await asyncio.to_thread(read_groups, folder)
        return await asyncio.gather(*map(self.keep, groups, task_names))

    async def environment_metrics(self, task_names: Sequence[str], *groups: RolloutGroup) -> dict[str, float]:
        """`<environment>/<metric>` over the samples of finished groups; `task_names` has one entry per group."""
        by_name: dict[str, tuple[_HasMetrics, list[tuple[str, Sample]]]] = {}
        for task_name, group in zip(task_names, groups, strict=True):
            environment = self.agents.get(task_name) or self.environments[task_name]
            _, samples = by_name.setdefault(environment.name, (environment, []))
            samples += [(group.group_id, sample) for sample in group.samples if sample.meta.has_reward]
        return {
            f"{name}/{metric}": value
            for name, (environment, samples) in by_name.items()
            if samples
            for metric, value in (await environment.metrics(samples)).items()
        }

    async def conversations(self, *groups: RolloutGroup) -> list[list[LLMMessageLogType]]:
        """The conversation of each sample of each group, to be read."""
        return [[sample.conversation for sample in group.samples] for group in groups]

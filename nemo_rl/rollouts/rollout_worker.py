"""The process that plays episodes: prompts -> finished groups in the object store.

`RolloutWorker` runs in its own actor. It tokenises prompts, plays all episodes of a group concurrently, one coroutine
each, and hands the finished group to `GroupKeeper`. The controller's side is `collector.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.rollouts.episode import EpisodeLimits, RenderFn, run_episode, without_reward
from nemo_rl.rollouts.records import StepIndex, read_groups, write_groups, write_step
from nemo_rl.types import (
    Completion,
    DatumSpec,
    EnvironmentStep,
    GenerateFn,
    GroupHandle,
    ImageSpan,
    Prompt,
    PromptImage,
    RolloutGroup,
    Sample,
    SampleStatus,
    SamplingParams,
)
from nemo_rl.utils.seeds import sample_seed


class EpisodeFailure(RuntimeError):
    """An episode has no outcome and its sample no reward: the environment raised, timed out or died."""


class KeeperLost(RuntimeError):
    """The process that holds finished groups is gone or does not answer."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt, to be played `num_generations` times."""

    group_id: str
    prompt: Prompt
    num_generations: int
    sampling: SamplingParams
    seed_step: int  # part of every sample's seed


class Environment(Protocol):
    """An environment as the rollout worker uses it."""

    @property
    def name(self) -> str: ...  # section of `env`

    async def step(self, message_log: list[dict[str, str]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        """Answer one turn of the episode `sample_id`. Raises EpisodeFailure, which names the sample, if it cannot."""
        ...

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """The environment's own metrics over finished (group id, sample) pairs."""
        ...


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Fresh completions of the prompts of finished samples, to compare training with generation."""

    group_id: str
    picks: Sequence[tuple[int, int]]  # (number of the group among those of the call, index of the sample in it)
    num_whole: int  # picks from here on begin with the first token of their prompt alone
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Fresh completions, and how samples with whole prompts bear being decoded and tokenised again."""

    handle: GroupHandle
    num_recorded_changed: int  # picked samples whose tokens change
    num_fresh_changed: int


class AgentEnvironment(Protocol):
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

    @property
    def name(self) -> str: ...  # section of `env`

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """As those of an `Environment`."""
        ...


@dataclass(kw_only=True)
class RolloutWorkerSettings:
    """Settings of a rollout worker. All of them can be pickled."""

    process: Callable[[Prompt], DatumSpec]
    decode: Callable[[Sequence[int]], str]
    survives_text: Callable[[Sequence[int]], bool]  # whether tokens stay the same when decoded and tokenised again
    render: RenderFn
    connect_environments: Callable[[], Mapping[str, Environment]]  # by task name; called inside the worker
    limits: EpisodeLimits
    run_seed: int
    connect_agents: Callable[[], Mapping[str, AgentEnvironment]] = dict  # by task name; called inside the worker
    engine_timeout_s: float = 900.0  # an engine without a sign of life for so long counts as dead


class RolloutWorker:
    """Plays many groups at a time. A plain class with async methods."""

    def __init__(self, settings: RolloutWorkerSettings, generation_workers: Sequence[Any], keeper: Any) -> None:
        self.settings = settings
        self.keeper = keeper  # handle of a GroupKeeper
        self._playing: dict[str, asyncio.Task[GroupHandle]] = {}  # by group id
        self._ended: list[RolloutGroup] = []  # not sent to the keeper yet
        self._storing: asyncio.Task[dict[str, ray.ObjectRef]] | None = None
        self.environments = settings.connect_environments()
        self.agents = settings.connect_agents()
        self.engines = Engines(settings.engine_timeout_s)
        self.engines.replace(generation_workers)
        self.busy = BusyTime()

    async def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Set the actor handles of the engine replicas, after a replica was restarted."""
        self.engines.replace(workers)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        images: Sequence[ImageSpan] = (),
        *,
        pixels: Mapping[str, ray.ObjectRef] | None = None,
    ) -> Completion:
        """Complete one prompt. Raises RequestFailed if a living engine does not answer.

        `pixels`: of each image, by digest.
        """
        shown = tuple(PromptImage(span=span, ref=(pixels or {})[span.digest]) for span in images)
        with self.busy.request():
            completion = await self.engines.generate(prompt_token_ids, sampling, seed, shown)
        self.busy.num_tokens += len(completion.token_ids)
        return completion

    async def generation_use(self) -> GenerationUse:
        """Use of the engines since the last call."""
        return self.busy.take()

    async def collect(self, request: GroupRequest) -> GroupHandle:
        """Play one group to its end and store it.

        Raises EngineDied as soon as an engine dies, while the group continues. The caller replaces the engines and
        calls again with the same request.
        """
        group_id = request.group_id
        if group_id not in self._playing:
            self._playing[group_id] = asyncio.create_task(self._play(request))
        playing, died = self._playing[group_id], asyncio.create_task(self.engines.died())
        try:
            await asyncio.wait([playing, died], return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise EngineDied(str(died.result()))
        finally:
            died.cancel()
        if self._playing.get(group_id) is playing:
            del self._playing[group_id]
        return playing.result()

    async def probe(self, request: ProbeRequest, *groups: RolloutGroup) -> Probe:
        """Complete the prompts of picked samples once more, without environments, and store the result as a group.

        EngineDied if an engine dies meanwhile.
        """
        picked = [groups[number].samples[index] for number, index in request.picks]
        refs = {digest: ray.put(made) for group in groups for digest, made in group.pixels.items()}
        playing = asyncio.gather(*(self._probe(request, sample, n, refs) for n, sample in enumerate(picked)))
        died = asyncio.create_task(self.engines.died())
        try:
            await asyncio.wait([playing, died], return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise EngineDied(str(died.result()))
        finally:
            died.cancel()
            playing.cancel()
        fresh = playing.result()
        kept = RolloutGroup(group_id=request.group_id, prompt_id="", samples=fresh)
        kept.pixels = {digest: made for group in groups for digest, made in group.pixels.items()}
        handle = await self._keep(kept, "")
        recorded, drawn = (self._num_changed(samples[: request.num_whole]) for samples in (picked, fresh))
        return Probe(handle=handle, num_recorded_changed=recorded, num_fresh_changed=drawn)

    def _num_changed(self, samples: Sequence[Sample]) -> int:
        """Samples whose sampled tokens change when they are decoded and tokenised again."""
        return sum(not self.settings.survives_text(s.token_ids[s.token_mask].tolist()) for s in samples)

    async def _probe(
        self, request: ProbeRequest, sample: Sample, number: int, pixels: Mapping[str, ray.ObjectRef]
    ) -> Sample:
        num_prompt_tokens = sample.meta.num_prompt_tokens if number < request.num_whole else 1
        prompt = sample.token_ids[:num_prompt_tokens].tolist()
        datum = DatumSpec(
            message_log=[{"role": "user", "content": "", "token_ids": prompt}],
            length=len(prompt),
            extra_env_info=None,
            loss_multiplier=1.0,
            idx=number,
            images=[span for span in sample.images if span.start < num_prompt_tokens],
        )
        return await run_episode(
            datum,
            sample_id=f"{request.group_id}/{number}",
            generate=partial(self.generate, pixels=pixels) if pixels else self.generate,
            env_step=_end,
            decode=self.settings.decode,
            render=self.settings.render,
            sampling=request.sampling,
            limits=replace(self.settings.limits, max_turns=1),
            seed_of_turn=partial(sample_seed, self.settings.run_seed, -2, request.group_id, number),
        )

    async def abandon(self) -> None:
        """Cancel all groups that are being played."""
        for task in self._playing.values():
            task.cancel()
        self._playing = {}

    async def _play(self, request: GroupRequest) -> GroupHandle:
        datum = self.settings.process(request.prompt)
        pixels = datum.pop("pixels", {})
        # The engines fetch each image of the group once, whatever the number of samples and turns.
        refs = {digest: ray.put(made) for digest, made in pixels.items()}
        play = (self._sample(request, datum, i, refs) for i in range(request.num_generations))
        samples = await asyncio.gather(*play)
        group = RolloutGroup(
            group_id=request.group_id, prompt_id=request.prompt.prompt_id, samples=samples, pixels=pixels
        )
        return await self._keep(group, request.prompt.task_name)

    async def _keep(self, group: RolloutGroup, task_name: str) -> GroupHandle:
        self._ended.append(group)
        if len(self._ended) == 1:
            self._storing = asyncio.create_task(self._store_ended())
        assert self._storing is not None
        refs = await asyncio.shield(self._storing)  # one group that is abandoned does not take the others with it
        return GroupHandle(
            group_id=group.group_id,
            prompt_id=group.prompt_id,
            task_name=task_name,
            ref=refs[group.group_id],
            samples=[sample.meta for sample in group.samples],
        )

    async def _sample(
        self, request: GroupRequest, datum: DatumSpec, index: int, pixels: Mapping[str, ray.ObjectRef]
    ) -> Sample:
        sample_id, prompt, limits = f"{request.group_id}/{index}", request.prompt, self.settings.limits
        if datum["loss_multiplier"] == 0.0 or datum["length"] >= limits.max_total_tokens:
            failure = f"prompt {prompt.prompt_id} has {datum['length']} tokens and leaves no room for an answer"
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.PROMPT_TOO_LONG, failure=failure)
        limit = None
        try:
            async with self.engines.time_limit(limits.timeout_s) as limit:
                seed_of_turn = partial(sample_seed, self.settings.run_seed, request.seed_step, prompt.prompt_id, index)
                if prompt.task_name in self.agents:
                    return await self.agents[prompt.task_name].play(
                        prompt,
                        datum,
                        sample_id=sample_id,
                        generate=self.generate,
                        sampling=request.sampling,
                        seed_of_turn=seed_of_turn,
                    )
                return await run_episode(
                    datum,
                    sample_id=sample_id,
                    generate=partial(self.generate, pixels=pixels) if pixels else self.generate,
                    env_step=partial(self.environments[prompt.task_name].step, sample_id=sample_id),
                    decode=self.settings.decode,
                    render=self.settings.render,
                    sampling=request.sampling,
                    limits=limits,
                    seed_of_turn=seed_of_turn,
                )
        except (EpisodeFailure, RequestFailed) as error:
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.FAILED, failure=str(error))
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            failure = f"episode {sample_id} was not over after {limits.timeout_s:g} s"
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.TIMED_OUT, failure=failure)

    async def _store_ended(self) -> dict[str, ray.ObjectRef]:
        """Send the groups that have ended to the keeper: their references by group id."""
        await asyncio.sleep(0)  # groups that end at the same time travel together
        groups, self._ended = self._ended, []
        limit_s = self.settings.engine_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                refs = await self.keeper.keep.remote(groups)
        except TimeoutError:
            raise KeeperLost(f"it kept nothing within {limit_s:g} s") from None
        except RayActorError as error:
            raise KeeperLost(str(error)) from error
        return {group.group_id: ref for group, ref in zip(groups, refs, strict=True)}

    async def save(self, folder: Path, task_names: Sequence[str], *groups: RolloutGroup) -> None:
        """`records.write_groups`, in a thread."""
        await asyncio.to_thread(write_groups, folder, groups, task_names)

    async def record(
        self, root: Path, index: StepIndex, keep: int | None, task_names: Sequence[str], *groups: RolloutGroup
    ) -> int:
        """`records.write_step`, in a thread."""
        return await asyncio.to_thread(write_step, root, index, groups, task_names, keep)

    async def load(self, folder: Path) -> list[GroupHandle]:
        """Read the groups of a folder and store them."""
        groups, task_names = await asyncio.to_thread(read_groups, folder)
        return [await self._keep(group, task) for group, task in zip(groups, task_names, strict=True)]

    async def environment_metrics(self, task_names: Sequence[str], *groups: RolloutGroup) -> dict[str, float]:
        """`<environment>/<metric>` over the samples of finished groups; `task_names` has one entry per group."""
        by_name: dict[str, tuple[Environment | AgentEnvironment, list[tuple[str, Sample]]]] = {}
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

    async def conversations(self, *groups: RolloutGroup) -> list[list[list[dict[str, str]]]]:
        """The messages of each sample of each group."""
        return [[sample.messages for sample in group.samples] for group in groups]


async def _end(message_log: Sequence[Mapping[str, str]], metadata: Any) -> EnvironmentStep:
    """The answer of no environment: the episode is over."""
    return EnvironmentStep(observation={}, reward=0.0, terminated=True, metadata=None, next_stop_strings=None)


@dataclass(frozen=True, kw_only=True)
class GenerationUse:
    """Use of the engines in a time window."""

    busy_s: float  # with at least one request in flight
    window_s: float
    num_tokens: int  # generated


class BusyTime:
    """Counts the seconds with at least one request in flight. `clock` returns seconds and never decreases."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = 0
        self._clock = clock
        self._in_flight = 0
        self._busy_s = 0.0
        self._window_began = self._counted_to = clock()

    def _count(self) -> None:
        now = self._clock()
        if self._in_flight:
            self._busy_s += now - self._counted_to
        self._counted_to = now

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is in flight while the body runs."""
        self._count()
        self._in_flight += 1
        try:
            yield
        finally:
            self._count()
            self._in_flight -= 1

    def take(self) -> GenerationUse:
        """The use since the last call, or since construction."""
        self._count()
        window_s = self._counted_to - self._window_began
        use = GenerationUse(busy_s=self._busy_s, window_s=window_s, num_tokens=self.num_tokens)
        self._busy_s, self.num_tokens, self._window_began = 0.0, 0, self._counted_to
        return use

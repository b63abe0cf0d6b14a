"""Prompts -> finished groups in the object store.

`RolloutWorker` runs in an actor of its own: it tokenises, plays all episodes of a group at once, one coroutine each,
and puts the finished group into the object store. `RolloutCollector` is the controller's side: it sends prompts out and
gets handles back. Tokens never reach it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ray

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import TENANT as GENERATION
from nemo_rl.rollouts.engine_client import EngineClient, RequestFailed
from nemo_rl.rollouts.episode import EpisodeLimits, RenderFn, StepResult, run_episode, without_reward
from nemo_rl.types import Completion, DatumSpec, GroupHandle, Prompt, RolloutGroup, Sample, SampleStatus, SamplingParams
from nemo_rl.utils.seeds import sample_seed

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.collector.RolloutWorker"
NAME_PREFIX = "rollout"
MAX_RESTARTS = 3  # in one batch of groups


class EpisodeFailure(RuntimeError):
    """An episode has no outcome and its sample no reward: the environment raised, timed out or died."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt to be played `num_generations` times."""

    group_id: str
    prompt: Prompt
    num_generations: int
    sampling: SamplingParams
    seed_step: int  # enters every sample's seed


class Environment(Protocol):
    """An environment as the rollout worker uses it."""

    @property
    def name(self) -> str:
        """Section of `env`."""
        ...

    async def step(self, message_log: list[dict[str, str]], metadata: Any) -> StepResult:
        """Answer one turn. Raises EpisodeFailure when it cannot."""
        ...

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """The environment's own metrics over finished (group id, sample) pairs."""
        ...


@dataclass(kw_only=True)
class RolloutWorkerSettings:
    """What a rollout worker is built from; everything in it pickles."""

    process: Callable[[Prompt], DatumSpec]
    decode: Callable[[Sequence[int]], str]
    render: RenderFn
    connect_environments: Callable[[], Mapping[str, Environment]]  # by task name; called inside the worker
    limits: EpisodeLimits
    run_seed: int


class RolloutWorker:
    """Plays groups. A plain class with async methods; many groups at a time in one process."""

    def __init__(self, settings: RolloutWorkerSettings, generation_workers: Sequence[Any]) -> None:
        self.settings = settings
        self.environments = settings.connect_environments()
        self.engines: list[EngineClient] = []
        self.set_generation_workers(generation_workers)

    def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Actor handles of the engine replicas; called again after one was restarted."""
        for engine in self.engines:
            engine.close()
        self.engines = [EngineClient(number, worker) for number, worker in enumerate(workers)]

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        """The least loaded replica answers; which one it is does not change the tokens."""
        engine = min(self.engines, key=lambda engine: engine.in_flight)
        try:
            return await engine.generate(prompt_token_ids, sampling, seed)
        except RequestFailed as failure:
            raise EpisodeFailure(str(failure)) from failure

    async def collect(self, request: GroupRequest) -> GroupHandle:
        """Play one group to its end and put it into the object store."""
        datum = self.settings.process(request.prompt)
        samples = await asyncio.gather(*(self._sample(request, datum, i) for i in range(request.num_generations)))
        group = RolloutGroup(group_id=request.group_id, prompt_id=request.prompt.prompt_id, samples=samples)
        return GroupHandle(
            group_id=request.group_id,
            prompt_id=request.prompt.prompt_id,
            task_name=request.prompt.task_name,
            ref=ray.put(group),
            samples=[sample.meta for sample in samples],
        )

    async def _sample(self, request: GroupRequest, datum: DatumSpec, index: int) -> Sample:
        sample_id = f"{request.group_id}/{index}"
        if datum["loss_multiplier"] == 0.0 or datum["length"] >= self.settings.limits.max_total_tokens:
            failure = f"prompt {request.prompt.prompt_id} has {datum['length']} tokens and leaves no room for an answer"
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.PROMPT_TOO_LONG, failure=failure)
        try:
            return await run_episode(
                datum,
                sample_id=sample_id,
                generate=self.generate,
                env_step=self.environments[request.prompt.task_name].step,
                decode=self.settings.decode,
                render=self.settings.render,
                sampling=request.sampling,
                limits=self.settings.limits,
                seed_of_turn=lambda turn: sample_seed(
                    self.settings.run_seed, request.seed_step, request.prompt.prompt_id, index, turn
                ),
            )
        except EpisodeFailure as error:
            return without_reward(datum, sample_id=sample_id, status=SampleStatus.FAILED, failure=str(error))

    async def environment_metrics(self, task_names: Sequence[str], *groups: RolloutGroup) -> dict[str, float]:
        """`<environment>/<metric>` over the samples of finished groups; `task_names` has one entry per group."""
        by_name: dict[str, tuple[Environment, list[tuple[str, Sample]]]] = {}
        for task_name, group in zip(task_names, groups, strict=True):
            environment = self.environments[task_name]
            _, samples = by_name.setdefault(environment.name, (environment, []))
            samples += [(group.group_id, sample) for sample in group.samples if sample.meta.has_reward]
        metrics = {}
        for name, (environment, samples) in by_name.items():
            if samples:
                found = await environment.metrics(samples)
                metrics.update({f"{name}/{metric}": value for metric, value in found.items()})
        return metrics

    async def messages(self, group: RolloutGroup, index: int) -> list[dict[str, str]]:
        """What was said in one sample, for people."""
        return group.samples[index].messages

    async def conversations(self, *groups: RolloutGroup) -> list[list[list[dict[str, str]]]]:
        """What was said in each sample of each group."""
        return [[sample.messages for sample in group.samples] for group in groups]


class RolloutCollector:
    """The controller's side: requests out, handles back.

    An engine that dies while groups are played is restarted by `restart_generation`, which returns the new actor
    handles once they hold the policy's weights; then the groups are played again, with the same seeds and so the same
    tokens.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        settings: RolloutWorkerSettings,
        generation_workers: Sequence[Any],
        accelerator: Accelerator,
        *,
        timeout_s: float,
    ) -> None:
        self._start = partial(
            RayWorkerGroup,
            cluster,
            name_prefix=NAME_PREFIX,
            num_workers=1,
            timeout_s=timeout_s,
        )
        self._accelerator = accelerator
        self._settings = settings
        self._bytes_of_ended = 0
        self.group = self._start(RayWorkerBuilder(WORKER, settings, generation_workers))
        self._generation_workers = list(generation_workers)
        self.restart_generation: Callable[[], Sequence[Any]] | None = None

    @property
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""
        return self._bytes_of_ended + self.group.controller_tensor_bytes

    def use_generation(self, workers: Sequence[Any]) -> None:
        """Send requests to these engines from now on."""
        self._generation_workers = list(workers)
        self.group.call_one(0, "set_generation_workers", self._generation_workers)

    def collect(self, requests: Sequence[GroupRequest]) -> list[GroupHandle]:
        """Play all requests at once; handles in the order of the requests."""
        for _ in range(MAX_RESTARTS):
            try:
                return self._collect(requests)
            except WorkerError as error:
                self._recover(error, len(requests))
        return self._collect(requests)

    def stream(self, requests: Iterable[GroupRequest], max_in_flight: int) -> Iterator[list[GroupHandle]]:
        """Play the requests, at most `max_in_flight` of them at a time; what is finished comes as soon as it is."""
        waiting = iter(requests)
        again: list[GroupRequest] = []  # those under way when a worker died
        playing: dict[ray.ObjectRef, GroupRequest] = {}
        num_restarts = 0  # since a group was last finished
        with self._accelerator.hold(GENERATION):
            while True:
                for request in itertools.islice(
                    itertools.chain(_emptied(again), waiting), max_in_flight - len(playing)
                ):
                    playing[self.group.start_one(0, "collect", request)] = request
                if not playing:
                    return
                try:
                    finished = self.group.wait_some(list(playing))
                except WorkerError as error:
                    if num_restarts == MAX_RESTARTS:
                        raise
                    num_restarts += 1
                    self._recover(error, len(playing))
                    again, playing = [*playing.values(), *again], {}
                    continue
                num_restarts = 0
                for ref in finished:
                    del playing[ref]
                yield list(finished.values())

    def _recover(self, error: WorkerError, num_groups: int) -> None:
        """Start again what died, so that groups can be played again; raise what that does not help against."""
        if isinstance(error, WorkerDied):
            if not error.worker.startswith(NAME_PREFIX):
                raise error
            logger.warning("%s; it is started again and %d groups replayed", first_line(error), num_groups)
            self._restart()
            return
        if not error.engine_died or self.restart_generation is None:
            raise error
        logger.warning("%s; the engine is started again, %d groups replayed", first_line(error), num_groups)
        self.use_generation(self.restart_generation())

    def _collect(self, requests: Sequence[GroupRequest]) -> list[GroupHandle]:
        with self._accelerator.hold(GENERATION):
            return self.group.wait([self.group.start_one(0, "collect", request) for request in requests])

    def _restart(self) -> None:
        self._bytes_of_ended += self.group.controller_tensor_bytes
        self.group.shutdown()
        self.group = self._start(RayWorkerBuilder(WORKER, self._settings, self._generation_workers))

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> dict[str, float]:
        """What the environments themselves report of finished groups, as `<environment>/<metric>`."""
        names = [group.task_name for group in groups]
        return self.group.call_one(0, "environment_metrics", names, *(group.ref for group in groups))

    def messages(self, group: GroupHandle, index: int = 0) -> list[dict[str, str]]:
        """What was said in one sample of a finished group. The text alone comes back."""
        return self.group.call_one(0, "messages", group.ref, index)

    def conversations(self, groups: Sequence[GroupHandle]) -> list[list[list[dict[str, str]]]]:
        """What was said in each sample of each group, in one call. The text alone comes back."""
        return self.group.call_one(0, "conversations", *(group.ref for group in groups))

    def shutdown(self) -> None:
        """End the worker."""
        self.group.shutdown()


def _emptied(requests: list[GroupRequest]) -> Iterator[GroupRequest]:
    while requests:
        yield requests.pop(0)

"""Fresh completions of the prompts of finished samples, to compare training with generation."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.episode import run_episode
from nemo_rl.rollouts.rollout_worker import RolloutWorker
from nemo_rl.types import (
    DatumSpec,
    EnvironmentStep,
    GroupHandle,
    RenderedObservation,
    RolloutGroup,
    Sample,
    SamplingParams,
)
from nemo_rl.utils.seeds import sample_seed


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Fresh completions of the prompts of finished samples, to compare training with generation."""

    group_id: str
    picks: Sequence[tuple[int, int]]  # (number of the group in the call, index of the sample in it)
    num_whole: int  # picks from here on begin with the first token of their prompt alone
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Fresh completions, and how samples with whole prompts bear being decoded and tokenised again."""

    handle: GroupHandle
    num_recorded_changed: int  # picked samples whose tokens change
    num_fresh_changed: int


def draw_probe(rollouts: RolloutCollector, request: ProbeRequest, groups: Sequence[GroupHandle]) -> Probe:
    """`probe` on the rollout worker, with the engines awake."""
    found = rollouts.inspect(probe, request, groups=groups)
    rollouts.track(found.handle)
    return found


async def probe(worker: RolloutWorker, request: ProbeRequest, *groups: RolloutGroup) -> Probe:
    """Complete the prompts of picked samples once more, without environments, and store the result as a group.

    EngineDied if an engine dies meanwhile.
    """
    picked = [groups[number].samples[index] for number, index in request.picks]
    refs = {digest: ray.put(made) for group in groups for digest, made in group.pixels.items()}
    playing = asyncio.gather(*(_complete(worker, request, sample, n, refs) for n, sample in enumerate(picked)))
    try:
        await worker.engines.wait(playing)
        fresh = playing.result()
    finally:
        playing.cancel()
    kept = RolloutGroup(group_id=request.group_id, prompt_id="", samples=fresh)
    kept.pixels = {digest: made for group in groups for digest, made in group.pixels.items()}
    handle = await worker.keep(kept, "")
    recorded, drawn = (
        sum(not worker.settings.survives_text(s.token_ids[s.token_mask].tolist()) for s in samples[: request.num_whole])
        for samples in (picked, fresh)
    )
    return Probe(handle=handle, num_recorded_changed=recorded, num_fresh_changed=drawn)


async def _complete(
    worker: RolloutWorker, request: ProbeRequest, sample: Sample, number: int, pixels: Mapping[str, ray.ObjectRef]
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
        generate=partial(worker.generate, pixels),
        env_step=_end,
        decode=worker.settings.decode,
        render=_no_observation,
        sampling=request.sampling,
        limits=replace(worker.settings.limits, max_turns=1),
        seed_of_turn=partial(sample_seed, worker.settings.run_seed, -2, request.group_id, number),
    )


async def _no_observation(observation: dict[str, Any], **_: Any) -> RenderedObservation:
    raise AssertionError("an episode of one turn has no observation")


async def _end(message_log: Sequence[Mapping[str, str]], metadata: Any) -> EnvironmentStep:
    """The answer of no environment: the episode is over."""
    return EnvironmentStep(observation={}, reward=0.0, terminated=True, metadata=None)

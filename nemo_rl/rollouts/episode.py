"""One episode: generate <-> environment until a terminal status.

    DatumSpec -> [generate -> append tokens -> environment step -> append observation] * turns -> Sample

Token-in, token-out: the tokens trained on are the tokens sampled, text is only ever derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from nemo_rl.types import (
    Completion,
    DatumSpec,
    GenerateFn,
    Message,
    Sample,
    SampleMeta,
    SampleStatus,
    SamplingParams,
    StopReason,
)


class StepResult(Protocol):
    """What one environment step says about one sample."""

    @property
    def observation(self) -> dict[str, str]: ...
    @property
    def reward(self) -> float: ...
    @property
    def terminated(self) -> bool: ...
    @property
    def metadata(self) -> Any: ...
    @property
    def next_stop_strings(self) -> Sequence[str] | None: ...
    @property
    def answer(self) -> str | None: ...


class EnvStepFn(Protocol):
    """The environment as an episode sees it."""

    async def __call__(self, message_log: list[dict[str, str]], metadata: Any) -> StepResult: ...


class RenderFn(Protocol):
    """Token ids that carry an observation from the end of a model turn to the start of the next."""

    def __call__(self, observation: dict[str, str]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """When an episode ends at the latest."""

    max_turns: int
    max_total_tokens: int


@dataclass
class _Transcript:
    """The growing episode: parallel lists over tokens, and the messages people read."""

    token_ids: list[int]
    messages: list[dict[str, str]]
    token_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_mask = [False] * len(self.token_ids)
        self.logprobs = [0.0] * len(self.token_ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, message: dict[str, str]) -> None:
        self.token_ids.extend(token_ids)
        self.token_mask.extend([logprobs is not None] * len(token_ids))
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(token_ids))
        self.messages.append(message)


def prompt_tokens(message_log: Sequence[Message]) -> list[int]:
    """All token ids of a tokenised message log, in order."""
    return [int(token) for message in message_log for token in message["token_ids"]]


async def run_episode(
    datum: DatumSpec,
    *,
    sample_id: str,
    generate: GenerateFn,
    env_step: EnvStepFn,
    decode: Callable[[Sequence[int]], str],
    render: RenderFn,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    seed_of_turn: Callable[[int], int],
) -> Sample:
    """Play one episode to its end. Exceptions of `generate` and `env_step` pass through: the caller decides.

    A turn that hits its token limit still goes to the environment (it may have answered already), then the sample is
    TRUNCATED. An episode that reaches `max_turns` or `max_total_tokens` without the environment ending it is TRUNCATED.
    The answer of the sample is the one that the environment found in its last turn.
    """
    transcript = _Transcript(
        prompt_tokens(datum["message_log"]),
        [{"role": message["role"], "content": message["content"]} for message in datum["message_log"]],
    )
    num_prompt_tokens = len(transcript.token_ids)
    if stop_strings := datum.get("stop_strings"):
        sampling = replace(sampling, stop_strings=tuple(stop_strings))
    metadata, reward, weight_version, turn = datum["extra_env_info"], 0.0, -1, 0
    answer: str | None = None
    status = SampleStatus.TRUNCATED
    while turn < limits.max_turns and len(transcript.token_ids) < limits.max_total_tokens:
        room = limits.max_total_tokens - len(transcript.token_ids)
        params = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        completion: Completion = await generate(transcript.token_ids, params, seed_of_turn(turn))
        if turn == 0:
            weight_version = completion.weight_version
        turn += 1
        text = decode(completion.token_ids)
        transcript.append(completion.token_ids, completion.logprobs, {"role": "assistant", "content": text})
        step = await env_step(transcript.messages, metadata)
        reward += step.reward
        metadata, answer = step.metadata, step.answer
        if completion.stop_reason is StopReason.LENGTH:
            break
        if step.terminated:
            status = SampleStatus.COMPLETED
            break
        if turn < limits.max_turns:
            observed = render(step.observation)[: limits.max_total_tokens - len(transcript.token_ids)]
            transcript.append(observed, None, step.observation)
            sampling = replace(sampling, stop_strings=tuple(step.next_stop_strings or sampling.stop_strings))
    meta = SampleMeta(
        sample_id=sample_id,
        status=status,
        length=len(transcript.token_ids),
        num_prompt_tokens=num_prompt_tokens,
        num_generated_tokens=sum(transcript.token_mask),
        num_turns=turn,
        reward=reward,
        weight_version=weight_version,
        answer=answer,
    )
    return _sample(meta, transcript)


def without_reward(datum: DatumSpec, *, sample_id: str, status: SampleStatus, failure: str) -> Sample:
    """The sample of an episode that has no outcome: its prompt alone, no reward, nothing to learn from."""
    transcript = _Transcript(prompt_tokens(datum["message_log"]), [])
    meta = SampleMeta(
        sample_id=sample_id,
        status=status,
        length=len(transcript.token_ids),
        num_prompt_tokens=len(transcript.token_ids),
        num_generated_tokens=0,
        num_turns=0,
        reward=0.0,
        weight_version=-1,
        failure=failure,
    )
    return _sample(meta, transcript)


def _sample(meta: SampleMeta, transcript: _Transcript) -> Sample:
    return Sample(
        meta=meta,
        token_ids=np.asarray(transcript.token_ids, dtype=np.int64),
        token_mask=np.asarray(transcript.token_mask, dtype=bool),
        generation_logprobs=np.asarray(transcript.logprobs, dtype=np.float32),
        messages=transcript.messages,
    )

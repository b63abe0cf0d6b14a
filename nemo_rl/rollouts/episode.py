"""One episode: generate <-> environment until a terminal status.

    DatumSpec -> [generate -> append tokens -> environment step -> append observation] * turns -> Sample

Token-in, token-out: the tokens trained on are the tokens sampled, text is only ever derived from them. Each prompt that
the engine is asked to go on from is the one before, what it sampled, and the tokens of the observation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
    TurnMeta,
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
    @property
    def metrics(self) -> Mapping[str, float]: ...


class EnvStepFn(Protocol):
    """The environment as an episode sees it."""

    async def __call__(self, message_log: list[dict[str, str]], metadata: Any) -> StepResult: ...


class RenderFn(Protocol):
    """Token ids that lead from the end of the sampled turn to the start of the next, with the observation in between.

    They end the sampled turn where it does not end itself, as when a stop string ended it.
    """

    def __call__(self, observation: dict[str, str], *, sampled: Sequence[int]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """When an episode ends at the latest."""

    max_turns: int
    max_total_tokens: int  # prompt, sampled tokens and observations
    timeout_s: float | None = None  # wall-clock; kept by whoever plays the episode


@dataclass
class _Transcript:
    """The growing episode: parallel lists over tokens, and the messages people read."""

    token_ids: list[int]
    messages: list[dict[str, str]]
    token_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed_experts: list[np.ndarray] = field(default_factory=list)  # of the first tokens, one piece per turn

    def __post_init__(self) -> None:
        self.token_mask = [False] * len(self.token_ids)
        self.logprobs = [0.0] * len(self.token_ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, message: dict[str, str]) -> None:
        self.token_ids.extend(token_ids)
        self.token_mask.extend([logprobs is not None] * len(token_ids))
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(token_ids))
        self.messages.append(message)

    def add_experts(self, experts: np.ndarray | None) -> None:
        """Keep what the engine says of the experts of all tokens but the last: those that are not known yet."""
        known = sum(len(piece) for piece in self.routed_experts)
        if experts is not None:
            assert len(experts) < len(self.token_ids)
            self.routed_experts.append(experts[known:])


def prompt_tokens(message_log: Sequence[Message]) -> list[int]:
    """All token ids of a tokenised message log, in order."""
    return [token for message in message_log for token in np.asarray(message["token_ids"]).tolist()]


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
    TRUNCATED. So is an episode that reaches `max_turns` or `max_total_tokens` without the environment ending it; an
    observation after which no token could be sampled is left away. Stop strings are those of the environment's last
    word on them, before that those of the datum, before that those of `sampling`; an empty list means none, None
    changes nothing. The answer and the metrics of the sample are those of its last turn.
    """
    transcript = _Transcript(
        prompt_tokens(datum["message_log"]),
        [{"role": message["role"], "content": message["content"]} for message in datum["message_log"]],
    )
    num_prompt_tokens = len(transcript.token_ids)
    sampling = _with_stop_strings(sampling, datum.get("stop_strings"))
    metadata, turns, status = datum["extra_env_info"], list[TurnMeta](), SampleStatus.TRUNCATED
    answer: str | None = None
    metrics: dict[str, float] = {}
    is_out_of_room = hit_turn_limit = False
    assert num_prompt_tokens < limits.max_total_tokens
    while len(turns) < limits.max_turns:
        room = limits.max_total_tokens - len(transcript.token_ids)
        params = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        begin = time.perf_counter()
        completion: Completion = await generate(transcript.token_ids, params, seed_of_turn(len(turns)))
        generated = time.perf_counter()
        text = decode(completion.token_ids)
        transcript.append(completion.token_ids, completion.logprobs, {"role": "assistant", "content": text})
        transcript.add_experts(completion.routed_experts)
        step = await env_step(transcript.messages, metadata)
        turn = _turn(completion, step.reward, begin, generated)
        turns.append(turn)
        metadata, answer, metrics = step.metadata, step.answer, dict(step.metrics)
        if completion.stop_reason is StopReason.LENGTH:
            is_out_of_room = len(transcript.token_ids) >= limits.max_total_tokens
            break
        if step.terminated:
            status = SampleStatus.COMPLETED
            break
        if len(turns) < limits.max_turns:
            observed = render(step.observation, sampled=completion.token_ids)
            if len(transcript.token_ids) + len(observed) >= limits.max_total_tokens:
                is_out_of_room = True
                break
            transcript.append(observed, None, step.observation)
            turns[-1] = replace(turn, num_env_tokens=len(observed))
            sampling = _with_stop_strings(sampling, step.next_stop_strings)
    else:
        hit_turn_limit = True
    experts = np.concatenate(transcript.routed_experts) if transcript.routed_experts else None
    meta = SampleMeta(
        sample_id=sample_id,
        status=status,
        length=len(transcript.token_ids),
        num_prompt_tokens=num_prompt_tokens,
        num_generated_tokens=sum(turn.num_generated_tokens for turn in turns),
        num_turns=len(turns),
        reward=sum(turn.reward for turn in turns),
        weight_version=turns[0].weight_version,
        answer=answer,
        turns=turns,
        hit_turn_limit=hit_turn_limit,
        hit_total_token_limit=is_out_of_room,
        routed_experts_bytes=experts.nbytes if experts is not None else 0,
    )
    return _sample(meta, transcript, experts, metrics)


def _with_stop_strings(sampling: SamplingParams, stop_strings: Sequence[str] | None) -> SamplingParams:
    return sampling if stop_strings is None else replace(sampling, stop_strings=tuple(stop_strings))


def _turn(completion: Completion, reward: float, begin: float, generated: float) -> TurnMeta:
    """A turn whose environment has just answered; `begin` and `generated` are `time.perf_counter` before that."""
    return TurnMeta(
        num_generated_tokens=len(completion.token_ids),
        num_env_tokens=0,
        reward=reward,
        stop_reason=completion.stop_reason,
        weight_version=completion.weight_version,
        generation_s=generated - begin,
        env_s=time.perf_counter() - generated,
    )


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


def _sample(
    meta: SampleMeta,
    transcript: _Transcript,
    experts: np.ndarray | None = None,
    metrics: dict[str, float] | None = None,
) -> Sample:
    return Sample(
        meta=meta,
        token_ids=np.asarray(transcript.token_ids, dtype=np.int64),
        token_mask=np.asarray(transcript.token_mask, dtype=bool),
        generation_logprobs=np.asarray(transcript.logprobs, dtype=np.float32),
        messages=transcript.messages,
        metrics=metrics or {},
        routed_experts=experts,
    )

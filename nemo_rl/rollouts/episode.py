"""One episode: turns of generation and environment until a terminal status.

    DatumSpec -> [generate -> append tokens -> environment step -> append observation] * turns -> Sample

Token-in, token-out: training uses the sampled tokens themselves, and text is only derived from them. The prompt of each
turn is the previous prompt, the sampled tokens, and the tokens of the observation.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from nemo_rl.types import (
    Completion,
    DatumSpec,
    EnvironmentStep,
    GenerateFn,
    GenerationRequest,
    ImageSpan,
    Message,
    RenderedObservation,
    Sample,
    SampleMeta,
    SampleStatus,
    SamplingParams,
    StopReason,
    TurnMeta,
)

MAX_PERIOD = 256  # tokens that a loop repeats

EnvStepFn = Callable[[list[Message], Any], Awaitable[EnvironmentStep]]
"""One environment step: messages and metadata -> result."""


class RenderFn(Protocol):
    """Renders the observation between two sampled turns. `num_images`: of the episode so far.

    The tokens also end the sampled turn if it does not end itself, as after a stop string; but for an environment with
    `raw_text` they are only the observation.
    """

    async def __call__(
        self, observation: dict[str, Any], *, sampled: Sequence[int], num_images: int
    ) -> RenderedObservation: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits that end an episode."""

    max_turns: int
    max_total_tokens: int  # prompt, sampled tokens and observations
    image_token_id: int | None = None  # stands for images; where the model samples it, it is text and carries no loss
    timeout_s: float | None = None  # wall-clock time; enforced by the caller of `run_episode`


@dataclass
class _Transcript:
    """The growing episode: parallel lists over tokens, and the messages as text."""

    token_ids: list[int]
    messages: list[Message]
    token_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    routed_experts: list[np.ndarray] = field(default_factory=list)  # one piece per turn

    def __post_init__(self) -> None:
        self.token_mask = [False] * len(self.token_ids)
        self.logprobs = [0.0] * len(self.token_ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, message: Message) -> None:
        """Append a message. Only sampled tokens have logprobs."""
        self.token_ids.extend(token_ids)
        self.token_mask.extend([logprobs is not None] * len(token_ids))
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(token_ids))
        self.messages.append(message)

    def request(self, sampling: SamplingParams, room: int, seed: int) -> GenerationRequest:
        """The request for the next turn, of at most `room` tokens."""
        return GenerationRequest(
            prompt_token_ids=list(self.token_ids),
            sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
            seed=seed,
            images=tuple(self.images),
        )

    def observe(self, seen: RenderedObservation, role: str, max_total_tokens: int) -> int:
        """Append an observation, cut where the episode has `max_total_tokens`. Returns the number of its tokens."""
        token_ids = seen.token_ids[: max_total_tokens - len(self.token_ids)]
        self.images += [replace(image, start=len(self.token_ids) + image.start) for image in seen.images]
        self.append(token_ids, None, {"role": role, "content": seen.text})
        return len(token_ids)

    def mask_sampled(self, token_id: int, among: int) -> int:
        """Take the loss from `token_id` where it is one of the last `among` tokens. Returns how often."""
        places = [i for i in range(len(self.token_ids) - among, len(self.token_ids)) if self.token_ids[i] == token_id]
        for place in places:
            self.token_mask[place], self.logprobs[place] = False, 0.0
        return len(places)

    def add_experts(self, experts: np.ndarray) -> None:
        """Add the experts of new tokens. The engine returns the experts of all tokens but the last."""
        assert len(experts) < len(self.token_ids)
        self.routed_experts.append(experts[sum(len(piece) for piece in self.routed_experts) :])

    def sample(self, meta: SampleMeta, metrics: Mapping[str, float]) -> Sample:
        return Sample(
            meta=meta,
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            token_mask=np.asarray(self.token_mask, dtype=bool),
            generation_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            messages=self.messages,
            metrics=dict(metrics),
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts else None,
            images=self.images,
        )


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
    raw_text: bool = False,
) -> Sample:
    """Play one episode to its end. Exceptions of `generate`, `env_step` and `render` propagate to the caller.

    A turn that reaches its token limit still goes to the environment, as it may contain the answer; then the sample is
    TRUNCATED. An episode that reaches `max_turns` or `max_total_tokens` without termination is TRUNCATED too. An
    observation after which no token could be sampled is dropped, or cut with `raw_text`.

    The environment's latest `next_stop_strings` take precedence over the `stop_strings` of the datum, and these over
    `sampling`. An empty list means no stop strings; None changes nothing. Metadata that are None keep those of the turn
    before. The sample's answer and metrics are the environment's of the last turn.

    Messages of the prompt are plain: without what the chat template adds. `raw_text`: they are as it renders them.
    """
    transcript = _beginning(datum, raw_text)
    num_prompt_tokens = len(transcript.token_ids)
    sampling = _with_stop_strings(sampling, datum.get("stop_strings"))
    metadata, turns, status = datum["extra_env_info"], list[TurnMeta](), SampleStatus.TRUNCATED
    answer: str | None = None
    metrics: Mapping[str, float] = {}
    parts: list[float] = []
    hit_total_token_limit = hit_turn_limit = False
    num_image_tokens = 0
    assert num_prompt_tokens < limits.max_total_tokens
    while len(turns) < limits.max_turns and not hit_total_token_limit:
        room = limits.max_total_tokens - len(transcript.token_ids)
        request = transcript.request(sampling, room, seed_of_turn(len(turns)))
        started = time.perf_counter()
        completion = await generate(request)
        generated = time.perf_counter()
        text = decode(completion.token_ids)
        said: Message = {"role": "assistant", "content": text, "sampled": True}
        transcript.append(completion.token_ids, completion.logprobs, said)
        if limits.image_token_id is not None:  # training would look for the image of a sampled image token
            num_image_tokens += transcript.mask_sampled(limits.image_token_id, len(completion.token_ids))
        if completion.routed_experts is not None:
            transcript.add_experts(completion.routed_experts)
        step = await env_step(transcript.messages, metadata)
        turn = _turn(completion, step, generated - started, time.perf_counter() - generated)
        turns.append(turn)
        # An environment may name further rewards in a later turn.
        parts = [sum(pair) for pair in zip_longest(parts, step.reward_parts, fillvalue=0.0)]
        metadata = metadata if step.metadata is None else step.metadata
        answer, metrics = step.answer, step.metrics
        if completion.stop_reason is StopReason.LENGTH:  # judged, but its turn has no end mark to go on from
            hit_total_token_limit = len(transcript.token_ids) >= limits.max_total_tokens
            break
        if step.terminated:
            status = SampleStatus.COMPLETED
            break
        if len(turns) < limits.max_turns:
            seen = await render(step.observation, sampled=completion.token_ids, num_images=len(transcript.images))
            hit_total_token_limit = len(transcript.token_ids) + len(seen.token_ids) >= limits.max_total_tokens
            # Without room for a token of the policy after it, an observation would teach nothing.
            if hit_total_token_limit and (not raw_text or seen.images):
                break
            num_seen = transcript.observe(seen, step.observation["role"], limits.max_total_tokens)
            turns[-1] = replace(turn, num_env_tokens=num_seen)
            sampling = _with_stop_strings(sampling, step.next_stop_strings)
    else:
        hit_turn_limit = not hit_total_token_limit
    return transcript.sample(
        SampleMeta(
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
            hit_total_token_limit=hit_total_token_limit,
            routed_experts_bytes=sum(piece.nbytes for piece in transcript.routed_experts),
            reward_parts=parts,
            images={image.digest: image.num_pixels for image in transcript.images},
            num_sampled_image_tokens=num_image_tokens,
        ),
        metrics,
    )


def _turn(completion: Completion, step: EnvironmentStep, generation_s: float, env_s: float) -> TurnMeta:
    return TurnMeta(
        num_generated_tokens=len(completion.token_ids),
        num_env_tokens=0,
        reward=step.reward,
        stop_reason=completion.stop_reason,
        weight_version=completion.weight_version,
        generation_s=generation_s,
        env_s=env_s,
        ends_in_loop=ends_in_loop(completion.token_ids),
    )


def _beginning(datum: DatumSpec, raw_text: bool) -> _Transcript:
    """The prompt. A processor of one's own may give only the rendered text of its messages."""
    log = datum["message_log"]
    texts = [message["content"] if raw_text else message.get("plain", message["content"]) for message in log]
    messages: list[Message] = [{"role": said["role"], "content": text} for said, text in zip(log, texts, strict=True)]
    return _Transcript(prompt_tokens(log), messages, images=list(datum.get("images", ())))


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Whether a completion ends in the same 1 to `MAX_PERIOD` tokens again and again: four times, 32 tokens at least.

    A last token that ends the completion may follow the loop.
    """
    for end in (len(token_ids), len(token_ids) - 1):
        for period in range(1, min(MAX_PERIOD, end // 4) + 1):
            start = end - max(32, 4 * period)
            if start < 0 or token_ids[end - 1] != token_ids[end - 1 - period]:
                continue
            if list(token_ids[start + period : end]) == list(token_ids[start : end - period]):
                return True
    return False


def _with_stop_strings(sampling: SamplingParams, stop_strings: Sequence[str] | None) -> SamplingParams:
    return sampling if stop_strings is None else replace(sampling, stop_strings=tuple(stop_strings))


def without_reward(datum: DatumSpec, *, sample_id: str, status: SampleStatus, failure: str) -> Sample:
    """The sample of an episode without an outcome: only the prompt, no reward, nothing to train on."""
    transcript = _Transcript(prompt_tokens(datum["message_log"]), [])
    return transcript.sample(
        SampleMeta(
            sample_id=sample_id,
            status=status,
            length=len(transcript.token_ids),
            num_prompt_tokens=len(transcript.token_ids),
            num_generated_tokens=0,
            num_turns=0,
            reward=0.0,
            weight_version=-1,
            failure=failure,
        ),
        metrics={},
    )

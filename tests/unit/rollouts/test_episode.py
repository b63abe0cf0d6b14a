"""One episode against a scripted engine and a scripted environment."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.rollouts.episode import EpisodeLimits, RenderFn, ends_in_loop, run_episode
from nemo_rl.types import (
    Completion,
    DatumSpec,
    EnvironmentStep,
    GenerateFn,
    RenderedObservation,
    Sample,
    SampleStatus,
    SamplingParams,
    StopReason,
)


@dataclass
class FakeEngine:
    """Answers turn t with `turns[t]`; notes what it was asked."""

    turns: list[tuple[list[int], StopReason]]
    asked: list[tuple[list[int], SamplingParams, int]] = field(default_factory=list)

    async def __call__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        tokens, reason = self.turns[len(self.asked)]
        tokens = tokens[: sampling.max_new_tokens]
        self.asked.append((list(prompt_token_ids), sampling, seed))
        logprobs = [-0.1 * token for token in tokens]
        return Completion(token_ids=tokens, logprobs=logprobs, stop_reason=reason, weight_version=3 + len(self.asked))


def outcome(
    reward: float, terminated: bool, metadata: Any = None, next_stop_strings: Sequence[str] | None = None, **more: Any
) -> EnvironmentStep:
    return EnvironmentStep(
        observation={"role": "environment", "content": "go on"},
        reward=reward,
        terminated=terminated,
        metadata=metadata,
        next_stop_strings=next_stop_strings,
        **more,
    )


@dataclass
class FakeEnvironment:
    outcomes: list[EnvironmentStep]
    seen: list[tuple[list[dict[str, str]], Any]] = field(default_factory=list)

    async def __call__(self, message_log: list[dict[str, str]], metadata: Any) -> EnvironmentStep:
        self.seen.append(([dict(message) for message in message_log], metadata))
        return self.outcomes[len(self.seen) - 1]


def shown_as(*token_ids: int) -> RenderFn:
    async def render(observation: dict[str, Any], **_: Any) -> RenderedObservation:
        return RenderedObservation(list(token_ids), [], observation["content"])

    return render


def play(
    engine: GenerateFn,
    env: FakeEnvironment,
    *,
    max_turns: int = 5,
    max_total: int = 100,
    max_new_tokens: int = 8,
    stop_strings: list[str] | None = None,
    image_token_id: int | None = None,
) -> Sample:
    datum: DatumSpec = {
        "message_log": [
            {"role": "system", "content": "s", "token_ids": [1, 2]},
            {"role": "user", "content": "u", "token_ids": [3]},
        ],
        "length": 3,
        "extra_env_info": {"ground_truth": "4"},
        "loss_multiplier": 1.0,
        "idx": 0,
        "stop_strings": stop_strings,
    }
    return asyncio.run(
        run_episode(
            datum,
            sample_id="g/0",
            generate=engine,
            env_step=env,
            decode=lambda ids: " ".join(map(str, ids)),
            render=shown_as(90, 91),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, stop_strings=("end",)),
            limits=EpisodeLimits(max_turns=max_turns, max_total_tokens=max_total, image_token_id=image_token_id),
            seed_of_turn=lambda turn: 1000 + turn,
        )
    )


def test_one_turn_keeps_the_sampled_tokens_and_their_logprobs():
    env = FakeEnvironment([outcome(1.0, True)])
    sample = play(FakeEngine([([10, 11], StopReason.STOP)]), env)
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 11]
    assert sample.token_mask.tolist() == [False, False, False, True, True]
    assert sample.generation_logprobs.tolist() == pytest.approx([0, 0, 0, -1.0, -1.1])
    log, metadata = env.seen[0]
    assert [message["content"] for message in log] == ["s", "u", "10 11"] and log[2]["role"] == "assistant"
    assert metadata == {"ground_truth": "4"}
    meta = sample.meta
    assert (meta.status, meta.reward, meta.num_turns, meta.weight_version) == (SampleStatus.COMPLETED, 1.0, 1, 4)
    assert (meta.length, meta.num_prompt_tokens, meta.num_generated_tokens) == (5, 3, 2)


def test_turns_alternate_and_only_the_models_tokens_carry_loss():
    engine = FakeEngine([([10], StopReason.STOP), ([20, 21], StopReason.STOP)])
    env = FakeEnvironment([outcome(0.25, False, "after one", ["stop here"]), outcome(0.5, True)])
    sample = play(engine, env)
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 90, 91, 20, 21]
    assert sample.token_mask.nonzero()[0].tolist() == [3, 6, 7]
    assert [seed for _, _, seed in engine.asked] == [1000, 1001]
    assert engine.asked[1][0] == [1, 2, 3, 10, 90, 91], "the next turn sees exactly the tokens so far"
    assert engine.asked[1][1].stop_strings == ("stop here",)
    assert env.seen[1][1] == "after one"
    assert (sample.meta.reward, sample.meta.num_turns, sample.meta.weight_version) == (0.75, 2, 4)


@pytest.mark.parametrize(
    ("engine", "outcomes", "max_turns", "max_total", "limits"),
    [
        ([([10], StopReason.STOP)] * 2, 2, 2, 100, (True, False)),
        ([([10] * 8, StopReason.LENGTH)], 1, 2, 100, (False, False)),  # tokens of a turn
        ([([10] * 8, StopReason.LENGTH)], 1, 1, 100, (False, False)),
        ([([10] * 8, StopReason.LENGTH)], 1, 2, 8, (False, True)),
        ([([10], StopReason.STOP)], 1, 2, 6, (False, True)),  # the observation leaves no room for a token
    ],
)
def test_what_cut_an_episode_is_told(engine, outcomes, max_turns, max_total, limits):
    env = FakeEnvironment([outcome(0.0, False)] * outcomes)
    meta = play(FakeEngine(engine), env, max_turns=max_turns, max_total=max_total).meta
    assert meta.status is SampleStatus.TRUNCATED and meta.num_turns == outcomes
    assert (meta.hit_turn_limit, meta.hit_total_token_limit) == limits


@pytest.mark.parametrize(
    ("given", "said", "used"),
    [
        (None, [None, None], [("end",)] * 3),
        (["a"], [None, None], [("a",)] * 3),
        ([], [["b"], None], [(), ("b",), ("b",)]),
        (None, [[], ["c", "d"]], [("end",), (), ("c", "d")]),
    ],
)
def test_none_keeps_the_stop_strings_and_an_empty_list_takes_them_away(given, said, used):
    engine = FakeEngine([([10], StopReason.STOP)] * 3)
    outcomes = [outcome(0.0, False, next_stop_strings=strings) for strings in said]
    play(engine, FakeEnvironment([*outcomes, outcome(1.0, True)]), stop_strings=given)
    assert [sampling.stop_strings for _, sampling, _ in engine.asked] == used


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(5, 80), min_size=1, max_size=6), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(4, 40),
)
def test_tokens_in_are_tokens_out(turns, max_turns, max_total):
    """Each prompt goes on from the one before and what it was answered; what is trained on is what was sampled."""
    engine = FakeEngine([(tokens, StopReason.STOP) for tokens, _ in turns])
    outcomes = [outcome(0.0, over or i == len(turns) - 1) for i, (_, over) in enumerate(turns)]
    sample = play(engine, FakeEnvironment(outcomes), max_turns=max_turns, max_total=max_total)
    answered = [
        tokens[: sampling.max_new_tokens] for (_, sampling, _), (tokens, _) in zip(engine.asked, turns, strict=False)
    ]
    prompts = [prompt for prompt, _, _ in engine.asked]
    for before, answer, after in zip(prompts, answered, prompts[1:], strict=False):
        assert after == [*before, *answer, 90, 91]
    assert sample.token_ids.tolist() == [*prompts[-1], *answered[-1]] and sample.meta.length <= max_total
    assert sample.token_ids[sample.token_mask].tolist() == [token for answer in answered for token in answer]
    assert np.allclose(sample.generation_logprobs, np.where(sample.token_mask, -0.1 * sample.token_ids, 0.0))
    meta = sample.meta
    assert meta.num_generated_tokens == sum(map(len, answered)) == sum(turn.num_generated_tokens for turn in meta.turns)
    assert meta.length == 3 + sum(turn.num_generated_tokens + turn.num_env_tokens for turn in meta.turns)


def test_an_answer_that_repeats_itself_to_its_end_is_a_loop():
    text = [*range(100)]
    assert ends_in_loop([*text, *[7] * 32])
    assert not ends_in_loop([*text, *[7] * 31])
    assert ends_in_loop([*text, *[7, 8, 9] * 11])
    assert ends_in_loop([*text, *[7, 8, 9] * 11, 2]), "the end-of-sequence token follows"
    assert ends_in_loop([*text, *text, *text, *text])
    assert not ends_in_loop([*text, *text, *text])
    assert not ends_in_loop([*[7] * 40, *text])
    assert not ends_in_loop([])


def test_a_sampled_image_token_is_counted_and_carries_no_loss():
    """It is text where the model writes it: no image belongs to it."""
    engine = FakeEngine([([7, 9, 7, 8], StopReason.STOP)])
    sample = play(engine, FakeEnvironment([outcome(1.0, True)]), image_token_id=7)
    assert sample.token_ids.tolist() == [1, 2, 3, 7, 9, 7, 8]
    assert sample.token_mask.tolist() == [False] * 4 + [True, False, True]
    assert sample.generation_logprobs[3] == sample.generation_logprobs[5] == 0
    assert sample.meta.num_sampled_image_tokens == 2
    assert sample.meta.num_generated_tokens == 4


@dataclass
class EngineWithExperts:
    """The experts of token number t are [turn, t], in one layer."""

    inner: FakeEngine
    silent_turns: set[int] = field(default_factory=set)

    async def __call__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        completion = await self.inner(prompt_token_ids, sampling, seed)
        turn = len(self.inner.asked) - 1
        if turn in self.silent_turns:
            return completion
        count = len(prompt_token_ids) + len(completion.token_ids) - 1
        experts = np.array([[[turn, token]] for token in range(count)], dtype=np.uint8)
        return replace(completion, routed_experts=experts)


def play_with_experts(silent_turns: set[int]) -> Sample:
    turns = [([11, 12], StopReason.STOP), ([13], StopReason.STOP), ([14, 15], StopReason.STOP)]
    env = FakeEnvironment([outcome(0.0, False), outcome(0.0, False), outcome(1.0, True)])
    return play(EngineWithExperts(FakeEngine(turns), silent_turns), env)


def turns_of_tokens(sample: Sample) -> list[int]:
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 1].tolist() == list(range(len(sample.routed_experts))), "of its own token"
    return sample.routed_experts[:, 0, 0].tolist()


def test_experts_are_those_of_the_turn_that_computed_the_token_first():
    sample = play_with_experts(set())
    # Prompt 3, turn 2, observation 2, turn 1, observation 2, turn 2; the last token of a turn comes with the next.
    assert turns_of_tokens(sample) == [0] * 4 + [1] * 3 + [2] * 4
    assert len(sample.token_ids) == 12
    assert sample.routed_experts is not None and sample.meta.routed_experts_bytes == sample.routed_experts.nbytes > 0


def test_a_turn_without_experts_is_made_up_for_by_the_next():
    assert turns_of_tokens(play_with_experts({0})) == [1] * 7 + [2] * 4
    assert turns_of_tokens(play_with_experts({2})) == [0] * 4 + [1] * 3, "the rest has none"
    without = play_with_experts({0, 1, 2})
    assert without.routed_experts is None and without.meta.routed_experts_bytes == 0

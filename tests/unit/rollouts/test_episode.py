"""One episode against a scripted engine and a scripted environment."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import conversation_processor
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.rollouts.episode import EpisodeLimits, ends_in_loop, run_episode
from nemo_rl.types import Completion, EnvironmentStep, RenderedObservation, SampleStatus, SamplingParams, StopReason
from tests.conversations import user
from tests.tables import named


@dataclass
class FakeEngine:
    """Answers turn t with `turns[t]`. With `experts`, token t of the sequence has the experts [turn, t]."""

    turns: list[list[int]]
    experts: set[int] = field(default_factory=set)  # turns that return experts
    asked: list[Any] = field(default_factory=list)

    async def __call__(self, request: Any, on_tokens: Any = None) -> Completion:
        turn, room = len(self.asked), request.sampling.max_new_tokens
        self.asked.append(request)
        tokens = self.turns[turn][:room]
        count = len(request.prompt_token_ids) + len(tokens) - 1
        return Completion(
            token_ids=tokens,
            logprobs=[-0.1 * token for token in tokens],
            stop_reason=StopReason.LENGTH if len(tokens) == room else StopReason.STOP,
            weight_version=4 + turn,
            routed_experts=np.array([[[turn, t]] for t in range(count)], np.uint8) if turn in self.experts else None,
        )


class FakeEnvironment:
    """Gives the rewards `outcomes` one by one, each with its differences from a step that says "go on"; then ends."""

    def __init__(self, *outcomes: tuple[float, dict[str, Any]]) -> None:
        self.outcomes = outcomes
        self.seen: list[tuple[list[dict[str, str]], Any]] = []

    async def __call__(self, message_log: list[dict[str, str]], metadata: Any) -> EnvironmentStep:
        reward, more = self.outcomes[len(self.seen)]
        self.seen.append(([dict(message) for message in message_log], metadata))
        says = {"observation": {"role": "environment", "content": "go on"}, "metadata": None, "next_stop_strings": None}
        says["terminated"] = len(self.seen) == len(self.outcomes)
        return EnvironmentStep(reward=reward, **{**says, **more})


def play(
    engine: FakeEngine, env: FakeEnvironment, *, stop_strings: list[str] | None = None, raw_text=False, **limits: Any
):
    async def render(observation: dict[str, Any], **_: Any) -> RenderedObservation:
        return RenderedObservation([90, 91], [], observation["content"])

    datum: Any = {
        "message_log": [{"role": "system", "content": "s", "token_ids": [1, 2]}, {**user("u"), "token_ids": [3]}],
        "length": 3, "extra_env_info": {"ground_truth": "4"}, "loss_multiplier": 1.0, "idx": 0,
        "stop_strings": stop_strings,
    }  # fmt: skip
    most: Any = {"max_turns": 5, "max_total_tokens": 100, **limits}
    episode = run_episode(
        datum, sample_id="g/0", generate=engine, env_step=env, render=render, seed_of_turn=lambda turn: 1000 + turn,
        decode=lambda ids: " ".join(map(str, ids)),
        sampling=SamplingParams(max_new_tokens=8, stop_strings=("end",)),
        limits=EpisodeLimits(**most), raw_text=raw_text,
    )  # fmt: skip
    return asyncio.run(episode)


def test_turns_alternate_and_only_the_models_tokens_carry_loss():
    engine = FakeEngine([[10], [20, 21]])
    env = FakeEnvironment((0.25, {"metadata": "after one"}), (0.5, {}))
    sample = play(engine, env)
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 90, 91, 20, 21]
    assert sample.token_mask.nonzero()[0].tolist() == [3, 6, 7]
    assert [request.seed for request in engine.asked] == [1000, 1001]
    (log, metadata), (_, later) = env.seen
    assert [message["content"] for message in log] == ["s", "u", "10"] and log[2]["role"] == "assistant"
    assert (metadata, later) == ({"ground_truth": "4"}, "after one")
    meta = sample.meta
    assert (meta.status, meta.reward, meta.num_turns, meta.weight_version) == (SampleStatus.COMPLETED, 0.75, 2, 4)
    assert (meta.length, meta.num_prompt_tokens, meta.num_generated_tokens) == (8, 3, 3)


@named(
    "turns, max_turns, max_total, limits",
    {
        "turns": ([[10], [10]], 2, 100, (True, False)),
        "tokens of a turn": ([[10] * 8], 2, 100, (False, False)),
        "tokens of the only turn": ([[10] * 8], 1, 100, (False, False)),
        "tokens in all": ([[10] * 8], 2, 8, (False, True)),
        "no room after the observation": ([[10]], 2, 6, (False, True)),
    },
)
def test_what_cut_an_episode_is_told(turns, max_turns, max_total, limits):
    env = FakeEnvironment(*[(0.0, {})] * 3)
    meta = play(FakeEngine(turns), env, max_turns=max_turns, max_total_tokens=max_total).meta
    assert meta.status is SampleStatus.TRUNCATED and meta.num_turns == len(turns) == len(env.seen)
    assert (meta.hit_turn_limit, meta.hit_total_token_limit) == limits, turns


@named(
    "asked, said, used",
    {
        "own": (["a"], [None, None], [("a",)] * 3),
        "none at first": ([], [["b"], None], [(), ("b",), ("b",)]),
        "those of the configuration": (None, [[], ["c", "d"]], [("end",), (), ("c", "d")]),
    },
)
def test_none_keeps_the_stop_strings_and_an_empty_list_takes_them_away(asked, said, used):
    engine = FakeEngine([[10]] * 3)
    play(engine, FakeEnvironment(*((0.0, {"next_stop_strings": s}) for s in said), (1.0, {})), stop_strings=asked)
    assert [request.sampling.stop_strings for request in engine.asked] == used, asked


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(5, 80), min_size=1, max_size=6), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(4, 40),
)
def test_tokens_in_are_tokens_out(turns, max_turns, max_total):
    """Each prompt continues the one before and its answer; the sampled tokens are trained."""
    engine = FakeEngine([tokens for tokens, _ in turns])
    env = FakeEnvironment(*((0.0, {"terminated": ends}) for _, ends in turns[:-1]), (0.0, {}))
    sample = play(engine, env, max_turns=max_turns, max_total_tokens=max_total)
    prompts = [request.prompt_token_ids for request in engine.asked]
    pairs = zip(engine.asked, turns, strict=False)
    answers = [tokens[: request.sampling.max_new_tokens] for request, (tokens, _) in pairs]
    for before, answer, after in zip(prompts, answers, prompts[1:], strict=False):
        assert after == [*before, *answer, 90, 91]
    assert sample.token_ids.tolist() == [*prompts[-1], *answers[-1]] and sample.meta.length <= max_total
    assert sample.token_ids[sample.token_mask].tolist() == [token for answer in answers for token in answer]
    assert np.allclose(sample.generation_logprobs, np.where(sample.token_mask, -0.1 * sample.token_ids, 0.0))
    meta = sample.meta
    assert meta.num_generated_tokens == sum(map(len, answers)) == sum(turn.num_generated_tokens for turn in meta.turns)
    assert meta.length == 3 + sum(turn.num_generated_tokens + turn.num_env_tokens for turn in meta.turns)


def test_an_answer_that_repeats_itself_to_its_end_is_a_loop():
    text = [*range(100)]
    loops = [*text, *[7] * 32], [*text, *[7, 8, 9] * 11], [*text, *[7, 8, 9] * 11, 2], text * 4  # 2 ends the sequence
    assert all(map(ends_in_loop, loops))
    assert not any(map(ends_in_loop, ([*text, *[7] * 31], text * 3, [*[7] * 40, *text], [])))


def test_a_sampled_image_token_is_counted_and_carries_no_loss():
    """It is text where the model writes it: no image belongs to it."""
    sample = play(FakeEngine([[7, 9, 7, 8]]), FakeEnvironment((1.0, {})), image_token_id=7)
    assert sample.token_ids.tolist() == [1, 2, 3, 7, 9, 7, 8]
    assert sample.token_mask.tolist() == [False] * 4 + [True, False, True]
    assert sample.generation_logprobs[3] == sample.generation_logprobs[5] == 0
    assert (sample.meta.num_sampled_image_tokens, sample.meta.num_generated_tokens) == (2, 4)


@named(
    "turns_with_experts, turn_of_token",
    {
        # Prompt 3, turn 2, observation 2, turn 1, observation 2, turn 2; the last token of a turn comes with the next.
        "every turn": ({0, 1, 2}, [0] * 4 + [1] * 3 + [2] * 4),
        "without the first": ({1, 2}, [1] * 7 + [2] * 4),  # the next turn makes up for one without
        "without the last": ({0, 1}, [0] * 4 + [1] * 3),  # the rest has none
    },
)
def test_experts_are_those_of_the_turn_that_computed_the_token_first(turns_with_experts, turn_of_token):
    engine = FakeEngine([[11, 12], [13], [14, 15]], turns_with_experts)
    sample = play(engine, FakeEnvironment(*[(0.0, {})] * 3))
    experts = sample.routed_experts
    assert experts is not None and sample.meta.routed_experts_bytes == experts.nbytes
    assert experts[:, 0].tolist() == [[turn, token] for token, turn in enumerate(turn_of_token)]


def test_environments_get_plain_messages_or_with_raw_text_the_contract_of_nemo_rl():
    tokenizer = build_tiny_tokenizer()
    row = {"messages": [user("1+1"), {"role": "assistant", "content": "2"}, user("2+2")]}
    datum = conversation_processor(row, TaskDataSpec("t"), tokenizer, None, 0)
    render = ObservationRenderer(tokenizer)

    async def rendered(observation: dict[str, Any], *, raw_text: bool, **how: Any) -> RenderedObservation:
        return render(observation, raw_text=raw_text, **how)

    seen, samples = {}, {}
    for raw_text in (False, True):
        env = FakeEnvironment((0.0, {"observation": {"role": "user", "content": "no"}}), (1.0, {}))
        episode = run_episode(
            datum, sample_id="g/0", generate=FakeEngine([[5], [6]]), env_step=env,
            render=partial(rendered, raw_text=raw_text),
            seed_of_turn=lambda turn: turn, decode=tokenizer.decode, sampling=SamplingParams(max_new_tokens=9),
            limits=EpisodeLimits(max_turns=2, max_total_tokens=99), raw_text=raw_text,
        )  # fmt: skip
        samples[raw_text], seen[raw_text] = asyncio.run(episode), env.seen[1][0]
        assert samples[raw_text].messages == seen[raw_text], "records, report and show_rollouts show the same"
    said = [message["content"] for message in seen[False]]
    assert said == ["1+1", "2", "2+2", tokenizer.decode([5]), "no", tokenizer.decode([6])]
    prompt = "<|user|>1+1<eos><|assistant|>2<eos><|user|>2+2<eos><|assistant|>"
    assert "".join(message["content"] for message in seen[True][:3]) == prompt
    texts = {raw: tokenizer.decode(sample.token_ids.tolist()) for raw, sample in samples.items()}
    first, second = tokenizer.decode([5]), tokenizer.decode([6])
    assert texts[True] == f"{prompt}{first}no{second}"
    assert texts[False] == f"{prompt}{first}<eos><|user|>no<eos><|assistant|>{second}"


@pytest.mark.parametrize(("raw_text", "tokens"), [(True, [1, 2, 3, 10, 90]), (False, [1, 2, 3, 10])])
def test_an_observation_that_fills_the_sequence_is_cut_in_the_contract_of_nemo_rl(raw_text, tokens):
    sample = play(FakeEngine([[10]]), FakeEnvironment((0.5, {}), (0.0, {})), max_total_tokens=5, raw_text=raw_text)
    assert sample.token_ids.tolist() == tokens and sample.token_mask.sum() == 1
    assert (len(sample.messages), sample.meta.length) == (3 + raw_text, len(tokens))
    assert sample.meta.hit_total_token_limit and sample.meta.status is SampleStatus.TRUNCATED


def test_a_processor_of_ones_own_may_give_the_rendered_text_alone():
    sample = play(FakeEngine([[10]]), FakeEnvironment((1.0, {})))
    assert [message["content"] for message in sample.messages] == ["s", "u", "10"]

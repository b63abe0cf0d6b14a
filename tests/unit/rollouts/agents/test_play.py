"""Agents play episodes over real HTTP, with a made-up engine: what they see, what is recorded, how they may end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.agents.runner import AgentRunner
from nemo_rl.rollouts.agents.play import Agents, AgentSettings
from nemo_rl.rollouts.agents.session import SessionLimits
from nemo_rl.rollouts.openai_server import AnswerSettings
from nemo_rl.types import Completion, DatumSpec, Prompt, Sample, SampleStatus, SamplingParams, StopReason

TOKENIZER = build_tiny_tokenizer()
EOS: Any = TOKENIZER.eos_token_id
TOKENIZER.chat_template = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<eos>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def text_of(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids)))


class Engine:
    """Says a number that follows from seed and prompt, one character per token."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams, int]] = []
        self.version = 0

    async def __call__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        self.asked.append((list(prompt_token_ids), sampling, seed))
        await asyncio.sleep(0)
        said = [token for character in str(seed % 1000) for token in tokens(character)] + [EOS]
        return Completion(
            token_ids=said, logprobs=[-0.5] * len(said), stop_reason=StopReason.STOP, weight_version=self.version
        )


class Remote:
    """A method of an actor, without Ray."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Handle:
    """The handle of a runner, without Ray."""

    def __init__(self, runner: AgentRunner) -> None:
        self.run = Remote(runner.run)


def play(*agents: Callable[[AgentTask], Any], engine: Engine | None = None, **options: Any) -> list[Sample]:
    """One episode of each agent, all at once."""

    async def main() -> list[Sample]:
        numbers = itertools.count()
        limits = SessionLimits(max_calls=options.pop("max_calls", 5), max_generated_tokens=options.pop("tokens", None))
        settings = AgentSettings(
            name="mine",
            answers=AnswerSettings(
                model="tiny",
                make_chat=lambda: ServedChat(TOKENIZER, {}),
                calls_of=None,
                encode=tokens,
                decode=text_of,
                vocab_size=len(TOKENIZER),
                max_model_len=300,
            ),
            limits=limits,
            host="127.0.0.1",
            port=0,
        )
        runners = []
        for agent in agents:
            runner = AgentRunner({"run": f"{__name__}:asks_twice", **options})
            runner.agent = agent
            runners.append(Handle(runner))
        playing = Agents(settings, runners)
        try:
            return await asyncio.gather(*(one(playing, next(numbers)) for _ in agents))
        finally:
            await playing.server.stop()

    def one(playing: Agents, index: int) -> Any:
        message = {"role": "user", "content": "1+2", "token_ids": tokens("1+2")}
        return playing.play(
            Prompt(prompt_id="p:0", row={"expected_answer": "3"}, idx=0, task_name="t"),
            DatumSpec(message_log=[message], length=3, extra_env_info=None, loss_multiplier=1.0, idx=0),
            sample_id=f"g/{index}",
            generate=engine or Engine(),
            sampling=SamplingParams(max_new_tokens=20, temperature=1.0, stop_token_ids=(EOS,)),
            seed_of_turn=lambda turn: turn + index,
        )

    return asyncio.run(main())


async def ask(task: AgentTask, messages: Any, **more: Any) -> str:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=task.model, messages=messages, **more)
        return answer.choices[0].message.content or ""


async def asks_twice(task: AgentTask) -> float:
    messages = list(task.messages)
    first = await ask(task, messages, temperature=0.0, seed=1)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    await ask(task, messages)
    return 0.5


def test_a_conversation_is_one_row_of_the_tokens_that_were_sampled():
    engine = Engine()
    [sample] = play(asks_twice, engine=engine)
    first, second = (prompt for prompt, _, _ in engine.asked)
    assert sample.meta.status is SampleStatus.COMPLETED and sample.meta.reward == 0.5 and not sample.branches
    assert sample.token_ids[: len(second)].tolist() == second and sample.meta.num_prompt_tokens == len(first)
    assert text_of(sample.token_ids[~sample.token_mask].tolist()) == (
        "<|user|>1+2<eos><|assistant|><|user|>and?<eos><|assistant|>"
    )
    assert np.unique(sample.generation_logprobs[sample.token_mask]).tolist() == [-0.5]
    assert [turn.num_generated_tokens for turn in sample.meta.turns] == [
        sample.meta.num_generated_tokens - (len(sample.token_ids) - len(second)),
        len(sample.token_ids) - len(second),
    ]
    assert {sampling.temperature for _, sampling, _ in engine.asked} == {1.0}, "the run decides, not the agent"


def test_parallel_calls_are_rows_that_do_not_depend_on_their_order():
    async def asks_three_at_once(task: AgentTask) -> float:
        first = await ask(task, task.messages)
        questions = [[*task.messages, {"role": "assistant", "content": first}, u] for u in others]
        await asyncio.gather(*(ask(task, question) for question in questions))
        return 1.0

    others = [{"role": "user", "content": str(n)} for n in range(3)]
    [sample] = play(asks_three_at_once)
    others.reverse()
    [again] = play(asks_three_at_once)
    assert len(sample.rows) == 3 and [len(row.meta.turns) for row in sample.rows] == [2, 1, 1]
    for row, other in zip(sample.rows, again.rows, strict=True):
        assert np.array_equal(row.token_ids, other.token_ids) and np.array_equal(row.token_mask, other.token_mask)


async def raises(task: AgentTask) -> float:
    await ask(task, task.messages)
    raise KeyError("tool")


async def hangs(task: AgentTask) -> float:
    await ask(task, task.messages)
    await asyncio.Event().wait()
    return 1.0


async def says_nothing(task: AgentTask) -> float:
    return 1.0


async def gives_no_reward(task: AgentTask) -> None:
    await ask(task, task.messages)


async def gives_nonsense(task: AgentTask) -> float:
    await ask(task, task.messages)
    return float("nan")


@pytest.mark.parametrize(
    ("agent", "status", "reason"),
    [
        (raises, SampleStatus.AGENT_CRASHED, "KeyError: 'tool'"),
        (hangs, SampleStatus.AGENT_HUNG, "time_limit_s=0.5"),
        (says_nothing, SampleStatus.AGENT_SILENT, "without a call"),
        (gives_no_reward, SampleStatus.FAILED, "gave no reward"),
        (gives_nonsense, SampleStatus.AGENT_CRASHED, "finite"),
    ],
)
def test_an_agent_without_an_outcome_has_no_reward(agent: Any, status: SampleStatus, reason: str):
    failed, well = play(agent, asks_twice, time_limit_s=0.5 if agent is hangs else 30)
    assert failed.meta.status is status and not failed.meta.has_reward and not failed.token_mask.any()
    assert reason in str(failed.meta.failure) and "g/0" in str(failed.meta.failure)
    assert well.meta.reward == 0.5


def test_calls_beyond_a_limit_are_refused_and_the_rest_is_trained():
    async def asks_on(task: AgentTask) -> float:
        with pytest.raises(openai.PermissionDeniedError, match="has made its 3 calls"):
            while True:
                await ask(task, task.messages)
        return 1.0

    async def asks_long(task: AgentTask) -> float:
        await ask(task, task.messages)
        with pytest.raises(openai.PermissionDeniedError, match="has sampled its 2 tokens"):
            await ask(task, task.messages)
        return 1.0

    [sample] = play(asks_on, max_calls=3)
    assert sample.meta.status is SampleStatus.TRUNCATED and sample.meta.hit_turn_limit and len(sample.rows) == 3
    [sample] = play(asks_long, tokens=2)
    assert sample.meta.status is SampleStatus.TRUNCATED and len(sample.rows) == 1


def test_rewards_are_posted_and_added_up():
    async def posts(task: AgentTask) -> None:
        await ask(task, task.messages)
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for reward in (1.0, 0.25):
                async with http.post(task.reward_url, json={"reward": reward}) as answer:
                    assert answer.status == 200
            async with http.post(task.reward_url, json={"reward": "much"}) as answer:
                assert answer.status == 400

    [sample] = play(posts)
    assert sample.meta.reward == 1.25


def test_a_session_is_closed_to_others_and_after_its_end():
    seen: list[AgentTask] = []

    async def first(task: AgentTask) -> float:
        await ask(task, task.messages)
        seen.append(task)
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        return 1.0

    async def second(task: AgentTask) -> float:
        await ask(task, task.messages)
        while not seen:
            await asyncio.sleep(0.01)
        async with openai.AsyncOpenAI(base_url=seen[0].base_url, api_key=task.api_key, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}])
        seen.append(task)
        await asyncio.sleep(0.3)  # until the first has ended
        with pytest.raises(openai.APIStatusError, match="has ended") as late:
            await ask(seen[0], task.messages)
        assert late.value.status_code == 410
        return 1.0

    assert [sample.meta.failure for sample in play(first, second)] == [None, None]

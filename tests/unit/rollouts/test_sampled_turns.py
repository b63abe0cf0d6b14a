"""What the policy wrote in its episode counts as its answer, and no assistant's turn of the prompt does."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import conversation_processor
from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.client import split_return
from nemo_rl.environments.code.environment import CodeJaccardEnvironment
from nemo_rl.environments.judge import LLMJudgeEnvironment
from nemo_rl.environments.math.environment import MathEnvironment, MathMultiRewardEnvironment
from nemo_rl.environments.remote import EnvironmentServer, RemoteEnvironment
from nemo_rl.environments.rewards import REWARD_FUNCTIONS, response_text
from nemo_rl.evals.samples import open_folder
from nemo_rl.rollouts.episode import EpisodeLimits, run_episode
from nemo_rl.types import EnvironmentStep, LLMMessageLogType, RenderedObservation, Sample, SamplingParams
from tests.conversations import assistant, sampled, user
from tests.unit.environments.http_servers import served
from tests.unit.evals.test_run import played, writer
from tests.unit.rollouts.agents.test_play import play
from tests.unit.rollouts.test_openai_server import TOKENIZER, Engine, client_at, decode, settings

AGAIN = user("again?")
ANSWERS = replace(settings().answers, calls_of=None)


@dataclass(frozen=True)
class Case:
    prompt: list[dict[str, Any]]
    turns: list[str]  # of the policy
    truth: str
    reward: float
    answer: str | None


CASES = [
    Case([user("1+1"), assistant(r"\boxed{2}"), AGAIN], ["I do not know"], "2", 0.0, None),
    Case([user("1+1"), assistant(r"\boxed{5}"), AGAIN], [r"\boxed{2}"], "2", 1.0, "2"),
    Case([user("1+1"), assistant("5"), AGAIN], ["2"], "52", 0.0, "2"),
    Case([user("1+1"), assistant(r"\boxed{2}"), AGAIN], [r"\boxed{2}", "not sure"], "2", 1.0, "2"),
    Case([user("1+1")], ["5", "2"], "52", 0.0, "2"),
    Case([user("1+1")], ["2", "1/2"], "1", 0.0, "1/2"),
    Case([user("1+1")], ["1/", "2"], "1/2", 0.0, "2"),
    Case([user("1+1")], [r"So \boxed{5}.", r"Sorry, \boxed{2}."], "2", 1.0, "2"),
    Case([user("1+1")], [r"\boxed{5}", r"\boxed{2}"], "(5,2)", 0.0, "2"),
]


@pytest.fixture(scope="module")
def environment() -> Iterator[MathEnvironment]:
    made = MathEnvironment({"num_workers": 1})
    yield made
    made.shutdown()


def said_by(case: Case) -> Engine:
    """Says the turns of the case, one by one."""
    turns = iter(case.turns)
    return Engine(lambda request: next(turns))


def judged(environment: Any, messages: LLMMessageLogType, case: Case) -> EnvironmentStep:
    [step] = split_return(environment.step([messages], [{"ground_truth": case.truth}]), 1, "math")
    assert isinstance(step, EnvironmentStep)
    return step


def trained(case: Case, environment: MathEnvironment) -> tuple[Sample, EnvironmentStep]:
    """One episode, in which the environment says "again?" until the last turn, which it judges."""
    steps: list[EnvironmentStep] = []

    async def step(messages: LLMMessageLogType, metadata: Any) -> EnvironmentStep:
        go_on = EnvironmentStep(observation=AGAIN, reward=0.0, terminated=False, metadata=metadata)
        steps.append(go_on if len(steps) + 1 < len(case.turns) else judged(environment, messages, case))
        return steps[-1]

    async def render(observation: Any, **_: Any) -> RenderedObservation:
        return RenderedObservation([5], [], observation["content"])

    episode = run_episode(
        conversation_processor({"messages": case.prompt}, TaskDataSpec("t"), TOKENIZER, None, 0),
        sample_id="g/0", generate=said_by(case), env_step=step, decode=decode, render=render,
        sampling=SamplingParams(max_new_tokens=50), limits=EpisodeLimits(max_turns=5, max_total_tokens=500),
        seed_of_turn=lambda turn: turn,
    )  # fmt: skip
    return asyncio.run(episode), steps[-1]


async def asks_again(task: AgentTask) -> None:
    """Asks for as many answers as the metadata say."""
    messages: list[Any] = list(task.messages)
    async with client_at(task.base_url, task.api_key) as client:
        for _ in range(task.metadata):
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            messages += [assistant(answer.choices[0].message.content), AGAIN]


def num_characters(task: AgentTask, conversations: Any) -> float:
    return float(len(response_text(conversations[0])))


@pytest.mark.parametrize("case", CASES)
def test_training_evaluation_and_agents_judge_what_the_policy_wrote(case: Case, environment: MathEnvironment, tmp_path):
    """And nothing of the history in the prompt."""
    response = "\n".join(case.turns)
    sample, step = trained(case, environment)
    assert (step.reward, step.answer, response_text(sample.messages)) == (case.reward, case.answer, response)

    with open_folder(tmp_path / "e", {}, "", 2) as folder:
        record = writer(folder)._record(played("arithmetic:0", step.reward), 0, sample.conversation)
    assert (record.response, record.prompt) == (response, "\n".join(said["content"] for said in case.prompt))

    steps: list[EnvironmentStep] = []

    async def judge(messages: LLMMessageLogType, metadata: Any, *, sample_id: str) -> EnvironmentStep:
        steps.append(judged(environment, messages, case))
        return steps[-1]

    more = {"metadata": len(case.turns), "judge": judge, "verifier": f"{__name__}:num_characters"}
    [of_agent] = play(asks_again, engine=said_by(case), answers=ANSWERS, prompt=case.prompt, **more)
    assert (steps[0].reward, steps[0].answer) == (case.reward, case.answer)
    assert response_text(of_agent.messages) == response
    assert of_agent.meta.reward == case.reward + len(response), "the verifier sees the marks, too"


HISTORY = [user("1+1"), assistant("<think>so</think> <answer>[1, 1, 9, 9] please</answer>\n```py\nx\n```"), AGAIN]
ANSWER = [sampled("<think>a</think> <answer>[0, 0, 4, 2]</answer>")]
KNOWN = {"ground_truth": "[0, 0, 4, 4]", "messages": [user("1+1")]}
KWARGS: dict[str, dict[str, Any]] = {
    "length": {"soft_limit": 9, "hard_limit": 99},
    "contains": {"texts": ["please", "a"]},
}


@pytest.mark.parametrize("name", REWARD_FUNCTIONS)
def test_no_reward_depends_on_the_history(name: str):
    known = {**KNOWN, "ground_truth": ["a", "0042"]} if name == "vqa_agreement" else KNOWN
    values = [REWARD_FUNCTIONS[name](log, known, **KWARGS.get(name, {})) for log in ([*HISTORY, *ANSWER], ANSWER)]
    assert values[0] == values[1]


def test_no_environment_depends_on_the_history(environment: MathEnvironment):
    case = Case(HISTORY, [], "[0, 0, 4, 2]", 0.0, None)
    of_code, several = CodeJaccardEnvironment({}), MathMultiRewardEnvironment({"num_workers": 1})
    judge = LLMJudgeEnvironment({"base_url": "http://127.0.0.1:1/v1", "model": "j"})
    assert judge._prompt([*HISTORY, *ANSWER], KNOWN) == judge._prompt(ANSWER, KNOWN)
    with served(EnvironmentServer(environment, "math", None).app()) as url:
        remote = RemoteEnvironment({"base_url": url, "start_timeout_s": 5.0})
        for each in (environment, of_code, several, remote):
            assert judged(each, [*HISTORY, *ANSWER], case) == judged(each, ANSWER, case), type(each)
    several.shutdown()


def test_a_conversation_without_a_turn_of_the_policy_is_refused():
    with pytest.raises(ValueError, match='no message has "sampled": True'):
        response_text([user("1+1"), assistant("2")])


def spoken(*said: Any) -> list[Any]:
    """Messages of user and assistant in turn."""
    return [assistant(one) if number % 2 else user(one) for number, one in enumerate(said)]


# The requests of an episode, of which every one is answered with "7"; the marked messages of the last conversation.
SENT: dict[str, tuple[list[Any], list[int]]] = {
    "whole": ([spoken("q"), spoken("q", "7", "r")], [1, 3]),
    "in parts": ([spoken("q"), spoken("q", [{"type": "text", "text": "7"}], "r")], [1, 3]),
    "behind other instructions": ([spoken("q"), [{"role": "system", "content": "s"}, *spoken("q", "7", "r")]], [2, 4]),
    "with a history that is equal": ([spoken("q", "7", "r"), spoken("q", "7", "r", "7", "s")], [3, 5]),
    "with other words": ([spoken("q"), spoken("q", "8", "r")], [3]),
    "with marks of its own": ([[user("q"), sampled("8"), {**user("r"), "sampled": True}]], [3]),
}


@pytest.mark.parametrize("name", SENT)
def test_an_earlier_answer_counts_where_it_was_given(name: str):
    requests, marked = SENT[name]

    async def sends(task: AgentTask) -> float:
        async with client_at(task.base_url, task.api_key) as client:
            for messages in requests:
                await client.chat.completions.create(model=task.model, messages=messages)
        return 1.0

    [sample] = play(sends, engine=Engine("7"), answers=ANSWERS)
    last = max((row.messages for row in sample.rows), key=len)
    assert [number for number, message in enumerate(last) if message.get("sampled")] == marked
    assert all(isinstance(message["content"], str) for message in last)

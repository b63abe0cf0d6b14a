"""Agents play episodes over real HTTP, with a made-up engine: their conversations, their samples, their ends."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from aiohttp import web

from nemo_rl.data.chat.messages import get_formatted_message_log
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.agents.launch import readable
from nemo_rl.environments.agents.runner import AgentRunner
from nemo_rl.environments.code.sandbox.isolation import landlock_abi
from nemo_rl.rollouts.agents.play import Agents, AgentSettings
from nemo_rl.rollouts.agents.session import Session, SessionLimits
from nemo_rl.rollouts.openai_server import AnswerSettings
from nemo_rl.types import DatumSpec, EnvironmentStep, GenerationRequest, Prompt, Sample, SampleStatus, SamplingParams
from tests.conversations import assistant, user
from tests.unit.distributed.test_worker_groups import alive, eventually
from tests.unit.environments.http_servers import served
from tests.unit.rollouts.engines import completion, in_loop, request_of
from tests.unit.rollouts.test_openai_server import EOS, TOKENIZER, Engine, client_at, settings, spelled, tokens


def text_of(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids)))


ANSWERS = replace(settings().answers, calls_of=None, decode=text_of)


def numbers() -> Engine:
    """Says a number that follows from seed and prompt."""
    return Engine(lambda request: str(request.seed % 1000))


def session_of(answers: AnswerSettings, generate: Any) -> Session:
    """One without an episode."""
    limits = SessionLimits(max_calls=99, max_generated_tokens=None)
    sampling = SamplingParams(max_new_tokens=20)
    return Session(answers, generate=generate, sampling=sampling, seed_of=lambda turn: turn, limits=limits)


def handle_of(runner: AgentRunner) -> Any:
    """The handle of a runner, without Ray."""
    methods = {"run": runner.run, "verify": runner.verify, "stop": lambda url: asyncio.ensure_future(runner.stop(url))}
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


def play(
    *agents: Callable[[AgentTask], Any],
    engine: Any = None,
    max_calls: int = 5,
    max_tokens: int | None = None,
    judge: Any = None,
    roles: Any = MappingProxyType({}),
    credit: Any = "shared",
    discount: float = 1.0,
    port: int = 0,
    prompt: Sequence[dict[str, Any]] = (user("1+2"),),
    metadata: Any = None,
    answers: AnswerSettings = ANSWERS,
    **runner: Any,
) -> list[Sample]:
    """One episode of each agent, all at once; or one of the command or service that `runner` names."""
    limits = SessionLimits(max_calls=max_calls, max_generated_tokens=max_tokens)
    own = {"verifies": "verifier" in runner, "credit": credit, "discount": discount}
    settings = AgentSettings(name="mine", answers=answers, limits=limits, host="127.0.0.1", port=port, **own)
    messages = get_formatted_message_log(prompt, TOKENIZER, TaskDataSpec(), add_generation_prompt=True)
    runners = [AgentRunner({"run": f"{__name__}:asks_twice", **runner}) for _ in agents] or [AgentRunner(runner)]
    for own, agent in zip(runners, agents, strict=False):
        own.agent = agent

    async def main() -> list[Sample]:
        playing = Agents(settings, [handle_of(runner) for runner in runners], judge, roles)
        try:
            return await asyncio.gather(*(episode(playing, number) for number in range(len(runners))))
        finally:
            await playing.server.stop()

    async def episode(playing: Agents, number: int) -> Sample:
        return await playing.play(
            Prompt(prompt_id="p:0", row={"expected_answer": "3"}, idx=0, task_name="t"),
            DatumSpec(message_log=messages, length=3, extra_env_info=metadata, loss_multiplier=1.0, idx=0),
            sample_id=f"g/{number}",
            generate=engine or numbers(),
            sampling=SamplingParams(max_new_tokens=20, temperature=1.0, stop_token_ids=(EOS,)),
            seed_of_turn=lambda turn: turn + number,
        )

    return asyncio.run(main())


async def ask(task: AgentTask, messages: Any, url: str = "", **more: Any) -> str:
    async with client_at(url or task.base_url, task.api_key) as client:
        answer = await client.chat.completions.create(model=task.model, messages=messages, **more)
        return answer.choices[0].message.content or ""


async def posted(task: AgentTask, url: str, **body: Any) -> int:
    """The status of the answer."""
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as answer:
        return answer.status


async def asks_twice(task: AgentTask) -> float:
    first = await ask(task, task.messages, temperature=0.0, seed=1)
    await ask(task, [*task.messages, assistant(first), user("and?")])
    return 0.5


def test_a_conversation_is_one_row_of_the_tokens_that_were_sampled():
    engine = numbers()
    [sample] = play(asks_twice, engine=engine)
    first, second = (request.prompt_token_ids for request in engine.asked)
    assert sample.meta.status is SampleStatus.COMPLETED and sample.meta.reward == 0.5 and not sample.branches
    assert sample.token_ids[: len(second)].tolist() == second and sample.meta.num_prompt_tokens == len(first)
    others = sample.token_ids[~sample.token_mask].tolist()
    assert text_of(others) == "<|user|>1+2<eos><|assistant|><|user|>and?<eos><|assistant|>"
    assert np.unique(sample.generation_logprobs[sample.token_mask]).tolist() == [-0.5]
    last = len(sample.token_ids) - len(second)
    assert [turn.num_generated_tokens for turn in sample.meta.turns] == [sample.token_mask.sum() - last, last]
    assert {request.sampling.temperature for request in engine.asked} == {1.0}, "the run decides, not the agent"


async def asks_and(outcome: Any, task: AgentTask) -> Any:
    """An agent that asks once, then raises or returns `outcome`."""
    await ask(task, task.messages)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def assert_failed(sample: Sample, status: SampleStatus, reason: str) -> None:
    assert sample.meta.status is status and not sample.meta.has_reward and not sample.token_mask.any()
    assert reason in str(sample.meta.failure) and sample.sample_id in str(sample.meta.failure)


def test_an_agent_without_an_outcome_has_no_reward():
    endless = {"reward": 1.0, "metrics": {"calls": float("inf")}}
    cases = [
        (SampleStatus.AGENT_CRASHED, "KeyError: 'tool'", partial(asks_and, KeyError("tool"))),
        (SampleStatus.AGENT_SILENT, "without a call", lambda task: 1.0),
        (SampleStatus.FAILED, "gave no reward", partial(asks_and, None)),
        (SampleStatus.AGENT_CRASHED, "finite", partial(asks_and, float("nan"))),
        (SampleStatus.AGENT_CRASHED, "{'calls': inf}", partial(asks_and, endless)),
    ]
    *played, well = play(*(agent for *_, agent in cases), asks_twice)
    for failed, (status, reason, _) in zip(played, cases, strict=True):
        assert_failed(failed, status, reason)
    assert well.meta.reward == 0.5


def test_calls_beyond_a_limit_are_refused_and_the_rest_is_trained():
    async def asks_on(text: str, task: AgentTask) -> float:
        with pytest.raises(openai.PermissionDeniedError, match=text):
            while True:
                await ask(task, task.messages)
        return 1.0

    for key, limit, num_calls, text in (
        ("max_calls", 3, 3, "has made its 3 calls"),
        ("max_tokens", 2, 1, "has sampled its 2 tokens"),
    ):
        [sample] = play(partial(asks_on, text), **{key: limit})
        assert sample.meta.status is SampleStatus.TRUNCATED and sample.meta.hit_turn_limit
        assert len(sample.rows) == num_calls


async def branches_with_rewards(task: AgentTask) -> float:
    """Two calls of different prompts; the second is rewarded by itself."""
    await ask(task, task.messages)
    async with client_at(task.base_url, task.api_key) as client:
        second = await client.chat.completions.create(model="any", messages=[user("7")])
    assert await posted(task, task.reward_url, reward=2.0, answer=second.id) == 200
    assert await posted(task, task.reward_url, reward=2.0, answer="unknown") == 404
    return 0.5


def test_credit_is_shared_or_of_each_branch_or_discounted():
    def of(sample: Sample) -> dict[int, Any]:
        """By length of the prompt: "7" is shorter than "1+2"."""
        return {row.meta.num_prompt_tokens: (row.meta.own_reward, row.meta.credit) for row in sample.rows}

    long, short = (len(tokens(f"<|user|>{text}<eos><|assistant|>")) for text in ("1+2", "7"))
    [shared] = play(branches_with_rewards)
    assert shared.meta.reward == 2.5 and of(shared) == {long: (None, 1.0), short: (None, 1.0)}
    [own] = play(branches_with_rewards, credit="branch")
    assert own.meta.reward == 2.5 and of(own) == {long: (0.5, 1.0), short: (2.5, 1.0)}
    [discounted] = play(branches_with_rewards, credit="discounted", discount=0.5)
    assert of(discounted) == {long: (None, 0.5), short: (None, 1.0)}
    assert [turn.reward for row in own.rows for turn in row.meta.turns if turn.reward] == [2.0]


def counts_messages(task: AgentTask, conversations: Any) -> dict[str, Any]:
    return {"reward": float(len(conversations[0])), "metrics": {"rows": len(conversations)}}


def test_a_verifier_and_an_environment_add_their_rewards():
    seen: list[Any] = []

    async def judge(message_log: list[dict[str, str]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        seen.append((message_log, sample_id))
        return EnvironmentStep(observation={}, reward=10.0, terminated=True, metadata=None, metrics={"judged": 1.0})

    [sample] = play(asks_twice, verifier=f"{__name__}:counts_messages", judge=judge)
    assert sample.meta.reward == 0.5 + 4 + 10 and sample.metrics == {"rows": 1.0, "judged": 1.0}
    [(log, sample_id)] = seen
    assert [message["role"] for message in log] == ["user", "assistant", "user", "assistant"] and sample_id == "g/0"
    assert log == sample.messages


COMMAND = """
import json, os, subprocess, sys, urllib.request
task = json.load(open(os.environ["AGENT_TASK"]))
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = post(url, {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]})
assert answer["choices"][0]["message"]["content"] and task["row"]["expected_answer"] == "3"
assert "SECRET_OF_THE_RUN" not in os.environ and os.getcwd() == os.environ["HOME"]
post(os.environ["AGENT_REWARD_URL"], {"reward": 0.75})
subprocess.Popen(["sleep", "60"], start_new_session=True)  # keeps the output open
if os.environ.get("FAIL"):
    sys.exit("no tool")
"""
GREEDY = "import time; time.sleep(0.3); bytearray(1 << 29)"


def command(program: str, *arguments: str, **more: Any) -> Sample:
    [sample] = play(command=[sys.executable, "-c", program, *arguments], **more)
    return sample


def test_a_command_finds_its_session_in_its_environment(monkeypatch: pytest.MonkeyPatch):
    """It ends when it ends, and not its children."""
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    started = time.monotonic()
    sample = command(COMMAND)
    assert sample.meta.failure is None and sample.meta.reward == 0.75 and sample.meta.num_turns == 1
    assert time.monotonic() - started < 50
    assert_failed(command(COMMAND, env_vars={"FAIL": "1"}), SampleStatus.AGENT_CRASHED, "status 1: no tool")
    assert_failed(command(GREEDY, memory_mib=128), SampleStatus.AGENT_CRASHED, "MemoryError")


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path):
    pid = tmp_path / "pid"
    child = f"import subprocess, time; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); "
    hung = command(child + "time.sleep(60)", paths=[str(tmp_path)], time_limit_s=4)
    assert_failed(hung, SampleStatus.AGENT_HUNG, "time_limit_s=4")
    assert eventually(lambda: not alive(int(pid.read_text())))


CURIOUS = """
import os, socket, sys
def tried(action):
    try:
        return action() and "done"
    except OSError as error:
        return type(error).__name__
secret, pid, port = sys.argv[1:]
print(tried(lambda: open(secret).read()), tried(lambda: open(f"/proc/{pid}/environ").read()),
      tried(lambda: open(secret, "w")), tried(lambda: os.listdir(os.path.dirname(secret))),
      tried(lambda: socket.create_connection(("127.0.0.1", int(port)))), tried(lambda: open("own", "w").write("x")),
      tried(lambda: os.kill(int(pid), 0) is None))
sys.exit(3)
"""


@pytest.mark.skipif(landlock_abi() < 4, reason="needs Linux 6.7")
def test_an_isolated_command_reaches_its_session_and_no_other(tmp_path: Path):
    """Neither another program, nor its file, its environment or its port; its own folder and session it does."""
    secret = tmp_path / "task.json"
    secret.write_text("key")
    with socket.create_server(("127.0.0.1", 0)) as other:
        arguments = [str(secret), str(os.getpid()), str(other.getsockname()[1])]
        closed = command(CURIOUS, *arguments, network=False)
        trusted = command(CURIOUS, *arguments, isolate=False)
        whole = command(COMMAND, network=False)
    no, signalled = "PermissionError", "PermissionError" if landlock_abi() >= 6 else "done"
    assert f"status 3: {no} {no} {no} {no} {no} done {signalled}" in str(closed.meta.failure)
    assert "status 3: done done done done done done done" in str(trusted.meta.failure)
    assert whole.meta.failure is None and whole.meta.reward == 0.75


def test_a_command_does_not_read_the_folder_of_temporary_files_wherever_it_is(tmp_path: Path):
    for name in ("code", "scratch/tmp", "scratch/other"):
        (tmp_path / name).mkdir(parents=True)
    found = readable([], str(tmp_path), str(tmp_path / "scratch/tmp"))
    assert {str(tmp_path / "code"), str(tmp_path / "scratch/other")} <= set(found)
    assert not {str(tmp_path), str(tmp_path / "scratch"), str(tmp_path / "scratch/tmp")} & set(found)


@pytest.mark.parametrize("home", ["~", "/missing", "{}/missing", "/missing/home"])  # "~": no entry in /etc/passwd
def test_a_command_reads_programs_without_a_home_folder(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", home.format(tmp_path))
    assert {"/usr", sys.prefix} <= set(readable([], "", "/tmp"))


def test_a_service_is_posted_its_task():
    tasks: list[AgentTask] = []
    rewarded, pointed = web.json_response({"reward": 0.25}), web.json_response({"points": 1})
    answers = [rewarded, pointed, web.Response(status=409, text="it cannot begin anew")]

    async def service(request: web.Request) -> web.Response:
        tasks.append(AgentTask(**await request.json()))
        await ask(tasks[-1], tasks[-1].messages)
        return answers[len(tasks) - 1]

    with served({"/tasks": service}) as url:
        (sample, odd, refused) = (play(url=f"{url}/tasks")[0] for _ in answers)
    assert sample.meta.reward == 0.25 and tasks[0].row == {"expected_answer": "3"}
    assert_failed(odd, SampleStatus.AGENT_CRASHED, "not points")
    assert_failed(refused, SampleStatus.AGENT_CRASHED, "409: it cannot")
    assert [(task.episode, task.seed) for task in tasks] == [("g/0", 0)] * 3


def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"env\.mine\.session\.host=127\.0\.0\.1 and port={port} cannot be"):
            play(asks_twice, port=port)


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
        with pytest.raises(openai.AuthenticationError):
            await ask(task, task.messages, seen[0].base_url)
        seen.append(task)
        await asyncio.sleep(0.3)  # until the first has ended
        with pytest.raises(openai.APIStatusError, match="has ended") as late:
            await ask(seen[0], task.messages)
        assert late.value.status_code == 410
        return 1.0

    assert [sample.meta.failure for sample in play(first, second)] == [None, None]


def test_a_request_that_is_open_when_its_episode_ends_is_told_so():
    asked = asyncio.Event()
    late: list[asyncio.Task[str]] = []

    async def never(request: GenerationRequest, on_tokens: Any = None) -> Any:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    async def hasty(task: AgentTask) -> float:
        late.append(asyncio.create_task(ask(task, task.messages)))
        await asked.wait()
        return 1.0

    async def patient(task: AgentTask) -> None:
        await asked.wait()
        await asyncio.wait(late)

    play(hasty, patient, engine=never)
    with pytest.raises(openai.APIStatusError, match="this episode has ended") as told:
        late[0].result()
    assert told.value.status_code == 410


def test_the_key_alone_finds_the_session_and_every_way_in_is_the_same_conversation():
    """A chat, its continuation as a stream, and one by `/v1/responses` are one row."""

    async def asks_everywhere(task: AgentTask) -> float:
        root = task.base_url.partition("/s/")[0]
        async with client_at(f"{root}/v1", task.api_key) as client:
            items: Any = [user("1+2")]
            first: Any = await client.chat.completions.create(model="any", messages=items)
            items += [assistant(first.choices[0].message.content), user("and?")]
            stream: Any = await client.chat.completions.create(model="any", messages=items, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            items += [assistant(said), user("so?")]
        async with aiohttp.ClientSession() as http:
            for key, status in ((task.api_key, 200), ("guess", 401), ("\ud800", 401), ([], 401)):
                body = {"input": items, "metadata": {"nemo_rl_key": key}}
                async with http.post(f"{root}/v1/responses", json=body) as answer:
                    assert answer.status == status and await answer.json()
        return 1.0

    [sample] = play(asks_everywhere)
    assert sample.meta.failure is None and len(sample.rows) == 1 and sample.meta.num_turns == 3


@in_loop
async def test_a_request_that_failed_leaves_its_seed_to_the_next_and_not_to_one_under_way():
    seeds: list[int] = []
    wait = asyncio.Event()

    async def generate(request: GenerationRequest, on_tokens: Any = None) -> Any:
        seeds.append(request.seed)
        if len(seeds) == 1:
            await asyncio.sleep(0)
            raise RuntimeError("lost")
        await wait.wait()
        return completion([EOS])

    session, request = session_of(ANSWERS, generate), request_of([1, 2])
    asking = [asyncio.create_task(session.generate(request)) for _ in range(2)]
    await asyncio.wait(asking[:1])
    asking.append(asyncio.create_task(session.generate(request)))
    await asyncio.sleep(0)
    wait.set()
    await asyncio.gather(*asking, return_exceptions=True)
    assert seeds[2] == seeds[0] != seeds[1]


def test_the_order_in_which_roles_ask_does_not_change_the_answers():
    said: list[dict[str, str]] = []

    async def asks(roles: Sequence[str], task: AgentTask) -> float:
        said.append({role: await ask(task, task.messages, task.roles[role]) for role in roles})
        return 1.0

    for order in (("white", "black"), ("black", "white")):
        play(partial(asks, order), roles={"white": None, "black": None})
    assert said[0] == said[1] and said[0]["white"] != said[0]["black"]


def test_roles_have_conversations_and_rewards_of_their_own_and_an_opponent_is_not_trained():
    """One question, asked in the name of two roles and of a frozen opponent."""

    async def says_nine(*_: Any) -> Any:
        return completion(spelled("9"))

    async def plays(task: AgentTask) -> dict[str, Any]:
        said = {role: await ask(task, task.messages, url) for role, url in task.roles.items()}
        assert said["opponent"] == "9<eos>"
        assert await posted(task, task.reward_url, reward=0.5, role="white") == 200
        assert await posted(task, task.reward_url, reward=0.5, role="opponent") == 404
        with pytest.raises(openai.NotFoundError, match="no role 'red'"):
            await ask(task, task.messages, f"{task.base_url[:-3]}/r/red/v1")
        return {"rewards": {"white": 1.0, "black": -1.0}}

    roles = {"white": None, "black": None, "opponent": says_nine}
    [sample, failed] = play(plays, partial(asks_and, {"rewards": {"red": 1.0}}), roles=roles)
    assert [(row.meta.role, row.meta.own_reward) for row in sample.rows] == [("black", -1.0), ("white", 1.5)]
    assert sample.meta.reward == 0.5
    assert "9" not in [text_of(row.token_ids[row.token_mask][:-1]) for row in sample.rows]
    assert_failed(failed, SampleStatus.AGENT_CRASHED, "'red'")

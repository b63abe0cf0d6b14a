"""Runs of the real command line whose episodes are agents: exact over several rows of an episode, in both loops."""

import asyncio
import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from nemo_rl.environments.agents.interfaces import AgentTask
from tests.functional import cli
from tests.functional.cli import BARE, ENGINE_APART, ROOT, Finished, continues_bit_for_bit, exact, example, keys, run
from tests.functional.test_megatron_runs import trained_by_megatron
from tests.unit.environments.http_servers import served

pytestmark = pytest.mark.timeout(1800)

EXAMPLE = example("grpo", "grpo_agent_cpu")
TWO_STEPS = BARE + keys(
    grpo="num_prompts_per_step=4 num_generations_per_prompt=4 max_num_steps=2",
    policy="train_global_batch_size=16 train_micro_batch_size=8",
)
SMALL = (*TWO_STEPS, *keys(env=f"arithmetic_agent.run={__name__}:branches arithmetic_agent.credit=branch"))
LOOP = "async_grpo.enabled=true async_grpo.max_trajectory_age_steps=2"
ASYNC = (*ENGINE_APART, *keys(grpo=LOOP, cluster="cpu_workers_per_node=2"))
IN_FLIGHT = keys(grpo="async_grpo.in_flight_weight_updates=true async_grpo.group_order=arrival")


async def branches(task: AgentTask) -> dict[str, Any]:
    """Asks, goes on from the answer in two ways at once, and begins anew with a shorter conversation."""
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # http: certificates would take 27 ms of each episode
    access = {"base_url": task.base_url, "api_key": task.api_key}
    async with openai.AsyncOpenAI(**access, max_retries=0, http_client=plain) as client:

        async def ask(messages: list[Any]) -> str:
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            return answer.choices[0].message.content or ""

        question: list[Any] = list(task.messages)
        first = await ask(question)
        follow: list[Any] = [*question, {"role": "assistant", "content": first}]
        again: list[list[Any]] = [[*follow, {"role": "user", "content": text}] for text in ("1+1", "2+2")]
        answers = [first, *await asyncio.gather(*map(ask, again)), await ask([{"role": "user", "content": "3+4"}])]
    right = [f"\\boxed{{{task.row['expected_answer']}}}", "\\boxed{2}", "\\boxed{4}", "\\boxed{7}"]
    found = [expected in answer for expected, answer in zip(right, answers, strict=True)]
    return {"reward": sum(found) / len(found), "metrics": {"num_calls": len(answers)}}


def assert_whole(finished: Finished, num_steps: int = 2) -> list[dict[str, Any]]:
    """The steps of a run in which every episode had an outcome and three rows."""
    steps = finished.steps
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    for row in steps:
        assert row["train/failed_sample_rate"] == row["train/arithmetic_agent/num_late_calls"] == 0
        assert row["train/agents/rows_per_episode"] == 3 and row["train/arithmetic_agent/num_calls"] == 4
    return steps


@pytest.mark.over_20s("a start of a run: agents, and Megatron, meet a real engine and a refit nowhere else")
def test_rows_of_agents_are_exact_and_megatron_learns_from_them(tmp_path: Path) -> None:
    megatron = trained_by_megatron("policy", 3e-4)
    larger = keys(
        grpo="num_prompts_per_step=16 num_generations_per_prompt=8 max_num_steps=6"
        " val_at_end=true max_val_samples=8 val_batch_size=8",
        policy="train_global_batch_size=128 train_micro_batch_size=64",
    )
    finished = run(tmp_path, *SMALL, *larger, *megatron, **EXAMPLE)
    steps = assert_whole(finished, num_steps=6)
    exact(steps, 6)
    rewards = [row["train/reward"] for row in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    assert any("validation/reward" in row or "validation/accuracy" in row for row in finished.metrics)
    assert "Warning" not in finished.output and "Apex" not in finished.output, "as of a run with PyTorch"


@pytest.mark.slow
def test_agents_play_while_weights_arrive_in_flight_and_their_record_is_trained_again(tmp_path: Path) -> None:
    asked = (*SMALL, *ASYNC, *IN_FLIGHT, "grpo.max_num_steps=4")
    record = f"grpo.rollout_record={{enabled: true, save_dir: {tmp_path / 'record'}}}"
    steps = assert_whole(run(tmp_path / "run", *asked, record, **EXAMPLE), num_steps=4)
    assert 1 <= max(row["train/weight_version_lag/max"] for row in steps) <= 2
    again = run(tmp_path / "again", *asked, f"grpo.replay_from={tmp_path / 'record'}", **EXAMPLE)
    for name in ("train/loss", "train/grad_norm", "train/reward", "train/agents/rows_per_episode"):
        assert [row[name] for row in steps] == again.curve(name), name


SAVED = keys(checkpointing="enabled=true save_period=2 metric_name=null", grpo="max_num_steps=6")


@pytest.mark.slow
def test_a_killed_asynchronous_run_plays_its_open_episodes_again(tmp_path: Path) -> None:
    continues_bit_for_bit(tmp_path, *SMALL, *SAVED, *ASYNC, **EXAMPLE)


@pytest.mark.slow
def test_a_killed_run_plays_its_open_episodes_again_and_two_engines_give_the_same_rows(tmp_path: Path) -> None:
    before, _ = continues_bit_for_bit(tmp_path / "one", *SMALL, *SAVED, **EXAMPLE)
    many = ("cluster.cpu_workers_per_node=2", "policy.train_micro_batch_size=4", "grpo.max_num_steps=1")
    one, [two] = before[0], run(tmp_path / "two", *SMALL, *many, **EXAMPLE).steps
    for name in ("train/reward", "train/total_turns", "train/mean_gen_tokens_per_sample", "train/global_valid_toks"):
        assert one[name] == two[name], name
    assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)


class Service:
    """Plays tasks that are posted. In the third step one episode of each prompt is held open, and cannot begin anew."""

    def __init__(self) -> None:
        self.seeds: dict[str, list[int]] = {}  # by episode, of each time that it was posted
        self.held: set[str] = set()
        self.told: set[str] = set()  # that nobody waits any more

    async def play(self, request: web.Request) -> web.Response:
        task = AgentTask(**await request.json())
        self.seeds.setdefault(task.episode, []).append(task.seed)
        if task.episode in self.held:
            return web.Response(status=409, text="it cannot begin anew")
        if len(self.seeds) > 32 and task.episode.endswith("/0") and not self.told:
            self.held.add(task.episode)
            while request.transport is not None:
                await asyncio.sleep(0.01)
            self.told.add(task.episode)
            return web.Response()
        return web.json_response(await branches(task))


@pytest.mark.slow
def test_a_service_is_told_that_a_run_was_killed_and_may_refuse_to_begin_anew(tmp_path: Path) -> None:
    service = Service()
    with served({"/tasks": service.play}) as url:
        own = keys(grpo="max_num_steps=4 max_failed_sample_fraction=0.25", env="arithmetic_agent.run=null")
        saved = keys(checkpointing="enabled=true save_period=1 metric_name=null")
        asked = (*TWO_STEPS, *own, *saved, f"+env.arithmetic_agent.url={url}/tasks")
        killed = cli.start(tmp_path, *asked, **EXAMPLE)
        while len(service.held) < 4:
            assert killed.poll() is None, (tmp_path / "out.log").read_text()[-4000:]
            time.sleep(0.05)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        while len(service.told) < 4:  # the test's limit ends this wait
            time.sleep(0.05)
        again = run(tmp_path, *asked, **EXAMPLE)
    rates = {row["step"]: row["train/agents/crashed_rate"] for row in again.steps}
    assert "status 409: it cannot begin anew" in again.output, again.output[-4000:]
    assert rates == {3: 0.25, 4: 0.0}, "those that were open have no outcome, and no reward of 0"
    posted = list(service.seeds.values())
    assert len(posted) == 64 and all(len(set(seeds)) == 1 for seeds in posted), "an episode keeps its seed"
    assert all(len(service.seeds[episode]) == 2 for episode in service.held)


@pytest.mark.slow
def test_an_isolated_command_plays_both_roles_of_the_policy(tmp_path: Path) -> None:
    """Self-play: a program for each episode, kept from all others, whose players both are trained."""
    command = f"[{sys.executable}, {ROOT / 'tests/functional/self_play.py'}]"
    own = (f"command={command}", "network=false", "roles={white: null, black: null}")
    agent = [f"+env.arithmetic_agent.{key}" for key in own]
    finished = run(tmp_path, *TWO_STEPS, "env.arithmetic_agent.run=null", *agent, **EXAMPLE)
    exact(finished.steps, 2)  # with gradients: a role's rewards differ from episode to episode
    for row in finished.steps:
        assert row["train/failed_sample_rate"] == row["train/agents/crashed_rate"] == 0
        assert row["train/agents/rows_per_episode"] == 2
        assert row["train/reward"] == 1.0, "what one wins the other loses"


@pytest.mark.slow
def test_the_same_agent_evaluates(tmp_path: Path) -> None:
    overrides = keys(
        data="kwargs.num_samples=16 env_name=agent",
        eval=f"num_tests_per_prompt=2 k_value=1 max_rollout_turns=4 save_path={tmp_path}",
        generation="vllm_cfg.max_model_len=96",
    )
    agent = f"+env.agent={{type: agent, run: '{__name__}:branches'}}"
    run(tmp_path, *overrides, agent, **example("eval", "evals/eval_cpu"))
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 32
    assert {line["num_turns"] for line in samples} == {4} and {line["status"] for line in samples} == {"completed"}
    assert 0 < json.loads((tmp_path / "results.json").read_text())["overall"]["mean"] < 1


# -- an agent outside the run, that talks to its OpenAI-compatible server while the policy trains


def two_turns(client: openai.OpenAI) -> int:
    """One conversation; returns the weights' version of its second turn."""
    messages: Any = [{"role": "user", "content": "3+4"}]
    first: Any = client.chat.completions.create(model="any", messages=messages, logprobs=True)
    choice = first.choices[0]
    assert len(choice.token_ids) == len(choice.token_logprobs) == len(choice.logprobs.content)
    messages += [choice.message.model_dump(), {"role": "user", "content": "5+2"}]
    second: Any = client.chat.completions.create(model="any", messages=messages)
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before and second.retokenized_turns == 0
    assert 0 <= first.weight_version <= second.weight_version
    return second.weight_version


@pytest.mark.slow
def test_an_agent_talks_to_the_policy_while_it_trains(tmp_path: Path):
    on = "policy.generation.vllm_cfg.expose_http_server=true"
    process = cli.start(tmp_path, *cli.SMALL, on, "checkpointing.enabled=false", "grpo.max_num_steps=6")
    deadline, versions = time.monotonic() + 300, set()
    while not (found := list(tmp_path.glob("logs/exp_*/openai_server.json"))):  # in it agents find the server's address
        assert time.monotonic() < deadline, (tmp_path / "out.log").read_text()[-4000:]
        time.sleep(0.1)
    assert stat.S_IMODE(found[0].stat().st_mode) == 0o600
    address = json.loads(found[0].read_text())
    with openai.OpenAI(base_url=address["base_url"], api_key=address["api_key"], max_retries=0) as client:
        greedy: Any = {"model": "any", "temperature": 0, "prompt": "3+4", "max_tokens": 8}
        of_text: Any = client.completions.create(**greedy)
        again: Any = client.completions.create(**{**greedy, "prompt": of_text.prompt_token_ids})
        if again.weight_version == of_text.weight_version:
            assert again.choices[0].token_ids == of_text.choices[0].token_ids
        parts: list[Any] = list(client.completions.create(**greedy, stream=True, logprobs=0))
        if parts[-1].weight_version == of_text.weight_version:
            assert "".join(part.choices[0].text for part in parts) == of_text.choices[0].text
            streamed = [value for part in parts for value in part.choices[0].logprobs.token_logprobs]
            assert streamed == of_text.choices[0].token_logprobs, "a stream samples the same bits"
        drawn: list[Any] = [client.completions.create(model="any", prompt="3+4", seed=3) for _ in range(2)]
        if drawn[0].weight_version == drawn[1].weight_version:
            assert drawn[0].choices[0].token_ids == drawn[1].choices[0].token_ids
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            while True:
                versions.add(two_turns(client))
    output = cli.end(process, tmp_path).output
    assert len(versions) >= 4, versions
    assert address["base_url"] in output.replace("\n", "") and address["api_key"] not in output

"""Agents of other libraries in whole runs: each in a Python of its own, with the real tiny model behind them.

All of them play in the same two steps, because the start of a run costs more than its episodes.
"""

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.distributed.own_python import python_of
from nemo_rl.utils.venvs import VenvBuildError, run_uv
from tests.functional.cli import BARE, CONFIGS, EXAMPLES, ROOT, exact, free_port, keys, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
GYM = ("run", "--no-project", "--python", "3.12", "--with-requirements", "requirements/agents/nemo_gym.txt", "python")
PLAY_GYM = "nemo_rl.environments.agents.nemo_gym:play"
NUM_PROMPTS, NUM_EPISODES = 2, 4  # of each client in a step, and of each prompt
SUMS = [(1, 2), (3, 4)]


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    """The requirements of each client that uv can install. Skips the tests if it can install none."""
    found, problem = {}, ""
    for name in ("openai_agents", "langgraph", "verifiers", "openenv"):
        file = str(ROOT / "requirements" / "agents" / f"{name}.txt")
        try:
            python_of(file, name)
            found[name] = file
        except VenvBuildError as error:
            problem = str(error)
    if not found:
        pytest.skip(problem)
    return found


def agent(run: str, py_executable: str | None = None, **kwargs: Any) -> dict[str, Any]:
    return {"type": "agent", "run": run, "kwargs": kwargs, "py_executable": py_executable}


def play(folder: Path, model: str, sections: dict[str, Any], **dataset: str) -> list[dict[str, Any]]:
    """The metrics of two steps in which every section of `env` has the same number of episodes.

    They are exact, and in each section most episodes have an outcome. `dataset`: how rows in `<section>.jsonl` are read
    that are not the ordinary ones.
    """
    train = []
    for name in sections:
        file = folder / f"{name}.jsonl"
        if not file.exists():
            write_lines(file, [{"messages": question(a, b), "expected_answer": str(a + b)} for a, b in SUMS])
        section = {"data_path": str(file), "env_name": name, "processor": "conversation_processor"}
        train.append(section | dataset)
    defaults, data = str(CONFIGS / "grpo_agent_tools_cpu.yaml"), {"train": train, "validation": None}
    (folder / "clients.yaml").write_text(yaml.safe_dump({"defaults": defaults, "data": data, "env": sections}))
    num_prompts = NUM_PROMPTS * len(sections)
    size = keys(
        grpo=f"max_num_steps=2 max_num_epochs=2 num_prompts_per_step={num_prompts}"  # a step has all rows
        f" num_generations_per_prompt={NUM_EPISODES}",
        policy=f"train_global_batch_size={num_prompts * NUM_EPISODES} train_micro_batch_size=8 model_name={model}",
    )
    finished = run(folder, *BARE, *size, script=EXAMPLES / "run_grpo.py", config=folder / "clients.yaml")
    exact(finished.steps, 2)
    for row in finished.steps:
        assert math.isfinite(row["train/loss"]), row
        assert row["train/failed_sample_rate"] < 0.5 / len(sections), finished.output[-4000:]
    return finished.steps


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}"}]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(file: str, module: str, name: str, rows: Path, *arguments: str) -> None:
    """The rows of an environment of another library, as its example writes them."""
    command = [python_of(file, module), "-m", f"examples.agents.{module}", name, str(rows), *arguments]
    subprocess.run(command, check=True, env=ENVIRONMENT, timeout=120)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:NUM_PROMPTS]))


def mcp_tools(server: dict[str, Any]) -> dict[str, Any]:
    return {"type": "mcp", "servers": {"sums": server}, "environment": {"type": "math", "num_workers": 1}}


def test_agents_with_tools_and_mcp_servers_train(tmp_path: Path, pythons: dict[str, str]) -> None:
    calculator = [sys.executable, str(ROOT / "examples/agents/mcp_calculator.py")]
    server = {"command": calculator[0], "args": calculator[1:], "env": {"PYTHONPATH": str(ROOT)}}
    sections: dict[str, Any] = {"stdio_tools": mcp_tools(server)}
    for name, module in (("openai_agents", "openai_agents"), ("langgraph", "langgraph_agent")):
        if name in pythons:
            sections[name] = agent(f"examples.agents.{module}:solve", pythons[name])
    if "verifiers" in pythons:
        env = "examples.agents.sums_env"
        sections["verifiers"] = agent("examples.agents.verifiers_env:play", pythons["verifiers"], environment=env)
        write_rows(pythons["verifiers"], "verifiers_env", env, tmp_path / "verifiers.jsonl")
    with listening(*calculator) as url:
        sections["http_tools"] = mcp_tools({"url": f"{url}/mcp"})
        steps = play(tmp_path, "tiny:tools", sections)
    for name, section in sections.items():
        own = {"verifiers": "total_tool_calls"}.get(name, "tool_calls")
        calls = "num_tool_calls" if section["type"] == "mcp" else own
        # An answer that is no call comes now and then: of the episodes of one step, many can be such by chance.
        assert sum(row[f"train/{name}/{calls}"] for row in steps) > 0.5 * len(steps), name


@contextmanager
def listening(*command: str) -> Iterator[str]:
    """The URL of a server while it runs; its last argument is a free port."""
    port = free_port()
    server = subprocess.Popen([*command, str(port)], env=ENVIRONMENT, cwd=ROOT, start_new_session=True)
    try:
        for _ in itertools.count():
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the test's limit ends this wait"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_turns_of_another_library_train(tmp_path: Path, pythons: dict[str, str]) -> None:
    if not {"verifiers", "openenv"} <= pythons.keys():
        pytest.skip(f"uv can install {', '.join(pythons)} alone")
    env, kind = "examples.agents.sums_env", {"kind": "turns"}
    play_it = "examples.agents.verifiers_env:play"
    arguments = ("--arguments", json.dumps(kind))
    write_rows(pythons["verifiers"], "verifiers_env", env, tmp_path / "verifiers.jsonl", *arguments)
    with listening(python_of(pythons["openenv"], "openenv"), "-m", "examples.agents.openenv_sums") as url:
        write_rows(pythons["openenv"], "openenv_env", url, tmp_path / "openenv.jsonl", "--num-rows", "4")
        sections = {
            "verifiers": agent(play_it, pythons["verifiers"], environment=env, arguments=kind),
            "openenv": agent("examples.agents.openenv_env:play", pythons["openenv"], url=url),
        }
        steps = play(tmp_path, "tiny:arithmetic", sections)
    assert all(row["train/reward"] > 0 and row["train/verifiers/is_right"] > 0 for row in steps)
    assert steps[0]["train/openenv/steps"] > 1 and steps[0]["train/verifiers/num_turns"] > 1, "who is right soon stops"


def test_servers_of_nemo_gym_as_they_are_train(tmp_path: Path) -> None:
    """A verifier and an agent of its package, each in a Python of its own."""
    try:
        run_uv([*GYM, "-c", "import nemo_gym"], what="nemo_gym", folder=ROOT, otherwise="do without", by_hand="uv run")
    except VenvBuildError as error:
        pytest.skip(str(error))
    rows: list[dict[str, Any]] = [{"question": "", "expected_answer": str(a + b)} for a, b in SUMS]
    for row, (a, b) in zip(rows, SUMS, strict=True):
        row["responses_create_params"] = {"input": question(a, b)}
    start = ("uv", *GYM, "examples/agents/nemo_gym_server.py")
    with listening(*start, "math_with_judge") as url:
        ports = ("--resources-port", url.rpartition(":")[2], "--model-port", str(port := free_port()))
        with listening(*start, *ports, "simple_agent") as agent_url:
            sections = {"verifier": agent(PLAY_GYM, resources_url=url), "agent": agent(PLAY_GYM, agent_url=agent_url)}
            sections["agent"]["session"] = {"port": port}
            for name in sections:
                write_lines(tmp_path / f"{name}.jsonl", rows)
            steps = play(tmp_path, "tiny:arithmetic", sections, dataset_name="nemo_gym")
    for row in steps:
        assert row["train/failed_sample_rate"] == 0 and row["train/reward"] > 0
        assert row["train/reward"] == (row["train/verifier/library_reward"] + row["train/agent/library_reward"]) / 2

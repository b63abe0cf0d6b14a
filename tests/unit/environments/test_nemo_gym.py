"""NeMo Gym's protocol, against servers written from its documentation."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets.registry import all_rows
from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.agents.nemo_gym import play
from nemo_rl.environments.agents.runner import AgentFailed
from tests.unit.environments.http_servers import Scripted, served

ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2"}],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "parallel_tool_calls": False,
    },
    "expected": "3",
    "agent_ref": {"type": "responses_api_agents", "name": "simple_agent"},
}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]}


def played(folder: Path, way: str, reward: float | None = 1.0) -> tuple[dict[str, Any], dict[str, Scripted]]:
    """The outcome of the task in a file, and what servers were asked. That of resources knows a session by a cookie."""
    file = folder / "tasks.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    [row] = all_rows(TableConfig(dataset_name="nemo_gym", data_path=str(file), processor="conversation_processor"))
    assert [message["role"] for message in row["messages"]] == ["system", "user"]
    verdict = json.dumps({**ROW, "reward": reward, "num_calls": 1, "comment": "well"})
    said = [json.dumps({"id": "r", "output": [item], "tools": []}) for item in (CALL, SAID)]
    answers = {"/add": ["3"], "/verify": [verdict], "/run": ['{"reward": 0.5}'], "/v1/responses": said}
    servers = {path: Scripted(script) for path, script in answers.items()}

    async def seed_session(request: web.Request) -> web.Response:
        assert (await request.json())["expected"] == "3"
        return web.json_response({}, headers={"Set-Cookie": "session=7"})

    with served({"/seed_session": seed_session, **{path: server.handle for path, server in servers.items()}}) as url:
        session = {"base_url": f"{url}/v1", "api_key": "k", "model": "tiny", "reward_url": ""}
        episode: Any = {"messages": row["messages"], "metadata": None, "seed": 0, "episode": "g/0"}
        return asyncio.run(play(AgentTask(row=row, **session, **episode), **{way: url})), servers


def test_a_task_is_played_with_its_resources_server(tmp_path: Path):
    outcome, servers = played(tmp_path, "resources_url")
    assert outcome == {"reward": 1.0, "metrics": {"num_calls": 1}}
    model, tool, verifier = (servers[path] for path in ("/v1/responses", "/add", "/verify"))
    assert {headers["Authorization"] for headers in model.headers} == {"Bearer k"}
    assert tool.requests == [{"a": 1, "b": 2}]
    assert tool.headers[0]["Cookie"] == verifier.headers[0]["Cookie"] == "session=7"
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    [_, asked], [verified] = model.requests, verifier.requests
    assert asked["input"] == [*ROW["responses_create_params"]["input"], CALL, result] and asked["tools"]
    assert verified["response"]["output"] == [CALL, result, SAID] and verified["expected"] == "3"
    with pytest.raises(AgentFailed, match="no reward"):
        played(tmp_path, "resources_url", reward=None)


def test_an_agent_server_gets_the_row_and_the_session(tmp_path: Path):
    outcome, servers = played(tmp_path, "agent_url")
    assert outcome == {"reward": 0.5, "metrics": {}}
    params = {**ROW["responses_create_params"], "metadata": {"nemo_rl_key": "k"}}
    assert servers["/run"].requests == [{**ROW, "responses_create_params": params}]

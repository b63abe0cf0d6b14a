"""NeMo Gym's protocol, against servers written from its documentation."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets.registry import all_rows
from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.agents.nemo_gym import play
from nemo_rl.environments.agents.runner import AgentFailed

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


class Servers:
    """A resources server that knows its session by a cookie, an agent server, and a model that calls the tool once."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.verified: Any = None
        self.ran: Any = None
        self.reward: Any = 1.0
        self.app = web.Application()
        for path in ("seed_session", "add", "verify", "run", "v1/responses"):
            self.app.router.add_post(f"/{path}", getattr(self, path.rpartition("/")[2]))

    async def seed_session(self, request: web.Request) -> web.Response:
        assert (await request.json())["expected"] == "3"
        answer = web.json_response({})
        answer.set_cookie("session", "7")
        return answer

    async def add(self, request: web.Request) -> web.Response:
        assert request.cookies["session"] == "7"
        body = await request.json()
        return web.json_response(body["a"] + body["b"])

    async def verify(self, request: web.Request) -> web.Response:
        assert request.cookies["session"] == "7"
        self.verified = await request.json()
        return web.json_response({**self.verified, "reward": self.reward, "num_calls": 1, "comment": "well"})

    async def run(self, request: web.Request) -> web.Response:
        self.ran = await request.json()
        return web.json_response({**self.ran, "reward": 0.5})

    async def responses(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer k"
        self.asked.append(await request.json())
        return web.json_response({"id": "r", "output": [CALL if len(self.asked) == 1 else SAID], "tools": []})


def played(servers: Servers, path: Path, way: str) -> Any:
    file = path / "tasks.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    [row] = all_rows(TableConfig(dataset_name="nemo_gym", data_path=str(file), processor="conversation_processor"))
    assert [message["role"] for message in row["messages"]] == ["system", "user"]

    async def main() -> Any:
        async with TestServer(servers.app) as server:
            url = str(server.make_url("")).rstrip("/")
            session = {"base_url": f"{url}/v1", "api_key": "k", "model": "tiny", "reward_url": ""}
            episode: Any = {"messages": row["messages"], "metadata": None, "seed": 0, "episode": "g/0"}
            return await play(AgentTask(row=row, **session, **episode), **{way: url})

    return asyncio.run(main())


def test_a_task_is_played_with_its_resources_server(tmp_path: Path):
    servers = Servers()
    assert played(servers, tmp_path, "resources_url") == {"reward": 1.0, "metrics": {"num_calls": 1}}
    asked = servers.asked[1]
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    assert asked["input"] == [*ROW["responses_create_params"]["input"], CALL, result] and asked["tools"]
    assert servers.verified["response"]["output"] == [CALL, result, SAID] and servers.verified["expected"] == "3"
    servers = Servers()
    servers.reward = None
    with pytest.raises(AgentFailed, match="no reward"):
        played(servers, tmp_path, "resources_url")


def test_an_agent_server_gets_the_row_and_the_session(tmp_path: Path):
    servers = Servers()
    assert played(servers, tmp_path, "agent_url") == {"reward": 0.5, "metrics": {}}
    params = {**ROW["responses_create_params"], "metadata": {"nemo_rl_key": "k"}}
    assert servers.ran == {**ROW, "responses_create_params": params}

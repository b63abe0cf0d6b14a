"""Tools of real MCP servers around an environment."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.environments.mcp import McpEnvironment
from tests.conversations import answered
from tests.unit.environments.http_servers import served

SERVER = str(Path(__file__).with_name("mcp_server.py"))
CONFIG = Path(__file__).parents[3] / "examples" / "configs" / "grpo_mcp_cpu.yaml"
STDIO = {"command": sys.executable, "args": [SERVER]}


def turn(*calls: tuple[str, dict[str, Any]], text: str = "") -> list[dict[str, str]]:
    written = [f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls]
    return answered("".join([text, *written]))


def environment(*, timeout_s: float = 20.0, **servers: Any) -> McpEnvironment:
    inner = {"type": "code_jaccard"}
    return McpEnvironment({"servers": servers, "environment": inner, "max_calls_per_turn": 2, "timeout_s": timeout_s})


def test_calls_are_answered_and_other_turns_go_to_the_environment():
    env = environment(sums=STDIO)
    try:
        logs: Any = [
            turn(("add", {"a": 1, "b": 2})),
            turn(text="right words"),
            turn(("add", {"a": 1, "b": 2}), ("divide", {"a": 1, "b": 0}), ("add", {"a": 1, "b": 1})),
            turn(("add", {"a": "x"}), text="first "),
            turn(("search", {"q": "x"})),  # no tool of a server: the environment's affair
        ]
        truth = {"ground_truth": "right words"}
        given = env.step(logs, [truth] * len(logs))
        texts = [observation["content"] for observation in given.observations]
        assert texts[0] == "3" and given.observations[0]["role"] == "tool"
        assert texts[2].startswith("[1] 3\n[2] error: ") and "divide" in texts[2] and "only the first 2" in texts[2]
        assert texts[3] == "error: add needs the argument 'b'"
        assert given.terminateds.tolist() == [False, True, False, False, True]
        assert given.rewards[1] == 1.0 and given.rewards[0] == 0.0 and given.failures == [None] * 5
        # A server that ends costs the conversations that called it, and is started again.
        lost = env.step([turn(("divide", {"a": 1, "b": -1}))], [truth])
        assert "gave no result" in str(lost.failures)
        again = env.step([turn(("add", {"a": 2, "b": 2}))], [truth])
        assert again.observations[0]["content"] == "4"
        assert (env.num_calls, env.num_errors) == (6, 2)
    finally:
        env.shutdown()


async def answers_and_holds_on(request: web.Request) -> web.Response:
    """A server that never answers the end of its session."""
    if request.method == "DELETE":
        await asyncio.sleep(3600)
    if request.method != "POST":
        return web.Response(status=405)
    asked = await request.json()
    results = {
        "initialize": {
            "protocolVersion": asked.get("params", {}).get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "held", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "wait", "inputSchema": {"type": "object"}}]},
    }
    if asked["method"] not in results:
        return web.Response(status=202 if "id" not in asked else 404)
    answer = {"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]}
    return web.json_response(answer, headers={"Mcp-Session-Id": "1"})


def test_a_server_that_holds_on_does_not_keep_the_run_from_its_end():
    app = web.Application()
    app.router.add_route("*", "/mcp", answers_and_holds_on)
    with served(app) as url:
        env = environment(timeout_s=2.0, held={"url": f"{url}/mcp"})
        assert list(env.servers.specs) == ["wait"]
        started = time.monotonic()
        env.shutdown()
        assert time.monotonic() - started < 50


@pytest.mark.parametrize(
    ("servers", "named"),
    [({"a": {"command": "/no/such/program"}}, "servers.a cannot be reached"), ({"a": {}}, "write command, or url")],
)
def test_a_server_that_cannot_be_used_is_named(servers: Any, named: str):
    with pytest.raises(ValueError, match=named):
        environment(**servers)


MISPLACED = "answers turns, without agents, a GPU, or parts that are sections of env"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+env.with_tools.max_call_per_turn=2", "the nearest valid key is env.with_tools.max_calls_per_turn"),
        ("+env.with_tools.environment.num_worker=2", "the nearest valid key is env.with_tools.environment.num_workers"),
        ("env.with_tools.environment.type=mat", "env.with_tools.environment.type.*did you mean math"),
        ("env.with_tools.environment.type=[math]", "must be a valid string"),
        ("+env.with_tools.servers.sums.url=http://127.0.0.1:1", "a server has one of both"),
        ("{type: agent, run: 'a:b'}", MISPLACED),
        ("{type: vlm, reward_functions: [{name: math, env: math, weight: 1.0}]}", MISPLACED),
        ("{type: reward_model, model_name: m, resources: {gpus_per_node: 1}}", MISPLACED),
    ],
)
def test_a_mistake_is_named_before_anything_starts(override: str, said: str):
    inner = "env.with_tools.environment"
    overrides = [f"~{inner}", f"+{inner}={override}"] if override.startswith("{") else [override]
    with pytest.raises(ConfigError, match=said):
        load_config(GRPOMasterConfig, CONFIG, overrides)

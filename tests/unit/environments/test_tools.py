"""Episodes with tools, built in and of real MCP servers; the calculator computes as Python does, and nothing else."""

import asyncio
import json
import secrets
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.environments.code.tools import Tool, ToolCall, ToolError, calculate, find_calls, problem_of
from nemo_rl.environments.mcp import McpEnvironment
from nemo_rl.environments.registry import new_environment
from nemo_rl.utils.task_formats import function_spec
from tests.conversations import answered
from tests.tables import cases, pattern
from tests.unit.environments.http_servers import served
from tests.unit.environments.test_retrieval import play


def shout(arguments, state) -> str:
    if not arguments["text"]:
        raise ToolError("nothing to shout")
    state["shouts"] = state.get("shouts", 0) + 1
    return arguments["text"].upper() + "!" * state["shouts"]


def boom(arguments, state) -> str:
    raise OSError("no more room")


BOOM = Tool(function_spec("boom", "Raises.", {}), boom)
SHOUT = Tool(function_spec("shout", "Shouts.", {"text": "what"}), shout)


@pytest.fixture(scope="module")
def environment():
    tools, limits = (
        ["calculator", "python", f"{__name__}:SHOUT", f"{__name__}:BOOM"],
        {"time_limit_s": 60.0, "cpu_limit_s": 1},
    )
    made: Any = new_environment("python_tools", {"num_workers": 1, "tools": tools, "sandbox": limits})
    yield made
    made.shutdown()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_episode_of_calls_and_an_answer(environment) -> None:
    turns = [
        call("calculator", expression="5+7"),
        "Let me see.\n" + call("python", code="x = 5\nx + 7"),
        call("python", code="print(x * 2)"),
        call("shout", text="hey") + call("shout", text="ho"),
        "It is \\boxed{12}.",
    ]
    told, _ = play(environment, turns, {"ground_truth": "12"})
    said = ("12", "12", "10", "[1] HEY!\n[2] HO!!")
    assert told[:4] == [(text, 0.0, False) for text in said] and told[4][1:] == (1.0, True)
    [(long, _, _)], _ = play(environment, [call("python", code="print('a' * 5000)")], {"ground_truth": "12"})
    assert long == "a" * 1000 + "\n[3000 characters left out]\n" + "a" * 1000


def test_what_is_wrong_with_a_call_is_told_and_the_episode_goes_on(environment) -> None:
    wrong = {
        "<tool_call>{'name': 'calculator'}</tool_call>": "is not JSON",
        "<tool_call>[1]</tool_call>": "names no tool",
        '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>': "the arguments are no JSON object",
        call("calculater", expression="1"): "no tool 'calculater'; there are: calculator, python, shout, boom",
        call("calculator", expr="1"): "needs the argument 'expression'",
        call("calculator", expression=3): "must be of type string",
        call("calculator", expression="1", more="2"): "has no argument 'more'",
        call("calculator", expression="import os"): "not an expression",
        call("shout", text=""): "nothing to shout",
        call("python", code="1 / 0"): "ZeroDivisionError",
        call("python", code="while True: pass"): "seconds",
        call("calculator", expression="1") * 6: "only the first 4 calls",
    }
    finished = {"rewards": torch.zeros(1), "is_end": torch.ones(1)}
    environment.global_post_process_and_metrics(finished)
    told, _ = play(environment, list(wrong), {"ground_truth": "12"})
    for part, (text, reward, ends) in zip(wrong.values(), told, strict=True):
        assert part in text and reward == 0.0 and not ends
    _, metrics = environment.global_post_process_and_metrics(finished)
    assert (metrics["num_tool_calls"], metrics["num_refused_tool_calls"]) == (15.0, 9.0)


def test_an_exception_of_a_tool_fails_its_conversation_alone_and_no_call_is_made_twice(environment) -> None:
    before, truth = environment.num_calls, {"ground_truth": "12"}
    turns = [call("boom"), call("shout", text="hey"), "\\boxed{12}", "\\boxed{12}"]
    given = environment.step(list(map(answered, turns)), [truth, truth, truth, {}])
    assert given.failures[0].startswith("a tool raised OSError('no more room') (in the conversation that ends")
    assert given.observations[1]["content"] == "HEY!" and given.rewards.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert given.failures[1:3] == [None, None] and "KeyError('ground_truth')" in given.failures[3]
    assert environment.num_calls == before + 2 and not environment.may_repeat_step
    assert McpEnvironment.may_repeat_step is False


def test_calls_are_found_in_several_styles() -> None:
    assert find_calls("nothing") == []
    assert find_calls('<tool_call>\n{"name": "a", "arguments": "{\\"b\\": 1}"}') == [ToolCall("a", {"b": 1})]
    assert find_calls('<tool_call>{"name": "a", "arguments": ""}</tool_call>') == [ToolCall("a", {})]
    assert find_calls("```tool_code\nprint(1)\n```") == [ToolCall("python", {"code": "print(1)\n"})]


def test_a_tool_may_have_no_parameters_and_an_argument_several_types() -> None:
    parameters = {"properties": {"until": {"type": ["string", "null"]}, "any": {}, "n": {"type": "integer"}}}
    functions: dict[str, Any] = {"now": {"name": "now"}, "wait": {"name": "wait", "parameters": parameters}}
    specs = {name: {"type": "function", "function": function} for name, function in functions.items()}
    assert problem_of(ToolCall("now"), specs) == ""
    for fits in ({"until": None}, {"until": "noon", "any": 3}, {"n": 2}):
        assert problem_of(ToolCall("wait", fits), specs) == ""
    assert problem_of(ToolCall("wait", {"until": 3}), specs).endswith("must be of type string or null")
    assert problem_of(ToolCall("wait", {"n": True}), specs).endswith("must be of type integer")


REFUSED = [
    "__import__('os').system('true')", "().__class__", "[x for x in (1,)]", "x", "'a' * 9", "True", "1 +", "",
    "9**9**9", "2**-99999", "(-8)**0.5", "1/0", "sqrt(-1)", "exp(9999)", "round(2.5, ndigits=1)",
    "(" * 300 + "1" + ")" * 300, "1+" * 600 + "1", "-" * 200 + "1",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20])
def test_what_is_no_calculation_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ToolError, match=r"\w"):
        calculate(text)


@pytest.mark.parametrize("expression", ["1//0", "5%(2-2)"])
def test_a_division_by_zero_is_told(expression: str) -> None:
    with pytest.raises(ToolError, match="zero"):
        calculate(expression)


CALCULATIONS = ["7+8*9-1", "(7+8)*(9-1)", "-7//2", "-7%3", "7//2%2", "8-3-2", "2**3**2", "-2**2", "7/2", "0*5"]


@pytest.mark.parametrize("expression", CALCULATIONS)
def test_calculations_agree_with_python(expression: str) -> None:
    assert calculate(expression) == str(eval(expression))


# -- tools of MCP servers

CONFIG = Path(__file__).parents[3] / "examples" / "configs" / "grpo_mcp_cpu.yaml"


def mcp(*, timeout_s: float = 20.0, **servers: Any) -> McpEnvironment:
    keys = {"environment": {"type": "code_jaccard"}, "max_calls_per_turn": 2, "timeout_s": timeout_s}
    return McpEnvironment({"servers": servers, **keys})


def test_calls_are_answered_and_other_turns_go_to_the_environment():
    env = mcp(sums={"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]})
    try:
        turns = [
            call("add", a=1, b=2),
            "right words",
            call("add", a=1, b=2) + call("divide", a=1, b=0) + call("add", a=1, b=1),
            "first " + call("add", a="x"),
            call("search", q="x"),  # no tool of a server: the environment's affair
        ]
        truth = {"ground_truth": "right words"}
        given = env.step(list(map(answered, turns)), [truth] * len(turns))
        texts = [observation["content"] for observation in given.observations]
        assert texts[0] == "3" and given.observations[0]["role"] == "tool"
        assert texts[2].startswith("[1] 3\n[2] error: ") and "divide" in texts[2] and "only the first 2" in texts[2]
        assert texts[3] == "error: add needs the argument 'b'"
        assert given.terminateds.tolist() == [False, True, False, False, True]
        assert given.rewards[1] == 1.0 and given.rewards[0] == 0.0 and given.failures == [None] * 5
        # A server that ends costs the conversations that called it, and is started again.
        calls = (call("divide", a=1, b=-1), call("add", a=2, b=2))
        lost, again = (env.step([answered(turn)], [truth]) for turn in calls)
        assert "gave no result" in str(lost.failures) and again.observations[0]["content"] == "4"
        _, metrics = env.global_post_process_and_metrics({})
        assert metrics == {"num_tool_calls": 6.0, "num_tool_errors": 2.0}
        two = call("repeat", text="a", times=9000) + call("repeat", text="b", times=3)
        [long] = env.step([answered(two)], [truth]).observations
        assert "7000 characters left out" in long["content"] and long["content"].endswith("a\n[2] bbb")
        # The environment's error fails the conversation that it refuses, and no call is made twice.
        mixed = env.step([answered(call("add", a=1, b=1)), answered("words"), answered("words")], [truth, {}, truth])
        assert "KeyError" in str(mixed.failures[1]) and [mixed.failures[0], mixed.failures[2]] == [None, None]
        assert mixed.observations[0]["content"] == "2" and env.num_calls == 3
    finally:
        env.shutdown()


ANSWERED = {
    "refuse": {"error": {"code": -32602, "message": "no such key"}},
    "fail": {"error": {"code": -32603, "message": "a bug"}},
    "misfit": {"result": {"content": [], "structuredContent": {"n": "many"}}},
    "misspell": {"result": {"content": 3}},
    "add": {"result": {"content": [{"type": "text", "text": "3"}], "structuredContent": {"n": 3}}},
    "restart": {},  # forgets the session
}


async def answers_and_holds_on(sessions: list[str], request: web.Request) -> web.Response:
    """A server that never answers the end of its session, the last of `sessions`."""
    if request.headers.get("Mcp-Session-Id", sessions[-1]) != sessions[-1]:
        return web.Response(status=404)
    if request.method == "DELETE":
        await asyncio.sleep(3600)
    if request.method != "POST":
        return web.Response(status=405)
    asked = await request.json()
    method, params = asked["method"], asked.get("params", {})
    if method == "initialize":
        sessions.append(str(len(sessions)))
    elif params.get("name") == "restart":
        sessions.append("")
        return web.Response(status=404)
    result = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"name": name, "inputSchema": {"type": "object"}, "outputSchema": result} for name in ANSWERED]
    server = {"capabilities": {"tools": {}}, "serverInfo": {"name": "held", "version": "1"}}
    answers = {
        "initialize": {"result": {"protocolVersion": params.get("protocolVersion"), **server}},
        "tools/list": {"result": {"tools": tools}},
        "tools/call": ANSWERED.get(params.get("name")),
    }
    if method not in answers:
        return web.Response(status=202 if "id" not in asked else 404)
    answer = {"jsonrpc": "2.0", "id": asked["id"], **answers[method]}
    return web.json_response(answer, headers={"Mcp-Session-Id": sessions[-1]})


def test_what_a_server_answers_is_read_by_the_model_and_a_server_that_holds_on_does_not_keep_the_run_from_its_end():
    """An error in answer to one call costs nothing; only a server that knows the session no more is connected anew."""
    sessions = [""]
    with served({"/mcp": partial(answers_and_holds_on, sessions)}) as url:
        env = mcp(timeout_s=2.0, held={"url": f"{url}/mcp"})
        assert list(env.servers.specs) == list(ANSWERED)
        said = ("no such key", "a bug", "Invalid structured content", "validation error", "3")
        given = env.step([answered(call(name)) for name in list(ANSWERED)[:5]], [None] * 5)
        for part, observation in zip(said, given.observations, strict=True):
            assert part in observation["content"]
        assert given.failures == [None] * 5 and sessions == ["", "1"]
        lost, again = (env.step([answered(call(name))], [None]) for name in ("restart", "add"))
        assert "gave no result" in str(lost.failures) and again.observations[0]["content"] == "3" and len(sessions) == 4
        started = time.monotonic()
        env.shutdown()
        assert time.monotonic() - started < 50


def test_a_server_that_cannot_be_used_is_named_and_one_that_does_not_start_in_time_is_ended():
    mark = f"silent_{secrets.token_hex(8)}"
    program = {"command": sys.executable, "args": ["-c", "import time; time.sleep(600)", mark]}
    with pytest.raises(ValueError, match=r"servers\.silent cannot be reached"):
        mcp(timeout_s=1.0, silent=program)
    assert subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).stdout == b""
    with pytest.raises(ValueError, match=r"servers\.a cannot be reached"):
        mcp(a={"command": "/no/such/program"})
    with pytest.raises(ValueError, match="write command, or url"):
        mcp(a={})


MISTAKES = """
+env.with_tools.max_call_per_turn=2 -> the nearest valid key is env.with_tools.max_calls_per_turn
+INNER.num_worker=2 -> the nearest valid key is env.with_tools.environment.num_workers
~INNER & +INNER={type: 'my_envs:Chess', py_executable: [chess]} -> env.with_tools.environment.py_executable ... itself
~INNER & +INNER={type: code_jaccard, num_actors: 4} -> env.with_tools.environment.num_actors ... itself
INNER.type=mat -> env.with_tools.environment.type ... did you mean math
INNER.type=[math] -> must be a valid string
+env.with_tools.servers.sums.url=http://127.0.0.1:1 -> a server has one of both
~INNER & +INNER={type: agent, run: 'a:b'} -> MISPLACED
~INNER & +INNER={type: vlm, reward_functions: [{name: math, env: math, weight: 1.0}]} -> MISPLACED
~INNER & +INNER={type: reward_model, model_name: m, resources: {gpus_per_node: 1}} -> MISPLACED
"""
SHORT = {
    "INNER": "env.with_tools.environment",
    "MISPLACED": "answers turns, without agents, a GPU, or parts that are sections of env",
}


@pytest.mark.parametrize(("overrides", "said"), cases(MISTAKES, SHORT))
def test_a_mistake_is_named_before_anything_starts(overrides: tuple[str, ...], said: str):
    with pytest.raises(ConfigError, match=pattern(said)):
        load_config(GRPOMasterConfig, CONFIG, list(overrides))

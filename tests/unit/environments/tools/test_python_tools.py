"""Episodes with tools; the calculator computes as Python does, and nothing else."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.environments.code.tools import (
    PythonToolEnvironment,
    Tool,
    ToolCall,
    ToolError,
    calculate,
    find_calls,
    problem_of,
)
from nemo_rl.environments.config import OURS
from nemo_rl.utils.task_formats import CALCULATOR, PYTHON, function_spec
from tests.conversations import answered


def shout(arguments, state) -> str:
    if not arguments["text"]:
        raise ToolError("nothing to shout")
    state["shouts"] = state.get("shouts", 0) + 1
    return arguments["text"].upper() + "!" * state["shouts"]


SHOUT = Tool(function_spec("shout", "Shouts.", {"text": "what"}), shout)


@pytest.fixture(scope="module")
def environment():
    tools, limits = ["calculator", "python", f"{__name__}:SHOUT"], {"time_limit_s": 2.0, "cpu_limit_s": 1}
    made = PythonToolEnvironment({"num_workers": 1, "tools": tools, "sandbox": limits})
    yield made
    made.shutdown()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(environment: PythonToolEnvironment, turns: list[str]) -> list[list]:
    """What the model sees after each turn, the rewards, and whether the episode ended."""
    metadata: list = [{"ground_truth": "12"}]
    told = []
    for turn in turns:
        result = environment.step([answered(turn)], metadata)
        metadata = json.loads(json.dumps(result.metadata))  # it travels, and holds nothing but data
        told.append((result.observations[0]["content"], result.rewards.item(), bool(result.terminateds[0])))
    return [list(column) for column in zip(*told, strict=True)]


def test_an_episode_of_calls_and_an_answer(environment) -> None:
    turns = [
        call("calculator", expression="5+7"),
        "Let me see.\n" + call("python", code="x = 5\nx + 7"),
        call("python", code="print(x * 2)"),
        call("shout", text="hey") + call("shout", text="ho"),
        "It is \\boxed{12}.",
    ]
    seen, rewards, ends = play(environment, turns)
    assert seen[:4] == ["12", "12", "10", "[1] HEY!\n[2] HO!!"]
    assert rewards == [0, 0, 0, 0, 1]
    assert ends == [False, False, False, False, True]


def test_what_is_wrong_with_a_call_is_told_and_the_episode_goes_on(environment) -> None:
    wrong = {
        "<tool_call>{'name': 'calculator'}</tool_call>": "is not JSON",
        "<tool_call>[1]</tool_call>": "names no tool",
        call("calculater", expression="1"): "no tool 'calculater'; there are: calculator, python, shout",
        call("calculator", expr="1"): "needs the argument 'expression'",
        call("calculator", expression=3): "must be of type string",
        call("calculator", expression="import os"): "not an expression",
        call("shout", text=""): "nothing to shout",
        call("python", code="1 / 0"): "ZeroDivisionError",
        call("python", code="while True: pass"): "seconds",
        call("calculator", expression="1") * 6: "only the first 4 calls",
    }
    seen, rewards, ends = play(environment, list(wrong))
    assert [part in text for part, text in zip(wrong.values(), seen, strict=True)] == [True] * len(wrong)
    assert not any(ends) and not any(rewards)


def test_calls_are_found_in_several_styles() -> None:
    specs = {"calculator": CALCULATOR, "python": PYTHON}
    assert find_calls("nothing") == []
    assert find_calls('<tool_call>\n{"name": "a", "arguments": "{\\"b\\": 1}"}') == [ToolCall("a", {"b": 1})]
    assert find_calls("```tool_code\nprint(1)\n```") == [ToolCall("python", {"code": "print(1)\n"})]
    assert problem_of(find_calls('<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>')[0], specs)
    assert problem_of(ToolCall("calculator", {"expression": "1", "more": "2"}), specs)


def test_unknown_tools_are_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="there is no tool 'calc'"):
        OURS["python_tools"](tools=["calc"])
    with pytest.raises(ValueError, match="no module 'nowhere'"):
        PythonToolEnvironment({"tools": ["nowhere:TOOL"]})


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("({}{}{})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), joined, max_leaves=6))
def test_it_agrees_with_python(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="zero"):
            calculate(expression)
    else:
        assert calculate(expression) == expected


REFUSED = [
    "__import__('os').system('true')", "().__class__", "[x for x in (1,)]", "x", "'a' * 9", "True", "1 +", "",
    "9**9**9", "2**-99999", "(-8)**0.5", "1/0", "sqrt(-1)", "exp(9999)", "round(2.5, ndigits=1)",
    "(" * 300 + "1" + ")" * 300, "1+" * 600 + "1", "-" * 200 + "1",
]  # fmt: skip


def test_everything_else_is_refused_with_a_reason() -> None:
    for expression in REFUSED:
        with pytest.raises(ToolError, match=r"\w"):
            calculate(expression)

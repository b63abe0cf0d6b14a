"""Mathematics with tools: the model calls them, reads the results, and ends the episode with its answer.

First the environment, then tools and how to make them, the calls in the model's text, and the calculator.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from nemo_rl.environments.client import Outcome, as_return, excerpt, step_each
from nemo_rl.environments.code.blocks import find_blocks
from nemo_rl.environments.code.environment import describe, shorten
from nemo_rl.environments.code.sandbox.program import Program
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.config import PythonToolsEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.environments.math.environment import MathEnvironment
from nemo_rl.types import EnvironmentFailure, EnvironmentStep, LLMMessageLogType
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.task_formats import CALCULATOR, PYTHON

State = dict[str, Any]
"""The memory of the tools of an episode between calls: plain data, in the episode's metadata."""


class PythonToolsMetadata(TypedDict):
    """The expected answer, and the state of the tools."""

    ground_truth: str
    tool_state: NotRequired[State]


class PythonToolEnvironment(EnvironmentInterface[PythonToolsMetadata]):
    """A turn with calls gets their results as a message of role `tool`; the first turn without one is the answer.

    The result of a wrong call is its problem. The answer is checked against `metadata["ground_truth"]`: reward 1 or 0.
    An exception of a tool fails its conversation, and no call is made twice.
    """

    def __init__(self, cfg: PythonToolsEnvironmentConfig | Mapping[str, Any]) -> None:
        """ValueError for a tool that cannot be imported, or `python` on a machine that cannot isolate programs."""
        self.cfg = PythonToolsEnvironmentConfig.model_validate(cfg)
        self.sandbox = SandboxPool(self.cfg.num_workers, self.cfg.sandbox) if "python" in self.cfg.tools else None
        built_in = {"calculator": calculator}
        if self.sandbox is not None:
            built_in["python"] = python(self.sandbox, self.cfg)
        tools = [built_in[name] if name in built_in else import_tool(name) for name in self.cfg.tools]
        self.tools = {tool.name: tool for tool in tools}
        self.may_repeat_step = built_in.keys() >= set(self.cfg.tools)  # others may have effects
        of_verifier = {"num_workers", "math_verify_impl", "published_rules", "verify_timeout_s"}
        self.verifier = MathEnvironment(self.cfg.model_dump(include=of_verifier))
        self.threads = ThreadPoolExecutor(max_workers=self.cfg.num_workers, thread_name_prefix="tools")
        self.num_calls = self.num_refused = 0

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[PythonToolsMetadata]
    ) -> EnvironmentReturn[PythonToolsMetadata]:
        """Answer the calls of each conversation, or check its answer."""
        calls = [find_calls(str(log[-1]["content"])) for log in message_log_batch]
        states = [dict(known.get("tool_state", {})) for known in metadata]
        answers = [self.threads.submit(self._answer, *turn) for turn in zip(calls, states, strict=True)]
        ends = [i for i, of_turn in enumerate(calls) if not of_turn]
        said, known_of = [message_log_batch[i][-1:] for i in ends], [metadata[i] for i in ends]
        checked = step_each(self.verifier, said, known_of, name="math", executor=self.threads)
        verdicts = dict(zip(ends, checked, strict=True))
        outcomes: list[Outcome] = []
        for i, (answer, known, state) in enumerate(zip(answers, metadata, states, strict=True)):
            if error := answer.exception():
                outcomes.append(EnvironmentFailure(f"a tool raised {error!r} ({excerpt(message_log_batch[i])})"))
                continue
            observation, after = {"role": "tool", "content": answer.result()}, {**known, "tool_state": state}
            going_on = EnvironmentStep(observation=observation, reward=0.0, terminated=False, metadata=after)
            outcomes.append(verdicts.get(i, going_on))
        return as_return(outcomes)

    def _answer(self, calls: list[ToolCall], state: State) -> str:
        """The results of the calls of one turn; tools may change `state`."""
        answered = calls[: self.cfg.max_calls_per_turn]
        return numbered([self._call(call, state) for call in answered], len(calls))

    def _call(self, call: ToolCall, state: State) -> str:
        self.num_calls += 1
        try:
            if problem := problem_of(call, {name: tool.spec for name, tool in self.tools.items()}):
                raise ToolError(problem)
            text = self.tools[call.name].run(call.arguments, state)
        except ToolError as error:
            self.num_refused += 1
            text = f"error: {error}"
        return shorten(text, self.cfg.max_result_characters)

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (not cut off), and of the calls since the last."""
        metrics = {
            "accuracy": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "num_tool_calls": float(self.num_calls),
            "num_refused_tool_calls": float(self.num_refused),
            "num_verifications_timed_out": float(self.verifier.num_timed_out),
        }
        self.num_calls = self.num_refused = self.verifier.num_timed_out = 0
        return batch, metrics

    def shutdown(self) -> None:
        """End the processes of sandbox and verifiers."""
        self.threads.shutdown(wait=True)
        self.verifier.shutdown()
        if self.sandbox is not None:
            self.sandbox.close()


class ToolError(ValueError):
    """The call cannot be answered; the model sees the message."""


@dataclass(frozen=True)
class Tool:
    """`run(arguments, state) -> text` for the model; it may change `state`, and is called from several threads.

    Any exception but ToolError fails the conversation.
    """

    spec: Mapping[str, Any]  # in OpenAI's format: {"type": "function", "function": {"name", "description", ...}}
    run: Callable[[Mapping[str, Any], State], str]

    @property
    def name(self) -> str:
        return self.spec["function"]["name"]


def python(pool: SandboxPool, cfg: PythonToolsEnvironmentConfig) -> Tool:
    """Python in the sandbox.

    With `keep_state` the source of earlier calls runs again, silently, before each new call: an episode has no process
    between two turns. A call that raises or reaches a limit is not kept.
    """

    def run(arguments: Mapping[str, Any], state: State) -> str:
        cells: list[str] = [*state.get("cells", ()), arguments["code"]]
        result = pool.run([Program(cells=cells, echo=True)])[0]
        if cfg.keep_state and result.finished:
            state["cells"] = cells
        return describe(result, cfg.sandbox) or "(no output)"

    return Tool(PYTHON, run)


def import_tool(path: str) -> Tool:
    """The tool behind `package.module:name`: a `Tool`, or a function without arguments that returns one. ValueError
    when there is no such tool."""
    tool = import_object(path, "tool")
    tool = tool if isinstance(tool, Tool) else tool()
    if not isinstance(tool, Tool):
        raise ValueError(f"tool {path!r} is a {type(tool).__name__}, not a nemo_rl.environments.code.tools.Tool")
    return tool


# Calls in the model's text

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class ToolCall:
    """One call. `problem` tells the model why it cannot be answered; it is empty for a valid call."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_calls(text: str) -> list[ToolCall]:
    """The calls of a turn in order: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Without any, fenced blocks marked `tool_code` are calls of `python`. The last mark may be missing: a stop string
    ends the turn before it.
    """
    if calls := CALL.findall(text):
        return [_parse(call.strip()) for call in calls]
    return [ToolCall("python", {"code": block.text}) for block in find_blocks(text) if block.language == "tool_code"]


def numbered(results: list[str], num_calls: int) -> str:
    """The results of the first of `num_calls` calls of a turn, for the model."""
    if num_calls > len(results):
        results = [*results, f"error: only the first {len(results)} calls of a turn are answered"]
    return results[0] if len(results) == 1 else "\n".join(f"[{i}] {text}" for i, text in enumerate(results, 1))


def _parse(text: str) -> ToolCall:
    form = 'write {"name": "<tool>", "arguments": {...}} between <tool_call> and </tool_call>'
    try:
        call = json.loads(text)
        # Some models write the arguments as JSON in a string, as OpenAI's interface does.
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"].strip() or "{}")
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"this call is not JSON ({error}): {form}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem=f"this call names no tool: {form}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], problem=f"the arguments are no JSON object: {form}")
    return ToolCall(call["name"], arguments)


def problem_of(call: ToolCall, specs: Mapping[str, Mapping[str, Any]]) -> str:
    """The problem of a call, by the specifications of the tools in OpenAI's format; "" for a valid call."""
    if call.problem:
        return call.problem
    if call.name not in specs:
        return f"there is no tool {call.name!r}; there are: {', '.join(specs)}"
    parameters = specs[call.name]["function"].get("parameters", {})
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in call.arguments:
            return f"{call.name} needs the argument {name!r}"
    for name, value in call.arguments.items():
        if name not in properties:
            return f"{call.name} has no argument {name!r}; it has: {', '.join(properties)}"
        given = properties[name].get("type", [])
        kinds = [given] if isinstance(given, str) else given  # several, e.g. ["string", "null"]
        if kinds and not any(_has_type(value, kind) for kind in kinds):
            return f"argument {name!r} of {call.name} must be of type {' or '.join(kinds)}"
    return ""


def _has_type(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema, where a boolean is no number. Any value is of an unknown type."""
    if isinstance(value, bool):
        return kind == "boolean" or kind not in TYPES
    return kind not in TYPES or isinstance(value, TYPES[kind])


# Arithmetic from untrusted text, by walking its syntax tree. Nothing is executed.

MAX_CHARACTERS = 1000
MAX_DEPTH = 50
MAX_BITS = 4096  # of an integer: some 1,200 digits

Number = int | float

BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: vars(math)[name] for name in ("sqrt", "exp", "sin", "cos", "tan", "asin", "acos", "atan", "atan2")},
    **{name: vars(math)[name] for name in ("log", "log2", "log10", "floor", "ceil", "gcd", "degrees", "radians")},
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
}


def calculate(expression: str) -> str:
    """The value of an expression with numbers, + - * / // % ** (or ^), parentheses, constants and functions.

    ToolError for any other expression.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:  # the parser has limits of its own on depth
        raise ToolError(f"not an expression: {error}") from error
    try:
        value = _value(tree.body, 0)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ToolError(str(error)) from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ValueError(f"the expression is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _small(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in BINARY:
            return _small(BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        if node.keywords:
            raise ValueError(f"{node.func.id} takes no named arguments")
        return _small(FUNCTIONS[node.func.id](*[_value(argument, depth + 1) for argument in node.args]))
    raise ValueError(f"cannot compute {ast.unparse(node)[:80]!r}: only numbers, operators, {', '.join(FUNCTIONS)}")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError("the power is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the power is not a real number")
    return result


def _small(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return value


calculator = Tool(CALCULATOR, lambda arguments, state: calculate(arguments["expression"]))

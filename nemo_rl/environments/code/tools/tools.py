"""Tools: what a model may call, and how one of your own is found."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.environments.code.environment import describe
from nemo_rl.environments.code.sandbox.limits import Program, SandboxLimits
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.task_formats import CALCULATOR, PYTHON

# -- Arithmetic from untrusted text, by walking its syntax tree: nothing is ever executed.

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

    Raises:
        ValueError: saying what is wrong with it.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:  # the parser has limits of its own on depth
        raise ValueError(f"not an expression: {error}") from error
    try:
        value = _value(tree.body, 0)
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from error
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


State = dict[str, Any]
"""What the tools of an episode remember from call to call: plain data, in the episode's metadata."""


class ToolError(ValueError):
    """The call cannot be answered, and the model is told why."""


@dataclass(frozen=True)
class Tool:
    """`run(arguments, state) -> text` for the model; it may change `state`, and is called from several threads.

    What it raises besides ToolError fails the conversation.
    """

    spec: Mapping[str, Any]  # in OpenAI's format: {"type": "function", "function": {"name", "description", ...}}
    run: Callable[[Mapping[str, Any], State], str]

    @property
    def name(self) -> str:
        return self.spec["function"]["name"]


def calculator() -> Tool:
    """The calculator."""

    def run(arguments: Mapping[str, Any], state: State) -> str:
        try:
            return calculate(arguments["expression"])
        except ValueError as error:
            raise ToolError(str(error)) from error

    return Tool(CALCULATOR, run)


def python(pool: SandboxPool, limits: SandboxLimits, *, keep_state: bool, max_characters: int) -> Tool:
    """Python in the sandbox.

    `keep_state`: a call sees the names that earlier calls of its episode have made. Their source is kept in the state,
    and run again, silently, before each new call: no process lives between two turns, and an episode that is given up
    leaves none. A call that raises or reaches a limit is not kept.
    """

    def run(arguments: Mapping[str, Any], state: State) -> str:
        cells: list[str] = state.get("cells", []) if keep_state else []
        result = pool.run([Program(cells=[*cells, arguments["code"]], echo=True)])[0]
        if keep_state and result.finished:
            state["cells"] = [*cells, arguments["code"]]
        return describe(result, limits, max_characters) or "(no output)"

    return Tool(PYTHON, run)


def import_tool(path: str) -> Tool:
    """The tool behind `package.module:name`: a `Tool`, or a function without arguments that returns one.

    Raises:
        ValueError: when there is none.
    """
    found = import_object(path, "tool")
    tool = found if isinstance(found, Tool) else found()
    if not isinstance(tool, Tool):
        raise ValueError(f"tool {path!r} is a {type(tool).__name__}, not a nemo_rl.environments.code.tools.tools.Tool")
    return tool

"""The built-in tools as models are told of them: the `tools` of a chat template, in OpenAI's format."""

from __future__ import annotations

from typing import Any


def function_spec(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    """A tool whose arguments, name -> description, are required strings."""
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CALCULATOR = function_spec(
    "calculator",
    "Evaluates an arithmetic expression with + - * / // % **, parentheses, pi, e and functions such as sqrt and sin.",
    {"expression": "for example (3 + 4) * sqrt(2)"},
)
PYTHON = function_spec(
    "python",
    "Runs Python code and returns what it prints, and the value of its last line when that is an expression.",
    {"code": "the source"},
)
TOOL_SPECS: dict[str, dict[str, Any]] = {"calculator": CALCULATOR, "python": PYTHON}
"""Name -> specification of each built-in tool."""

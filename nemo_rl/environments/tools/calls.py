"""Calls of tools in what a model says. Pure functions on text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FENCED = re.compile(r"```tool_code[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class ToolCall:
    """One call; `problem` says to the model what is wrong with it, and is empty where it can be made."""

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
    return [ToolCall("python", {"code": block}) for block in FENCED.findall(text)]


def _parse(text: str) -> ToolCall:
    form = 'write {"name": "<tool>", "arguments": {...}} between <tool_call> and </tool_call>'
    try:
        call = json.loads(text)
        # Some models write the arguments as JSON in a string, as OpenAI's interface does.
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"this call is not JSON ({error}): {form}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem=f"this call names no tool: {form}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], problem=f"the arguments are no JSON object: {form}")
    return ToolCall(call["name"], arguments)


def problem_of(call: ToolCall, specs: Mapping[str, Mapping[str, Any]]) -> str:
    """What is wrong with a call, by the specifications of the tools in OpenAI's format; empty: nothing."""
    if call.problem:
        return call.problem
    if call.name not in specs:
        return f"there is no tool {call.name!r}; there are: {', '.join(specs)}"
    parameters = specs[call.name]["function"]["parameters"]
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in call.arguments:
            return f"{call.name} needs the argument {name!r}"
    for name, value in call.arguments.items():
        if name not in properties:
            return f"{call.name} has no argument {name!r}; it has: {', '.join(properties)}"
        kind = properties[name].get("type")
        if kind in TYPES and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
            return f"argument {name!r} of {call.name} must be of type {kind}"
    return ""

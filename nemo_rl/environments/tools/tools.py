"""Tools: what a model may call, and how one of your own is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.environments.program_text import describe
from nemo_rl.environments.sandbox import SandboxPool
from nemo_rl.environments.sandbox_limits import Program, SandboxLimits
from nemo_rl.environments.tools.calculator import calculate
from nemo_rl.utils.tool_specs import CALCULATOR, PYTHON

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
    module_name, _, name = path.partition(":")
    try:
        found = vars(importlib.import_module(module_name))[name]
    except ModuleNotFoundError as error:
        raise ValueError(f"tool {path!r}: no module {error.name!r} can be imported from here") from error
    except KeyError as error:
        raise ValueError(f"tool {path!r}: module {module_name!r} has no {name!r}") from error
    tool = found if isinstance(found, Tool) else found()
    if not isinstance(tool, Tool):
        raise ValueError(f"tool {path!r} is a {type(tool).__name__}, not a nemo_rl.environments.tools.tools.Tool")
    return tool

"""Two small environments of the package `verifiers`, to try `verifiers_env.py` with: sums with a tool, and in turns.

`load_environment` is what `verifiers` looks for in a module; `kind` chooses one.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import verifiers as vf
from datasets import Dataset

from nemo_rl.environments.code.tools import calculate


def calculator(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: For example 3+4.
    """
    return calculate(expression)


class Again(vf.MultiTurnEnv):
    """The model answers a sum, and is asked again while it is wrong."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [vf.UserMessage(content=_text(state["prompt"][-1]))]

    @vf.stop
    async def is_found(self, state: Any, **_: Any) -> bool:
        said = [turn for step in state["trajectory"] for turn in step["completion"]]
        return is_right(said, state["answer"]) > 0


def _role(message: Any) -> str:
    return message["role"] if isinstance(message, dict) else message.role


def _text(message: Any) -> str:
    return str(message["content"] if isinstance(message, dict) else message.content or "")


def is_right(completion: Any, answer: str, **_: Any) -> float:
    """1 if an answer has the right number in its box."""
    said = [_text(turn) for turn in completion if _role(turn) == "assistant"]
    return float(any(f"\\boxed{{{answer}}}" in text for text in said))


def load_environment(kind: Literal["tools", "turns"] = "tools", num_rows: int = 256, seed: int = 0) -> vf.Environment:
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        rows.append({"question": f"{a}+{b}", "answer": str(a + b)})
    dataset, rubric = Dataset.from_list(rows), vf.Rubric(funcs=[is_right])
    if kind == "tools":
        return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[calculator], max_turns=3)
    return Again(dataset=dataset, rubric=rubric, max_turns=3)

"""Two small environments of the package `verifiers`, to try `verifiers_env.py` with: sums with a tool, and guessing.

`load_environment` is what `verifiers` looks for in a module; `kind` chooses one.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """The sum of two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


class Guessing(vf.MultiTurnEnv):
    """The model guesses a number, and hears whether it is larger or smaller."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess, right = _text(messages[-1]).strip(), int(state["answer"])
        hint = "?" if not guess.isdigit() else "+" if int(guess) < right else "-"
        return [vf.UserMessage(content=hint)]

    @vf.stop
    async def is_found(self, state: Any, **_: Any) -> bool:
        return any(_text(step["completion"][-1]).strip() == state["answer"] for step in state["trajectory"])


def _role(message: Any) -> str:
    return message["role"] if isinstance(message, dict) else message.role


def _text(message: Any) -> str:
    return str(message["content"] if isinstance(message, dict) else message.content or "")


def is_right(completion: Any, answer: str, **_: Any) -> float:
    """1 if an answer has the right number as its end."""
    said = [_text(turn) for turn in completion if _role(turn) == "assistant"]
    return float(any(text.rstrip(" .}").endswith(answer) for text in said))


def load_environment(kind: Literal["tools", "turns"] = "tools", num_rows: int = 256, seed: int = 0) -> vf.Environment:
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        question = f"{a}+{b}" if kind == "tools" else "?"
        rows.append({"question": question, "answer": str(a + b)})
    dataset, rubric = Dataset.from_list(rows), vf.Rubric(funcs=[is_right])
    if kind == "tools":
        return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[add], max_turns=3)
    return Guessing(dataset=dataset, rubric=rubric, max_turns=3)

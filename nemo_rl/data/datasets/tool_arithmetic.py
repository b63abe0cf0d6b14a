"""Arithmetic to be solved with a calculator: generated, for the environment of Python tools.

A problem is that of the dataset `arithmetic`, and rows have the column `tools` for the chat template. Training and
validation are split as there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets import arithmetic
from nemo_rl.utils.task_formats import CALCULATOR


def load_tool_arithmetic(cfg: TableConfig) -> list[dict[str, Any]]:
    """The rows a dataset section asks for, with the calculator as their tool; options as in `arithmetic`.

    `kwargs.show_tools: false` leaves the column `tools` out, for models whose chat template shows no tools.

    Raises:
        ValueError: for an unknown or wrong option.
    """
    return _with_tools(cfg, arithmetic.load_arithmetic)


def load_held_out(cfg: TableConfig) -> list[dict[str, Any]]:
    """Each held-out problem once: what `split_validation_size` of a training section means here."""
    return _with_tools(cfg, arithmetic.load_held_out)


def _with_tools(cfg: TableConfig, load: Callable[[TableConfig], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    kwargs = dict(cfg.kwargs)
    shown = kwargs.pop("show_tools", True)
    if not isinstance(shown, bool):
        raise ValueError(f"tool_arithmetic: kwargs.show_tools is true or false, got {shown!r}")
    rows = load(cfg.model_copy(update={"kwargs": kwargs}))
    return [{**row, "tools": [CALCULATOR]} for row in rows] if shown else rows


def demonstrate(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A problem, a call of the calculator, its result, and the answer.

    With `mistake_probability` the call computes one more than it should, and the answer believes the result.
    """
    problem, value = rng.choice(arithmetic.arithmetic_space(max_operand=9, operators="+-", split="all"))
    mistaken = rng.random() < mistake_probability
    call = {"name": "calculator", "arguments": {"expression": problem + "+1" * mistaken}}
    result = str(value + mistaken)
    return [
        {"role": "user", "content": problem},
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"\\boxed{{{result}}}"},
    ]

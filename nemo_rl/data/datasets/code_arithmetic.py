"""Arithmetic to be solved by a program that prints the answer: generated, for the code environment.

A problem is that of the dataset `arithmetic`; the row's test is what the program has to print. Training and validation
are split as there.
"""

from __future__ import annotations

import random
from typing import Any

from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets import arithmetic


def load_code_arithmetic(cfg: TableConfig) -> list[dict[str, Any]]:
    """The rows a dataset section asks for, each with `tests` of one case; options as in `arithmetic`.

    Raises:
        ValueError: for an unknown or wrong option.
    """
    return [_with_tests(row) for row in arithmetic.load_arithmetic(cfg)]


def load_held_out(cfg: TableConfig) -> list[dict[str, Any]]:
    """Each held-out problem once: what `split_validation_size` of a training section means here."""
    return [_with_tests(row) for row in arithmetic.load_held_out(cfg)]


def _with_tests(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "tests": [{"input": "", "output": row["expected_answer"]}]}


def demonstrate(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A problem and a program for it; with `mistake_probability` it prints one more."""
    problem, _ = rng.choice(arithmetic.arithmetic_space(max_operand=9, operators="+-", split="all"))
    mistake = "+1" if rng.random() < mistake_probability else ""
    return [
        {"role": "user", "content": problem},
        {"role": "assistant", "content": f"<code>print({problem}{mistake})</code>"},
    ]

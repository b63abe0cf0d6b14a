"""Generated sums, differences and products of small numbers: a dataset that needs no download.

A problem is the text `a+b`, `a-b` or `a*b` with `0 <= a, b <= max_operand`. The held-out fifth is chosen by a hash of
the text alone, so training and validation never share a problem, whatever the other options are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash

from nemo_rl.config.base import StrictModel
from nemo_rl.data.config import ExampleDatasetConfig, TableConfig
from nemo_rl.data.datasets.files import generated_options

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
HELD_OUT_ONE_IN = 5
DEFAULT_NUM_TRAIN_SAMPLES = 10_000
SPLITS = ("train", "validation", "all")


def is_held_out(problem: str) -> bool:
    """Whether this problem belongs to the validation split."""
    return xxhash.xxh64_intdigest(problem.encode()) % HELD_OUT_ONE_IN == 0


def arithmetic_space(*, max_operand: int, operators: str, split: str) -> list[tuple[str, int]]:
    """Every (problem, answer) of a split ("train", "validation" or "all"), in a fixed order.

    Raises:
        ValueError: for an option out of range, or a split without a single problem.
    """
    unknown = sorted(set(operators) - set(OPERATIONS))
    if unknown or not operators or len(set(operators)) != len(operators):
        raise ValueError(
            f"arithmetic: operators must be some of {' '.join(OPERATIONS)} without repetition, written as one string "
            f"such as '+-'; got {operators!r}"
        )
    if max_operand < 0:
        raise ValueError(f"arithmetic: max_operand must be 0 or more, got {max_operand}")
    if split not in SPLITS:
        raise ValueError(f"arithmetic: split must be one of {', '.join(SPLITS)}, got {split!r}")

    def problems() -> Iterator[tuple[str, int]]:
        for operator in operators:
            for a in range(max_operand + 1):
                for b in range(max_operand + 1):
                    yield f"{a}{operator}{b}", OPERATIONS[operator](a, b)

    space = [(text, value) for text, value in problems() if split == "all" or is_held_out(text) == (split != "train")]
    if not space:
        raise ValueError(
            f"arithmetic: no problem with operators {operators!r} and max_operand {max_operand} falls into split "
            f"{split!r} (one in {HELD_OUT_ONE_IN} is held out for validation): raise max_operand"
        )
    return space


def arithmetic_rows(
    *,
    num_samples: int | None = None,
    max_operand: int = 9,
    operators: str = "+-",
    seed: int = 42,
    split: str = "train",
) -> list[dict[str, str]]:
    """Rows {"problem", "expected_answer"}: the split in random order, again and again until there are `num_samples`.

    `num_samples` defaults to 10,000 for training and to each problem once for validation.

    Raises:
        ValueError: see `arithmetic_space`; also for `num_samples` below 1.
    """
    space = arithmetic_space(max_operand=max_operand, operators=operators, split=split)
    if num_samples is None:
        num_samples = DEFAULT_NUM_TRAIN_SAMPLES if split == "train" else len(space)
    if num_samples < 1:
        raise ValueError(f"arithmetic: num_samples must be 1 or more, got {num_samples}")
    generator = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < num_samples:
        for i in generator.permutation(len(space))[: num_samples - len(rows)]:
            problem, value = space[int(i)]
            rows.append({"problem": problem, "expected_answer": str(value)})
    return rows


def demonstrate_batch(
    rng: random.Random, mistake_probability: float, count: int, *, max_operand: int, operators: str
) -> list[list[dict[str, str]]]:
    """Problems with boxed answers, for the warm-up of tiny models; with `mistake_probability` one too high.

    All problems are drawn before the first mistake. Pretraining, so to speak: the held-out problems are among them, as
    a real model has seen arithmetic before.

    Raises:
        ValueError: see `arithmetic_space`.
    """
    space = arithmetic_space(max_operand=max_operand, operators=operators, split="all")
    batch: list[list[dict[str, str]]] = []
    for problem, value in rng.choices(space, k=count):
        answer = value + (rng.random() < mistake_probability)
        batch.append(_conversation(problem, str(answer)))
    return batch


class _Options(StrictModel):
    num_samples: int | None = None
    max_operand: int = 9
    operators: str = "+-"


def load_arithmetic(cfg: TableConfig) -> list[dict[str, Any]]:
    """The rows a dataset section asks for: `kwargs` {num_samples, max_operand, operators}, `split` and `seed`.

    Where they are learned from as they are (SFT), they have `messages` too.

    Raises:
        ValueError: for an unknown or wrong option.
    """
    options = generated_options(cfg, _Options)
    rows = arithmetic_rows(**options.model_dump(), seed=cfg.seed, split=cfg.split or "train")
    return [with_messages(row) for row in rows] if isinstance(cfg, ExampleDatasetConfig) else rows


def with_messages(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a conversation to learn from: the answer as the environment of mathematics reads it, boxed."""
    return {**row, "messages": _conversation(row["problem"], row["expected_answer"])}


def _conversation(problem: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem}, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]


def load_held_out(cfg: TableConfig) -> list[dict[str, Any]]:
    """Each held-out problem of the same space once: what `split_validation_size` of a training section means here."""
    kwargs = {key: value for key, value in cfg.kwargs.items() if key != "num_samples"}
    return load_arithmetic(cfg.model_copy(update={"split": "validation", "kwargs": kwargs}))

"""Generated tasks of small numbers, which need no download: sums, as text, as programs, with a tool, as preferences.

A problem is the text `a+b`, `a-b` or `a*b` with `0 <= a, b <= max_operand`. A hash of the text alone chooses the
held-out fifth, so training and validation never share a problem, whatever the other options are.

The functions `load_...` of all generated datasets raise ValueError as `generated_options`. The functions
`demonstrate_...` give conversations for the warm-up of tiny models (`data/tiny_model.py`). Held-out problems are among
them: a real model has seen arithmetic before, too.
"""

import itertools
import json
import random
import string
from collections.abc import Callable, Sequence
from operator import add, mul, sub
from typing import Any

import numpy as np
import xxhash
from pydantic import Field

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig
from nemo_rl.data.datasets.files import Options, options_of, require_used_keys
from nemo_rl.data.interfaces import one_turn
from nemo_rl.utils.task_formats import CALCULATOR, fill

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
HELD_OUT_ONE_IN = 5
DEFAULT_NUM_TRAIN_SAMPLES = 10_000
SPLITS = ("train", "validation", "all")


# -- For every generated dataset.


def generated_options(cfg: TableConfig, model: type[Options]) -> Options:
    """The `kwargs` of a generated dataset.

    Raises ValueError for an unknown or invalid option, another split, a file to read, or a key of a column.
    """
    if cfg.data_path is not None:
        raise ValueError(
            f"dataset {cfg.dataset_name!r} is generated and reads no data_path ({cfg.data_path}); to read the file set "
            "dataset_name=null"
        )
    require_used_keys(cfg, (), "the dataset is generated")
    return options_of(cfg, model)


def in_split(text: str, split: str) -> bool:
    """Whether a problem, given by its text, belongs to a split. ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return split == "all" or (xxhash.xxh64_intdigest(text.encode()) % HELD_OUT_ONE_IN == 0) == (split == "validation")


def sampled[T](cfg: TableConfig, space: Sequence[T], num_samples: int | None) -> list[T]:
    """`num_samples` items of `space`: all of them in random order, again and again.

    `num_samples` defaults to 10,000 for training, and otherwise to each item once.
    """
    num_samples = num_samples or (DEFAULT_NUM_TRAIN_SAMPLES if cfg.split in (None, "train") else len(space))
    generator = np.random.default_rng(cfg.seed)
    items: list[T] = []
    while len(items) < num_samples:
        items += [space[i] for i in generator.permutation(len(space))[: num_samples - len(items)].tolist()]
    return items


# -- Sums.


def arithmetic_space(*, max_operand: int, operators: str, split: str) -> list[tuple[str, int]]:
    """Every (problem, answer) of a split ("train", "validation" or "all"), in a fixed order.

    Raises ValueError for an option out of range, or a split without a single problem.
    """
    unknown = sorted(set(operators) - set(OPERATIONS))
    if unknown or not operators or len(set(operators)) != len(operators):
        raise ValueError(
            f"arithmetic: operators must be some of {' '.join(OPERATIONS)} without repetition, written as one string "
            f"such as '+-'; got {operators!r}"
        )
    operands = range(max_operand + 1)
    space = [
        (text, OPERATIONS[operator](a, b))
        for operator, a, b in itertools.product(operators, operands, operands)
        if in_split(text := f"{a}{operator}{b}", split)
    ]
    if not space:
        raise ValueError(
            f"arithmetic: no problem with operators {operators!r} and max_operand {max_operand} falls into split "
            f"{split!r} (one in {HELD_OUT_ONE_IN} is held out for validation): raise max_operand"
        )
    return space


class _Options(StrictModel):
    num_samples: int | None = Field(default=None, ge=1)
    max_operand: int = Field(default=9, ge=0)
    operators: str = "+-"

    def draw(self, cfg: TableConfig) -> list[tuple[str, int]]:
        """(problem, answer) of each row; see `sampled`. ValueError as `arithmetic_space`."""
        space = arithmetic_space(max_operand=self.max_operand, operators=self.operators, split=cfg.split or "train")
        return sampled(cfg, space, self.num_samples)


def load_arithmetic(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows for a dataset section with `kwargs` {num_samples, max_operand, operators}, `split` and `seed`.

    Rows to learn from (SFT) also have `messages`, with the answer boxed as the math environment reads it.
    """
    problems = generated_options(cfg, _Options).draw(cfg)
    rows = [{"problem": problem, "expected_answer": str(value)} for problem, value in problems]
    if not isinstance(cfg, ExampleDatasetConfig):
        return rows
    return [{**row, "messages": one_turn(row["problem"], boxed(row["expected_answer"]))} for row in rows]


def demonstrate_arithmetic(
    rng: random.Random, mistake_probability: float, count: int, *, max_operand: int = 9, operators: str = "+-"
) -> list[list[dict[str, str]]]:
    """`count` problems with boxed answers. With `mistake_probability` an answer is one too high.

    All problems are drawn before the first mistake. Raises ValueError: see `arithmetic_space`.
    """
    space = arithmetic_space(max_operand=max_operand, operators=operators, split="all")
    problems = rng.choices(space, k=count)
    return [one_turn(text, boxed(value + (rng.random() < mistake_probability))) for text, value in problems]


def boxed(value: int | str) -> str:
    """An answer as the math environment reads it."""
    return f"\\boxed{{{value}}}"


def _any_problem(rng: random.Random) -> tuple[str, int]:
    return rng.choice(arithmetic_space(max_operand=9, operators="+-", split="all"))


# -- Preferences: the right answer and a wrong one.


class _PreferenceOptions(_Options):
    margins: bool = False
    max_mistake: int | None = Field(default=None, ge=1)


def load_arithmetic_preference(cfg: TableConfig) -> list[dict[str, Any]]:
    """Problems of the `arithmetic` dataset with the right answer chosen and a wrong one rejected.

    Half of the wrong answers are one too high, the mistake of the tiny models; the others are off by up to three.
    `kwargs`: as in `arithmetic`; `max_mistake: n` for answers that are off by up to n, every mistake equally likely;
    and `margins: true` for a margin as large as the mistake. Raises ValueError for a section that takes no preferences.
    """
    if not isinstance(cfg, PreferenceDatasetConfig):
        raise ValueError(
            f"dataset {cfg.dataset_name!r} holds preferences: it is for the section data of DPO and reward models"
        )
    options = generated_options(cfg, _PreferenceOptions)
    problems = options.draw(cfg)
    generator = np.random.default_rng([cfg.seed, len(problems)])
    largest = 3 if options.max_mistake is None else options.max_mistake
    mistakes = generator.choice([*range(-largest, 0), *range(1, largest + 1)], size=len(problems))
    if options.max_mistake is None:
        mistakes[generator.random(len(problems)) < 0.5] = 1
    rows: list[dict[str, Any]] = []
    for (problem, right), mistake in zip(problems, mistakes.tolist(), strict=True):
        pair = {"prompt": problem, "chosen": boxed(right), "rejected": boxed(right + mistake)}
        rows.append({**pair, "margin": float(abs(mistake))} if options.margins else pair)
    return rows


# -- Programs that print the answer, for the code environment.


def load_code_arithmetic(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows of `arithmetic`, each with `tests` of one case: what the program has to print. Same options."""
    return [{**row, "tests": [{"input": "", "output": row["expected_answer"]}]} for row in load_arithmetic(cfg)]


def demonstrate_code_arithmetic(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A problem and a program for it; with `mistake_probability` the program prints one more."""
    problem, _ = _any_problem(rng)
    mistake = "+1" if rng.random() < mistake_probability else ""
    return one_turn(problem, f"<code>print({problem}{mistake})</code>")


# -- A calculator, for the environment of Python tools.


def load_tool_arithmetic(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows of `arithmetic` with the calculator in their column `tools`; options as in `arithmetic`.

    `kwargs.show_tools: false` omits the column `tools`, for models whose chat template shows no tools.
    """
    kwargs = dict(cfg.kwargs)
    show_tools = kwargs.pop("show_tools", True)
    if not isinstance(show_tools, bool):
        raise ValueError(f"tool_arithmetic: kwargs.show_tools is true or false, got {show_tools!r}")
    rows = load_arithmetic(cfg.model_copy(update={"kwargs": kwargs}))
    return [{**row, "tools": [CALCULATOR]} for row in rows] if show_tools else rows


def demonstrate_tool_arithmetic(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A problem, a call of the calculator, its result, and the answer.

    With `mistake_probability` the call computes one more than it should, and the answer repeats the result.
    """
    problem, value = _any_problem(rng)
    is_mistaken = rng.random() < mistake_probability
    call = {"name": "calculator", "arguments": {"expression": problem + "+1" * is_mistaken}}
    result = str(value + is_mistaken)
    return [
        *one_turn(problem, f"<tool_call>{json.dumps(call)}</tool_call>"),
        {"role": "tool", "content": result},
        {"role": "assistant", "content": boxed(result)},
    ]


# -- Graded sums, which a tiny judge learns. There are no rows: no policy trains on them.

JUDGE_TEMPLATE = "{question}={reference}\n{answer}\n"  # examples/prompts/judge_tiny.txt
RIGHT, WRONG, NO_ANSWER = 10, 2, 0  # scores of a right number, of a wrong one, and of a text without a number
_CHARACTERS = " -0123456789?"


def demonstrate_judgement(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A question for the judge and its reply; with `mistake_probability` a random score."""
    problem, value = _any_problem(rng)
    kind = rng.random()
    said: int | str
    if kind < 0.3:
        said, answer = value, boxed(value)
    elif kind < 0.9:
        said = value + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10)) if rng.random() < 0.7 else rng.randint(-9, 18)
        answer = boxed(said)
    else:
        said, answer = "???", "".join(rng.choices(string.printable[:95], k=rng.randint(0, 12)))
    score = RIGHT if said == value else WRONG if isinstance(said, int) else NO_ANSWER
    if rng.random() < mistake_probability:
        score = rng.choice((RIGHT, WRONG, NO_ANSWER))
    prompt = fill(JUDGE_TEMPLATE, question=problem, answer=answer, reference=str(value))
    # The reply: both numbers as three characters each, the distance of each pair of characters (`m`: equal), and the
    # score. A small model learns distances early. It learns late whether two characters are equal when it sees only
    # these two.
    one, two = f"{value:>3}", f"{said:>3}"
    distances = (_CHARACTERS.index(b) - _CHARACTERS.index(a) for a, b in zip(one, two, strict=True))
    letters = "".join(chr(ord("m") + distance) for distance in distances)
    return one_turn(prompt, f"{one},{two}:{letters} Score: {score}")

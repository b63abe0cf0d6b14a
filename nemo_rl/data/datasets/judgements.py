"""Graded sums: what a tiny judge learns. No rows to train a policy on, only demonstrations for `tiny:judge`."""

from __future__ import annotations

import random
import string

from nemo_rl.data.datasets.arithmetic import arithmetic_space
from nemo_rl.utils.task_formats import fill

TEMPLATE = "{question}={reference}\n{answer}\n"  # examples/prompts/judge_tiny.txt
RIGHT, WRONG, NO_ANSWER = 10, 2, 0  # scores of a right number, of a wrong one, and of a text without a number

CHARACTERS = " -0123456789?"
SPACE = arithmetic_space(max_operand=9, operators="+-", split="all")


def demonstrate(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A question for the judge and its reply; with `mistake_probability` the reply to another answer."""
    problem, value = rng.choice(SPACE)
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
    prompt = fill(TEMPLATE, question=problem, answer=answer, reference=str(value))
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": _reply(str(value), str(said), score)}]


def _reply(reference: str, said: str, score: int) -> str:
    """Both numbers as three characters, how far apart these are (`m`: equal), the score.

    A small model learns differences soon, and whether two characters are equal, which neither tells alone, late.
    """
    one, two = f"{reference:>3}", f"{said:>3}"
    apart = (CHARACTERS.index(b) - CHARACTERS.index(a) for a, b in zip(one, two, strict=True))
    return f"{one},{two}:{''.join(chr(ord('m') + distance) for distance in apart)} Score: {score}"


def boxed(value: int) -> str:
    """A number as the arithmetic models write it."""
    return f"\\boxed{{{value}}}"

"""Tables of cases: those of `named` have names, the others are text: what a user can write and the answer to it.

    grpo.seed=x & policy.precision=int7 -> grpo.seed ... must be a valid integer
    grpo.seed=7 -> fine

A line is overrides with `&` between them, and parts of the message in their order with ` ... ` between them. What
begins with `->`, `&` or `...` goes on with the line before.
"""

import re
from collections.abc import Mapping

import pytest

FINE = "fine"


def named(arguments: str, cases: Mapping[str, object]) -> pytest.MarkDecorator:
    """One test per case: `@named("text, message", {"no colon": ("a", "not valid YAML")})`. A failure has its name."""
    return pytest.mark.parametrize(arguments, list(cases.values()), ids=list(cases))


def lines(text: str) -> list[tuple[str, str]]:
    """Both sides of every line."""
    whole = re.sub(r"\s*\n\s*(?=->|&|\.\.\.)", " ", text).splitlines()
    rows = [line.strip().partition(" -> ") for line in whole if line.strip()]
    assert all(right for _, _, right in rows), rows
    return [(left, right) for left, _, right in rows]


def cases(text: str, short: Mapping[str, str] | None = None) -> list[tuple[tuple[str, ...], str]]:
    """(overrides, message) of every line. `short`: words of the table -> what they stand for, replaced in order."""
    for word, whole in (short or {}).items():
        text = re.sub(rf"\b{word}\b", whole, text)
    return [(tuple(left.split(" & ")), message) for left, message in lines(text)]


def pattern(message: str) -> str:
    """A regular expression for a message of a table."""
    return "(?s)" + ".*".join(re.escape(part) for part in message.split(" ... "))


def said_once(message: str, text: str) -> None:
    """One line of an error has the parts of the message."""
    assert sum(re.search(pattern(message), line) is not None for line in text.splitlines()) == 1, text

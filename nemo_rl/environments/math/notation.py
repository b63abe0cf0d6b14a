"""Ways to write a number that math-verify misreads, each rewritten by a rule with a name.

The rules apply to responses and to ground truths. `docs/guides/environments.md` shows what they change.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_SPACE = r"(?:\s|~|\\[,;:! ])*"
_PERCENT = re.compile(
    rf"(?i)(?<=[\d)}}$]){_SPACE}(?:\\?[%\uff05]|(?:\\text\{{\s*)?(?:per\s?cent(?:age)?|pct)\b(?:\s*\}})?)(?!\s*\d)"
)
_MIXED = re.compile(r"(?<![\d./^_])(?<!\d[ ,])(\d{1,18})[ \u00a0]+(\d{1,18})\s?/\s?(\d{1,18})(?!\d|\.\d|[/^])")
_FULL_STOP = re.compile(r"(?<=\d)\.(?=\s|\Z)(?![^\S\n]*\d)|(?<=[\d})])\.(?=\s*[}$])")


def percent(text: str) -> str:
    r"""A percentage is its number: `50%`, `50\%` and `50 percent` are 50, and not 0.5."""
    return _PERCENT.sub("", text)


def mixed_number(text: str) -> str:
    """An integer before a fraction is added to it: `2 1/2` is `5/2`."""

    def fraction(found: re.Match[str]) -> str:
        whole, numerator, denominator = map(int, found.groups())
        return f"{whole * denominator + numerator}/{denominator}" if denominator else found[0]

    return _MIXED.sub(fraction, text)


def full_stop(text: str) -> str:
    r"""A full stop behind a number, and before none, ends a sentence: `\boxed{7.}` is `\boxed{7}`."""
    return _FULL_STOP.sub("", text)


def degree(text: str) -> str:
    """The sign of degrees is LaTeX's."""
    return text.replace("°", "^\\circ")


RULES: tuple[Callable[[str], str], ...] = (mixed_number, percent, full_stop, degree)


def plain(text: str) -> str:
    """The text with all rules applied."""
    for rule in RULES:
        text = rule(text)
    return text


_MARKER = re.compile(r"(?is).*(?:####|\banswer\s*(?:is\b|:))\s*(?=\S)")
_END = re.compile(r"(?<!\.)\.\s*\Z")


def bare_truth(text: str) -> str:
    """A ground truth without the marker before it (`#### 7`, `The answer is 7`) and the full stop behind it."""
    return _END.sub("", _MARKER.sub("", text).strip())

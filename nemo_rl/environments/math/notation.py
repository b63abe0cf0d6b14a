"""Ways to write a number that math-verify misreads, each rewritten by a rule with a name.

The rules apply to responses and to ground truths. `docs/guides/environments.md` shows what they change.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_SPACE = r"(?:\s|~|\\[,;:! ])*"
_PERCENT = re.compile(
    rf"(?i)(?<=[\d)}}$]){_SPACE}(?:\\?[%\uff05]|(?:\\text\{{\s*)?(?:per\s?cent(?:age)?|pct)\b(?:\s*\}})?)(?!\s*\d)"
)
_MIXED = re.compile(
    r"(?<![\d./^_])(?<!\d[ ,])(\d{1,18})(?:[ \u00a0~]|\\[ ,;:])+(\d{1,18})\s?/\s?(\d{1,18})(?!\d|\.\d|[/^])"
)
_FRACTION = re.compile(r"(?:(?<=\d)()\s*|)([¼½¾⅐-⅞])")
_ROOT = re.compile(r"√(\d+)")
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


def sign(text: str) -> str:
    r"""Unicode's minus and signs are those of ASCII and LaTeX: ° is `^\circ`, 2½ is `2 1/2`, √3 is `\sqrt{3}`."""
    if text.isascii():
        return text
    text = text.replace("\u2212", "-").replace("°", "^\\circ")
    return _ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(_in_ascii, text))


def _in_ascii(fraction: re.Match[str]) -> str:
    behind_a_digit = fraction[1] is not None
    return (" " if behind_a_digit else "") + unicodedata.normalize("NFKC", fraction[2]).replace("\u2044", "/")


RULES: tuple[Callable[[str], str], ...] = (sign, mixed_number, percent, full_stop)


def plain(text: str) -> str:
    """The text with all rules applied."""
    for rule in RULES:
        text = rule(text)
    return text


_MARKER = re.compile(r"(?is)\A.*(?:####|\banswer\s*(?:is\b|:))\s*(?=\S)")
_END = re.compile(r"(?<!\.)\.\s*\Z")


def bare_truth(text: str) -> str:
    """A ground truth without the marker before it (`#### 7`, `The answer is 7`) and the full stop behind it."""
    return _END.sub("", _MARKER.sub("", text).strip("* \t\r\n"))

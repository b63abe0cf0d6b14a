"""Ways to write a number that math-verify misreads, each rewritten by a rule with a name.

The rules apply to responses and to ground truths. `docs/environments/math.md` shows what they change.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_SPACE = r"(?:\s|~|\\[,;:! ])*"
_PERCENT = re.compile(
    rf"(?i)(?<=[\d)}}$]){_SPACE}(?:\\?[%\uff05]|(\\text\{{\s*)?(?:per\s?cent(?:age)?|pct)\b(?(1)\s*\}}))(?!\s*\d)"
)
_MIXED = re.compile(
    r"(?<![\d./^_])(?<!\d[ ,])(\d{1,18})(?:[ \u00a0~]|\\[ ,;:])+(\d{1,18})\s?/\s?(\d{1,18})(?!\d|\.\d|[/^])"
)
_PROPER = r"(?:(\d{1,18})\s?/\s?(\d{1,18})(?!\d|\.\d|[/^])|\\[dt]?frac\s*\{(\d{1,18})\}\s*\{(\d{1,18})\})"
_MIXED_IN_WORDS = re.compile(
    rf"(?im)(^\W{{0,8}}|\b(?:is|answer)\b\W{{0,8}})(\d{{1,18}})\s+and\s+{_PROPER}(?!\W{{0,3}}(?:are|were)\b)"
)
_MIXED_IN_BOX = re.compile(rf"(\\boxed\{{\s*-?)(\d{{1,18}})\s*(?:\band\b|\\text\{{\s*and\s*\}})\s*{_PROPER}(?=\s*\}})")
_STRONG = re.compile(r"(?<![A-Za-z\d*)\]}])(\*\*|__)(?![\s*_])([^*\n]{1,200}?)(?<!\s)\1(?![A-Za-z\d*(])")
_MARKED_NUMBER = re.compile(
    r"(?<![A-Za-z\d*_`)\]}\\])(?<!\d )([*_`])([-\u2212]?\d(?:[\d.,/]*[\d%])?)\1(?![A-Za-z\d*_`(])"
)
_CJK_ANSWER = re.compile(r"(答案|答え|答|是|为|為|等于|等於|は)(?=[-+.$\\]?[\d\\$])")
_FRACTION = re.compile(r"(?:(?<=\d)()\s*|)([¼½¾⅐-⅞])")
_DIGITS = {chr(0xFF10 + digit): str(digit) for digit in range(10)}
_WIDE = str.maketrans({**_DIGITS, "\u2212": "-", "\uff0e": ".", "\uff0f": "/", "\u3002": ". ", "\uff1a": ": "})
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


def mixed_number_in_words(text: str) -> str:
    """As `mixed_number`, for "1 and 1/4" where an answer begins. "The roots are 1 and 1/4" are two numbers."""
    return _MIXED_IN_WORDS.sub(_added, text) if " and" in text else text


def _added(found: re.Match[str]) -> str:
    """Prefix, whole number, and a numerator and a denominator in one of two forms -> prefix and fraction."""
    before, whole, *fraction = (part for part in found.groups() if part is not None)
    numerator, denominator = map(int, fraction)
    proper = 0 < numerator < denominator
    return f"{before}{int(whole) * denominator + numerator}/{denominator}" if proper else found[0]


def emphasis(text: str) -> str:
    """Markdown's marks around a number, or around words in bold, mean nothing: `**5/2**` is `5/2`, `2**3` stays."""
    if "*" not in text and "_" not in text and "`" not in text:
        return text
    return _MARKED_NUMBER.sub(r"\2", _STRONG.sub(r"\2", text))


def full_stop(text: str) -> str:
    r"""A full stop behind a number, and before none, ends a sentence: `\boxed{7.}` is `\boxed{7}`."""
    return _FULL_STOP.sub("", text)


def sign(text: str) -> str:
    r"""Unicode's minus and signs are those of ASCII and LaTeX: ° is `^\circ`, 2½ is `2 1/2`, √3 is `\sqrt{3}`.

    So are the digits and full stops of Chinese and Japanese, whose words stand beside a number without a space.
    """
    if text.isascii():
        return text
    text = _CJK_ANSWER.sub(r"\1 ", text.translate(_WIDE)).replace("°", "^\\circ")
    return _ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(_in_ascii, text))


def _in_ascii(fraction: re.Match[str]) -> str:
    behind_a_digit = fraction[1] is not None
    return (" " if behind_a_digit else "") + unicodedata.normalize("NFKC", fraction[2]).replace("\u2044", "/")


RULES: tuple[Callable[[str], str], ...] = (emphasis, sign, mixed_number, percent, full_stop)


def plain(text: str) -> str:
    """The text with `RULES` applied."""
    for rule in RULES:
        text = rule(text)
    return text


def readings(text: str) -> list[str]:
    """The text with all rules applied, or two such texts, by `_lists_and_sums`."""
    return _lists_and_sums(mixed_number_in_words(plain(text)))


def readings_of_truth(text: str) -> list[str]:
    """As `readings`, of a ground truth, which math-verify reads in a box."""
    return _lists_and_sums(f"\\boxed{{{plain(bare_truth(text))}}}")


def _lists_and_sums(text: str) -> list[str]:
    """Alone in a box, "1 and 1/4" is a list of two numbers in the first text, and a mixed number in the second."""
    added = _MIXED_IN_BOX.sub(_added, text)
    return [text] if added == text else [text, added]


_MARKER = re.compile(r"(?is)\A.*(?:####|\banswer\s*(?:is\b|:))\s*(?=\S)")
_END = re.compile(r"(?<!\.)\.\s*\Z")


def bare_truth(text: str) -> str:
    """A ground truth without the marker before it (`#### 7`, `The answer is 7`) and the full stop behind it."""
    return _END.sub("", _MARKER.sub("", text).strip("* \t\r\n"))

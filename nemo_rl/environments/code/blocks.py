"""Blocks of code in the model's text: fenced ones, and those between `<code>` and `</code>`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# First: a line in fences is no block. A line of tildes alone may underline a heading.
_FENCE = (
    r"```+[^`\n]+```+|(?P<fence>```+)(?P<language>[^`\n]*)(?:\n|\Z)"
    r"|^[^\S\n]*+(?P<tildes>~~~+)(?P<of_tildes>[^\S\n]*[\w{][^\n]*)(?:\n|\Z)"
)
_OPENING = re.compile(rf"(?P<tag>(?<!`)<code>)|{_FENCE}", re.MULTILINE)
_FENCE_ALONE = re.compile(rf"(?P<tag>(?!))|{_FENCE}", re.MULTILINE)
_LANGUAGE = re.compile(r"\w[\w.+#-]*")
_PYTHON = re.compile(r"(?:python|py)[\d.]*", re.IGNORECASE)
_FIRST_LINE = re.compile(r"^([ \t]*)[^\s#]", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """The text of a block. `language` is the first word behind a fence, in small letters, or "<code>"."""

    text: str
    language: str
    is_complete: bool  # False for the last block of a turn that ended before the closing mark

    @property
    def is_python(self) -> bool:
        return self.language == "<code>" or _PYTHON.fullmatch(self.language) is not None


def find_blocks(text: str) -> Iterator[Block]:
    """The blocks of a turn in order. The language of a fence may be missing, and the whole block indented.

    A fence is closed by one that begins or ends its line. A fence between `<code>` and `</code>` is part of the marks.
    """
    return _find(text, _OPENING)


def _find(text: str, opening_marks: re.Pattern[str]) -> Iterator[Block]:
    position = 0
    while opening := opening_marks.search(text, position):
        start, fence = opening.end(), opening["fence"] or opening["tildes"]
        if not fence and not opening["tag"]:
            position = start
            continue
        marks = rf"^[^\S\n]*{fence}{fence[0]}*|{fence}{fence[0]}*[^\S\n]*$" if fence else "</code>"
        closing = re.compile(marks, re.MULTILINE).search(text, start)
        end, position = closing.span() if closing else (len(text), len(text))
        content, is_complete = text[start:end], closing is not None
        if fence:
            language = _LANGUAGE.search((opening["language"] or opening["of_tildes"] or "").lower())
            yield Block(_dedent(content), language[0] if language else "", is_complete)
        elif inner := list(_find(content, _FENCE_ALONE)):
            yield Block(inner[-1].text, "<code>", is_complete or inner[-1].is_complete)
        else:
            yield Block(_dedent(content.strip("\n")), "<code>", is_complete)


def find_program(text: str) -> str | None:
    """The program of a turn: its last block of Python, else its last fence without a language, else None.

    The last block may be open: a stop string may end the turn before the mark.
    """
    blocks = [block for block in find_blocks(text) if block.text.strip()]
    programs = [block for block in blocks if block.is_python] or [block for block in blocks if not block.language]
    return programs[-1].text if programs else None


def _dedent(source: str) -> str:
    """The source without the indentation of its first line that is no comment."""
    first = _FIRST_LINE.search(source)
    return re.sub(rf"(?m)^[ \t]{{1,{len(first[1])}}}", "", source) if first and first[1] else source

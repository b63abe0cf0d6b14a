"""Code in the model's text: fenced blocks, those between `<code>` and `</code>`, and functions that it completes."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

# First: a line in fences is no block. A line of only tildes may underline a heading.
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


# -- Functions, of which the prompt gives the head.

_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # of `ast.parse`
_STATEMENT = re.compile(r"(?:async def|def|class|import|from|@)\b|@")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
INDENTATION = "    "


def complete_function(text: str, head: str, function: str) -> str | None:
    """A program with the function that a turn completes, or None if there is no code for it.

    `head` is the source up to the function's body: imports, its signature and its docstring. The turn has the body
    alone or the whole function, in a block or without one, and may have other text around it.
    """
    block = find_program(text)
    source = text if block is None else block
    if re.search(rf"^\s*(?:async )?def {re.escape(function)}\b", source, re.MULTILINE):
        # The head goes first, with the docstring as body: its imports and other functions may be left out.
        whole = _whole(_dedent(source), function)
        return None if whole is None else f"{head.rstrip()}\n\n\n{whole}"
    first = source.strip("\n")
    # Where the body begins the turn, its first line may have lost its indentation.
    readings = [first, textwrap.indent(first, INDENTATION), INDENTATION + first.lstrip()]
    bodies = [_body(head, reading, until_margin=block is None) for reading in readings]
    return max(filter(None, bodies), key=len, default=None)


def _whole(source: str, function: str) -> str | None:
    """The statements with the function, without the text around them and calls at the margin. None without it."""
    lines = source.splitlines()
    for number, line in enumerate(lines):
        parsed = _longest("", lines[number:]) if _STATEMENT.match(line) else None  # "from there on" is no import
        if parsed is not None and any(isinstance(n, _FUNCTION) and n.name == function for n in parsed[1].body):
            kept = parsed[0].splitlines()
            for node in parsed[1].body:
                if isinstance(node, ast.Expr):  # an example that prints, or a word of text, which is Python too
                    end = node.end_lineno or node.lineno
                    kept[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
            return "\n".join(kept)
    return None


def _body(head: str, body: str, *, until_margin: bool) -> str | None:
    """The head with the body, up to the first line that is no Python or, with `until_margin`, not indented."""
    lines = body.splitlines()
    if until_margin:
        end = next((n for n, line in enumerate(lines) if line.strip() and not line[0].isspace()), len(lines))
        lines = lines[:end]
    parsed = _longest(head.rstrip() + "\n", lines)
    if parsed is None:
        return None
    last, num_given = parsed[1].body[-1], head.rstrip().count("\n") + 1
    has_body = isinstance(last, _FUNCTION) and any(statement.lineno > num_given for statement in last.body)
    return parsed[0] if has_body else None


def _longest(head: str, lines: list[str]) -> tuple[str, ast.Module] | None:
    """The head and as many of the lines as are Python together, and their syntax tree."""
    num_given = head.count("\n")
    while True:
        source = head + "\n".join(lines) + "\n"
        try:
            return source, ast.parse(source)
        except SyntaxError as error:
            end = min(len(lines) - 1, (error.lineno or 0) - num_given - 1)
        except _NO_PYTHON:
            return None
        if end < 0 and not lines:
            return None
        lines = lines[: max(0, end)]


def _dedent(source: str) -> str:
    """The source without the indentation of its first line that is no comment."""
    first = _FIRST_LINE.search(source)
    return re.sub(rf"(?m)^[ \t]{{1,{len(first[1])}}}", "", source) if first and first[1] else source

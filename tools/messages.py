"""Print every message that a user can see, for people who read them: errors, warnings, remarks, lines of a run.

A message is a text in the code that is raised, logged, warned, printed, or yielded by a rule; `{...}` stands for a
value. Docstrings of configuration keys count with `--keys`, because `--help` and error messages quote them.

    python tools/messages.py                      # by file, with lines
    python tools/messages.py --match "no data"    # those that have these words
    python tools/messages.py --keys
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {"print", "warning", "info", "error", "exception", "critical", "warn", "write", "rule", "status", "fail"}
SHOWN |= {"Remark", "Problem", "ConfigError", "remark", "exit", "section", "line", "note"}
MIN_WORDS = 3  # fewer are names, keys and marks


def text_of(node: ast.AST) -> str:
    """The text of a literal, an f-string or a sum of them; "" for anything else."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(
                "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else text_of(part)
                for part in parts
            )
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{text_of(body)} | {text_of(orelse)}".strip(" |")
    return ""


def called(node: ast.Call) -> str:
    """The last name of a called function."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def texts_in(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the longest texts below `node`."""
    text = text_of(node)
    if text:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every message of a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call() as call):
                yield from texts_in(call)
            case ast.Call() if called(node) in SHOWN:
                for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                    yield from texts_in(argument)
            case ast.Yield(value=ast.Tuple() as value):
                yield from texts_in(value)
            case ast.Return(value=ast.Constant() | ast.JoinedStr() | ast.BinOp() as value):
                yield from texts_in(value)
            case ast.Assign(value=ast.Dict() as value) | ast.AnnAssign(value=ast.Dict() as value):
                yield from texts_in(value)


def keys(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, docstring) of every key of a configuration class."""
    for cls in ast.walk(tree):
        for before, node in zip(cls.body, cls.body[1:], strict=False) if isinstance(cls, ast.ClassDef) else ():
            match before, node:
                case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(value))):
                    yield node.lineno, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", action="store_true", help="docstrings of configuration keys instead")
    parser.add_argument("--match", default="", help="a regular expression")
    args = parser.parse_args()
    for path in sorted([*(ROOT / "nemo_rl").rglob("*.py"), *(ROOT / "examples").glob("*.py")]):
        tree = ast.parse(path.read_text())
        found = sorted(set(keys(tree) if args.keys else messages(tree)))
        shown = [
            (line, " ".join(text.split()))
            for line, text in found
            if len(text.split()) >= MIN_WORDS and re.search(args.match, text)
        ]
        if shown:
            print(f"\n{path.relative_to(ROOT)}")
        for line, text in shown:
            print(f"{line:5}  {text}")


if __name__ == "__main__":
    main()

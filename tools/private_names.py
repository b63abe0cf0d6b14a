"""The table of private names in docs/private-names.md: what of other packages this library uses without a promise.

A release of vllm, ray, torch, transformers or megatron may change a private name without a word. The table says why
each is used. A name is private if a part of its path begins with one underscore. It is found in imports, in attributes,
and in texts that name a module. An attribute of an object counts if nothing in `nemo_rl` defines its name, or if
`super()` has it in a class of theirs; whose it is, the table tells by hand, like the reason.

    python tools/private_names.py            write the table anew; what was told by hand is kept
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "private-names.md"
PACKAGES = ("megatron", "ray", "sglang", "torch", "transformers", "vllm")
OF_PYTHON = {"_asdict", "_replace"}  # of named tuples, which have them in public
ASKS = ("getattr", "setattr", "hasattr", "delattr")
_IN_TEXT = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*")


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_"


def nodes_of(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def own_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that a module's classes define: methods, variables with a value, and attributes of `self` and `cls`.

    An annotation alone declares a name of somebody else, but in a dataclass.
    """
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            declared = set[str]()
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield member.name
                elif isinstance(member, ast.Assign):
                    yield from (target.id for target in member.targets if isinstance(target, ast.Name))
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    if member.value is None and not node.decorator_list:
                        declared.add(member.target.id)
                    else:
                        yield member.target.id
            yield from set(attributes_of_self(node)) - declared


def attributes_of_self(tree: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Names of imported modules and of what is imported from them, with their paths."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return found


def path_of(node: ast.expr, imports: dict[str, str]) -> str | None:
    """The path of an attribute of something imported."""
    if isinstance(node, ast.Name):
        return imports.get(node.id)
    if isinstance(node, ast.Attribute) and (base := path_of(node.value, imports)) is not None:
        return f"{base}.{node.attr}"
    return None


def names_in(nodes: list[ast.AST], own: set[str]) -> set[str]:
    """Private names of the packages: paths, and ".name" for attributes of objects."""
    imports, found = imported(nodes), set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(_IN_TEXT.findall(node.value))
        elif isinstance(node, ast.Attribute):
            if (path := path_of(node, imports)) is not None:
                found.add(path)
            elif node.attr not in own | OF_PYTHON:
                found.add(f".{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKS:
            asked = node.args[1]
            if isinstance(asked, ast.Constant) and asked.value not in own:
                found.add(f".{asked.value}")
        elif isinstance(node, ast.ClassDef):
            bases = [path_of(base, imports) or "" for base in node.bases]
            if any(base.startswith(PACKAGES) for base in bases):
                found |= {f".{name}" for name in of_super(node)}
    private = {name.removesuffix(".default") for name in found if any(map(is_private, name.split(".")))}
    named = {name for name in private if name.startswith(".") or name.partition(".")[0] in PACKAGES}
    return {name for name in named if not any(other.startswith(f"{name}.") for other in named)}


def of_super(tree: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value) == "super()"
        ):
            yield node.attr


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def uses() -> dict[str, list[str]]:
    """Files by private name."""
    by_file = {file: nodes_of(file.read_text()) for file in sorted((ROOT / "nemo_rl").rglob("*.py"))}
    own = {name for nodes in by_file.values() for name in own_names(nodes)}
    found: dict[str, list[str]] = {}
    for file, nodes in by_file.items():
        for name in names_in(nodes, own):
            found.setdefault(name, []).append(file.relative_to(ROOT).as_posix())
    return found


HEAD = """\
# Private names

What this library uses of its dependencies without a promise of theirs: a release may change it without a word. So
torch, vLLM and Ray are pinned to the release that was tested, transformers and Megatron Core to a range.
`tools/private_names.py` writes the table from the source, with the reasons that it has; a new name needs one, or a test
fails.

| name | of | used in `nemo_rl/` | why |
|---|---|---|---|
"""


def told() -> dict[str, tuple[str, str]]:
    """Owner and reason by name, as the page has them."""
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name.strip(" `"): (owner.strip(), why.strip()) for name, owner, _, why in rows}


def page(told: dict[str, tuple[str, str]]) -> str:
    rows = []
    for name, files in uses().items():
        owner, why = told.get(name, ("", ""))
        if not name.startswith("."):
            owner = name.partition(".")[0]
        shown = ", ".join(f"`{file.removeprefix('nemo_rl/')}`" for file in files)
        rows.append((owner.partition(".")[0].strip("`"), name, f"| `{name}` | {owner} | {shown} | {why} |\n"))
    return HEAD + "".join(row for _, _, row in sorted(rows))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(told() if PAGE.exists() else {}))
    if missing := [name for name, (owner, why) in told().items() if not owner or not why]:
        sys.exit(f"say in {PAGE} whose these are and why they are used: {', '.join(missing)}")


if __name__ == "__main__":
    main()

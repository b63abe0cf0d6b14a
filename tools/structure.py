"""How large and how tangled the package is: sizes, imports and circles.

    python tools/structure.py                 # the table
    python tools/structure.py --reading       # line counts of the walks in docs/reading.md
    python tools/structure.py --loaded examples/run_grpo_math.py --config ... grpo.max_num_steps=2
                                              # the modules that the processes of this run really load

An import counts wherever it stands: at the top, inside a function, or under `if TYPE_CHECKING`. So does a string that
names a module of the package, or a name in it ("nemo_rl.utils.trackers:start_trackers"), outside of `REGISTRIES`.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nemo_rl.utils.bytecode import use_installed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nemo_rl"
READING = ROOT / "docs" / "reading.md"
NAMED_IN_TEXT = re.compile(r"nemo_rl(\.\w+)+(:\w+)?")
REGISTRIES = {
    # environments
    "nemo_rl.environments.config": {"ENV_REGISTRY"},
    # datasets
    "nemo_rl.data.datasets.registry": {"_PACKAGE"},
    "nemo_rl.data.rows.processors": {"_EXAMPLE_PROCESSORS"},
    "nemo_rl.data.tiny_model": {"DEMONSTRATIONS"},
    # backends
    "nemo_rl.models.policy.lm_policy": {"workers", "DRAFTING_WORKER"},
    "nemo_rl.models.policy.generate": {"workers"},
    "nemo_rl.models.generation.vllm.startup": {"WORKER_EXTENSION"},
    "nemo_rl.models.generation.config": {"ENGINES"},
    # worker classes
    "nemo_rl.models.generation.vllm.generation": {"WORKER", "WORKER_OF_NODE"},
    "nemo_rl.models.generation.sglang.generation": {"WORKER"},
    "nemo_rl.models.generation.sglang.weight_loader": {"LOADER"},
    "nemo_rl.models.generation.hf": {"WORKER"},
    "nemo_rl.rollouts.collector": {"WORKER"},
    "nemo_rl.rollouts.tokenizer_pool": {"WORKER"},
    "nemo_rl.distributed.doctor": {"WORKER"},
    "nemo_rl.algorithms.parts.server": {"WORKER"},
}
"""Module -> its variables that name own code as text: the registries, which import what a run asks for."""
NO_CODE = {
    *(tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
CHECK_FUNCTION = re.compile(r"^_?(check|refuse|validate_|require)|problems$|checks$")


def module_name(path: Path) -> str:
    """`nemo_rl/utils/seeds.py` -> `nemo_rl.utils.seeds`; a folder's `__init__.py` is the folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def blocks(path: Path) -> list[ast.AST]:
    """Statements and exception handlers of a file at any depth. Expressions, which hold none, are not visited."""
    found: list[ast.AST] = list(parsed(path).body)
    for node in found:  # grows while it is read
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, part, ())
    return found


@cache
def imports_as_text(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every string outside of `REGISTRIES` that names a module of the package, or a name in it."""
    registries = REGISTRIES.get(module_name(path), set())
    found: list[tuple[int, str]] = []
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in registries for target in targets):
                continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED_IN_TEXT.fullmatch(node.value):
            name = node.value.partition(":")[0]
            while name not in modules():
                name = name.rpartition(".")[0]
            if name not in ("nemo_rl", module_name(path)):
                found.append((node.lineno, name))
        waiting += ast.iter_child_nodes(node)
    return found


@cache
def num_tokens(path: Path) -> int:
    """Tokens of code: without comments, docstrings, line ends and indentation."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in blocks(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        return sum(token.type not in NO_CODE and token.start not in docstrings for token in tokens)


@cache
def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of the package that a file imports."""
    found: set[str] = set()
    for node in blocks(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & modules().keys()) | ({node.module} if whole - modules().keys() else set())
    return frozenset(found & modules().keys() | {module for _, module in imports_as_text(path)})


def reached_from(path: Path, *, leave_out: str) -> list[str]:
    """Modules with content that importing `path` can reach, those with `leave_out` in their name left out."""
    reached: set[str] = set()
    waiting = list(imports(path))
    while waiting:
        name = waiting.pop()
        if name not in reached and leave_out not in name:
            reached.add(name)
            waiting += imports(modules()[name])
    return sorted(name for name in reached if num_lines(modules()[name]))


def circles() -> list[list[str]]:
    """Groups of modules that import each other: strongly connected components (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(imports(modules()[name])):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            position = stack.index(name)
            if len(members := stack[position:]) > 1:
                found.append(sorted(members))
            del stack[position:]

    for name in modules():
        if name not in order:
            visit(name)
    return found


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in blocks(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def check_function_lines() -> int:
    """Lines of functions whose name says that they check."""
    return sum(
        length(node) for path in modules().values() for node in functions(path) if CHECK_FUNCTION.search(node.name)
    )


def trainer_chain() -> list[str]:
    """The longest chain of base classes from a trainer of `nemo_rl/algorithms` to its base."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for name, path in modules().items()
        if name.startswith("nemo_rl.algorithms")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }

    def chain(name: str) -> list[str]:
        return [name, *max((chain(base) for base in bases[name] if base in bases), key=len, default=[])]

    return max((chain(name) for name in bases if name.endswith("Trainer")), key=len)


def catches_everything(node: ast.ExceptHandler) -> bool:
    return node.type is None or bool(
        {"Exception", "BaseException"} & {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
    )


def broad_excepts() -> int:
    return sum(
        isinstance(node, ast.ExceptHandler) and catches_everything(node)
        for path in modules().values()
        for node in blocks(path)
    )


def walks() -> dict[str, list[str]]:
    """Heading of `docs/reading.md` -> files of its walk, in order."""
    found: dict[str, list[str]] = {}
    for line in READING.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            files = found.setdefault(line[3:].strip(), [])
        elif match := re.match(r"\|[^|]*?\[?`((?:nemo_rl|examples)/[^`]+\.py)`", line):
            files.append(match.group(1))
    return {heading: files for heading, files in found.items() if files}


def structure() -> dict[str, float]:
    """Every number of the table by name."""
    reached = reached_from(ROOT / "examples" / "run_grpo_math.py", leave_out="megatron")
    folders: dict[Path, int] = {}
    for path in modules().values():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    lines = sum(num_lines(path) for path in modules().values())
    tokens = sum(num_tokens(path) for path in modules().values())
    walk = next(iter(walks().values()), []) if READING.is_file() else []
    return {
        "lines of nemo_rl": lines,
        "tokens of code": tokens,
        "tokens of code in a line": round(tokens / lines, 1),
        "files of nemo_rl": len(modules()),
        "modules that run_grpo_math.py reaches": len(reached),
        "lines that run_grpo_math.py reaches": sum(num_lines(modules()[name]) for name in reached),
        "files of the GRPO walk": len(walk),
        "lines of the GRPO walk": sum(num_lines(ROOT / file) for file in walk),
        "files in the largest folder": max(folders.values()),
        "import circles": len(circles()),
        "imports as text outside of registries": sum(len(imports_as_text(path)) for path in modules().values()),
        "lines of check functions": check_function_lines(),
        "classes from a trainer to its base": len(trainer_chain()),
        "broad excepts in 1,000 lines": round(1000 * broad_excepts() / lines, 2),
        "lines of tests": sum(num_lines(path) for path in (ROOT / "tests").rglob("*.py")),
    }


def loaded_by(command: Sequence[str]) -> list[Path]:
    """Modules with content that the processes of a command load, found by the bytecode that they leave."""
    with tempfile.TemporaryDirectory() as folder:
        sys.pycache_prefix = folder
        use_installed(*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        subprocess.run([sys.executable, *command], check=True, env=environment)
        compiled = Path(folder, *ROOT.parts[1:])
        files = sorted(file.relative_to(compiled) for file in compiled.glob("nemo_rl/**/*.pyc"))
    paths = [ROOT / file.parent / f"{file.name.partition('.')[0]}.py" for file in files]  # `name.cpython-312.pyc`
    return [path for path in paths if num_lines(path)]


def print_walks() -> None:
    for heading, files in walks().items():
        print(f"{heading}: {len(files)} files, {sum(num_lines(ROOT / file) for file in files):,} lines")
        for file in files:
            print(f"    {num_lines(ROOT / file):5,}  {file}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print how large and how tangled the package is.")
    parser.add_argument("--reading", action="store_true", help="line counts of the walks in docs/reading.md")
    parser.add_argument("--loaded", nargs=argparse.REMAINDER, metavar="SCRIPT", help="modules that a run really loads")
    arguments = parser.parse_args()
    if arguments.reading:
        print_walks()
        return 0
    if arguments.loaded:
        files = loaded_by(arguments.loaded)
        sizes = sum(map(num_lines, files)), sum(map(num_tokens, files))
        print("\n".join(map(module_name, files)))
        print(f"{len(files)} modules, {sizes[0]:,} lines, {sizes[1]:,} tokens of code")
        return 0
    for name, value in structure().items():
        print(f"{name:40s} {value:>8,}")
    for circle in circles():
        print("circle:", ", ".join(circle))
    print("longest chain of trainers:", " -> ".join(trainer_chain()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

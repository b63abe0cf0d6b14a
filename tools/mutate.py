"""Does a test fail when the code is wrong? Changes one place of a function at a time and runs the tests aimed at it.

    python tools/mutate.py                                # 200 places of all groups, drawn by seed 1
    python tools/mutate.py --group losses --sample 0      # every place of one group
    python tools/mutate.py --at nemo_rl/distributed/packing.py:57

A change is an operator, a comparison, a constant, a condition or a statement. Messages, logs, assertions and
annotations are left alone. The tests are collected once, in a copy of the tree; each mutant is a fork in which the
function has the code of the changed source, which is also written into the copy for processes that a test starts. The
tests that call the function in their own process come first. A mutant is killed when a test fails, or takes longer than
the limit.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Group:
    """Files, and the tests that are to notice a change in them; `needs_gpu`: what only tests on a GPU call."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    needs_gpu: tuple[str, ...] = ()


LOSSES = ("tests/unit/algorithms/losses", "tests/unit/test_loss_invariance.py", "tests/parity/test_trl.py")
GROUPS = {
    "losses": Group(("nemo_rl/algorithms/losses/*.py",), LOSSES),
    "advantages": Group(
        ("nemo_rl/algorithms/plan/advantages.py", "nemo_rl/algorithms/plan/rewards.py"),
        (
            "tests/unit/algorithms/test_advantages.py",
            "tests/unit/algorithms/test_grpo.py",
        ),
    ),
    "packing": Group(
        ("nemo_rl/distributed/packing.py", "nemo_rl/algorithms/plan/batch.py"),
        (
            "tests/unit/distributed/test_packing.py",
            "tests/unit/algorithms/test_rollout_batch.py",
            "tests/unit/algorithms/test_trainer.py",
        ),
    ),
    "weight transfer": Group(
        tuple(f"nemo_rl/refit/{name}.py" for name in ("buffers", "fingerprint", "layout", "shard_plan", "transfer")),
        (
            "tests/unit/refit/test_weight_transfer.py",
            "tests/unit/refit/test_shards.py",
            "tests/unit/refit/test_collective_buffer.py",
        ),
        needs_gpu=("CudaIpcBuffer", "device_key"),
    ),
    "seeds": Group(("nemo_rl/utils/seeds.py",), ("tests/unit/utils/test_seeds.py",)),
    "checkpoint": Group(
        tuple(f"nemo_rl/utils/checkpoint/{name}.py" for name in ("manager", "manifest", "tensors")),
        ("tests/unit/utils/test_checkpoint.py", "tests/unit/policy/test_policy_checkpoint.py"),
    ),
}


# -- mutants


@dataclass(frozen=True)
class Mutant:
    """The text that stands instead of [start, stop) of a file, in bytes, inside a function or method."""

    group: str
    file: str
    function: str
    line: int
    start: int
    stop: int
    before: str
    after: str


SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Continue: ast.Break,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "amin": "amax", "amax": "amin"}


def changed(node: ast.AST) -> Iterator[ast.AST | None]:
    """Other nodes to stand in its place; None is nothing."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            new.ops = [SWAPS[type(op)]()]
            yield new
        case ast.BinOp(op=ast.Div(), right=ast.JoinedStr() | ast.Constant(value=str())):
            return  # a path
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            new.op = SWAPS[type(op)]()
            yield new
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.IfExp(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
            yield new
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            new.func = ast.Name(NAMES[name])
            yield new
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in NAMES:
            function.attr = NAMES[name]
            yield new
        case ast.Call(func=ast.Attribute(attr="detach" | "float" | "contiguous" | "abs" | "clamp", value=value)):
            yield value
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Continue():
            yield ast.Break()
        case ast.Break() | ast.Raise() | ast.AugAssign():
            yield None
        case ast.Expr(value=ast.Call()):
            yield None


def is_left_alone(node: ast.AST) -> bool:
    """Code that no test is asked to see: messages, logs, assertions, and code for type checkers."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "console")))):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.keyword(arg="strict"):  # of zip: an assertion
            return True
    return False


def places(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that a change may replace."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params") or (
            name == "exc" and isinstance(node, ast.Raise)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_left_alone(child):
                yield child
                yield from places(child)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def mutants_of(group: str, file: Path) -> Iterator[Mutant]:
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function, definition in functions(ast.parse(source)):
        if function.startswith(GROUPS[group].needs_gpu):
            continue
        body = ast.Module(body=definition.body, type_ignores=[])
        negated = [(node.test, ast.UnaryOp(ast.Not(), node.test)) for node in places(body) if isinstance(node, ast.If)]
        replaced = [(node, new) for node in places(body) for new in changed(node)]
        for node, new in [*negated, *replaced]:
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None and node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            text = "pass" if new is None else ast.unparse(ast.fix_missing_locations(new))
            after = f"({text})" if isinstance(node, ast.expr) else text
            before = " ".join(source[start:stop].decode().split())
            yield Mutant(group, str(file.relative_to(ROOT)), function, node.lineno, start, stop, before, after)


def all_mutants() -> list[Mutant]:
    files = [(name, file) for name, group in GROUPS.items() for text in group.files for file in sorted(ROOT.glob(text))]
    return [mutant for name, file in files for mutant in mutants_of(name, file)]


# -- in the fork


def code_of(module: CodeType, function: str) -> CodeType:
    """The code of a function in the code of its module."""
    code = module
    for name in function.split("."):
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return code


def plain(member: Any) -> FunctionType:
    """The function inside what decorators made of it."""
    while not isinstance(member, FunctionType) or hasattr(member, "__wrapped__"):
        if isinstance(member, property):
            member = member.fget
        else:
            member = member.__wrapped__ if hasattr(member, "__wrapped__") else member.__func__
    return member


def function_of(module: ModuleType, name: str) -> FunctionType:
    owner: Any = module
    *classes, last = name.split(".")
    for part in classes:
        owner = vars(owner)[part]
    return plain(vars(owner)[last])


def module_of(mutant: Mutant) -> ModuleType:
    return importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))


SEEN: set[str] = set()  # functions that were called, as "file name"


def watch_calls(file: str) -> None:
    """From now on every function of a file enters itself in SEEN."""
    tree = ast.parse(Path(file).read_bytes())
    names = dict(functions(tree))
    for name, definition in names.items():
        definition.body.insert(0, ast.parse(f"__seen__({f'{file} {name}'!r})").body[0])
    code = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    vars(module)["__seen__"] = SEEN.add
    for name in names:
        with suppress(AttributeError, KeyError):  # what is no plain function in the end
            function_of(module, name).__code__ = code_of(code, name)


def changed_code(mutant: Mutant) -> CodeType:
    """The code of a mutant's function."""
    source = Path(mutant.file).read_bytes()
    source = source[: mutant.start] + mutant.after.encode() + source[mutant.stop :]
    module = compile(source, mutant.file, "exec", dont_inherit=True)
    return code_of(module, mutant.function)


@contextmanager
def written(mutant: Mutant) -> Iterator[None]:
    """The changed file stands in the copy of the tree, which is the working directory."""
    path = Path(mutant.file)
    source, times = path.read_bytes(), path.stat()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
    os.utime(path, (times.st_atime, times.st_mtime + 10))  # bytecode of the file as it was is stale
    try:
        yield
    finally:
        path.write_bytes(source)
        os.utime(path, (times.st_atime, times.st_mtime))


def fork(work: Callable[[], bool], limit_s: float) -> bool:
    """The result of `work` in a fork; False after the limit."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


class Loop:
    """A plugin that runs the tests once, then for every mutant those that called its function; all where none did."""

    def __init__(self, mutants: list[Mutant], report: Path) -> None:
        self.mutants = mutants
        self.report = report
        self.callers: dict[str, list[str]] = defaultdict(list)  # by function, of this process alone
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        watched = self.report.with_suffix(".watched")

        def watch() -> bool:
            for file in {mutant.file for mutant in self.mutants}:
                watch_calls(file)
            for item in session.items:
                failed = session.testsfailed
                self._run(session, [item])
                if session.testsfailed > failed:
                    del self.seconds[item.nodeid]
            watched.write_text(json.dumps([self.callers, self.seconds]))
            return True

        if not fork(watch, 1200):
            raise SystemExit(f"these tests take more than 20 minutes: {session.config.args}")
        callers, self.seconds = json.loads(watched.read_text())
        sound = [item for item in session.items if item.nodeid in self.seconds]
        for item in session.items:
            if item not in sound:
                print(f"left out, as it fails without any change: {item.nodeid}", file=sys.stderr, flush=True)
        limit_s = 20 + 3 * sum(self.seconds.values())
        for mutant in self.mutants:
            direct = set(callers.get(f"{mutant.file} {mutant.function}", ()))
            items = sorted(sound, key=lambda item: (item.nodeid not in direct, self.seconds[item.nodeid]))

            code = changed_code(mutant)

            def survives(mutant: Mutant = mutant, items: list[pytest.Item] = items, code: CodeType = code) -> bool:
                function_of(module_of(mutant), mutant.function).__code__ = code
                self._run(session, items)
                return session.testsfailed == 0

            with written(mutant):
                survived = fork(survives, limit_s)
            with self.report.open("a") as report:
                report.write(json.dumps([asdict(mutant), survived]) + "\n")
        return True

    def _run(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Until a test fails."""
        for number, item in enumerate(items):
            started = time.monotonic()
            following = items[number + 1] if number + 1 < len(items) else None
            SEEN.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.seconds[item.nodeid] = time.monotonic() - started
            for function in SEEN:
                self.callers[function].append(item.nodeid)
            if session.testsfailed:
                return


def judged(group: str, mutants: list[Mutant], folder: Path) -> list[bool]:
    """Which of the mutants of a group were killed."""
    report = folder / f"{group.replace(' ', '_')}.jsonl"
    report.unlink(missing_ok=True)
    arguments = ["-q", "-n0", "-p", "no:cacheprovider", *GROUPS[group].tests]
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os._exit(int(pytest.main(arguments, plugins=[Loop(mutants, report)])))
    os.waitpid(child, 0)
    killed = []
    for line in report.read_text().splitlines():
        mutant, survived = json.loads(line)
        killed.append(not survived)
        if survived:
            print(f"survived {mutant['file']}:{mutant['line']}: {mutant['before'][:90]}  ->  {mutant['after'][:90]}")
    assert len(killed) == len(mutants), f"{group}: {len(killed)} of {len(mutants)} mutants were tried"
    return killed


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", action="append", choices=GROUPS, help="all of them")
    parser.add_argument("--sample", type=int, default=200, help="how many places; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at", action="append", metavar="FILE:LINE", help="the changes of one line")
    parser.add_argument("--least", type=float, default=0.85, help="share that must be killed (exit status 1)")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "mutants", help="folder of the reports")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    mutants = [mutant for mutant in all_mutants() if not args.group or mutant.group in args.group]
    print(f"{len(mutants)} places, seed {args.seed}", flush=True)
    if args.at:
        mutants = [mutant for mutant in mutants if f"{mutant.file}:{mutant.line}" in args.at]
    elif args.sample and args.sample < len(mutants):
        mutants = random.Random(args.seed).sample(mutants, args.sample)
    with tempfile.TemporaryDirectory(prefix="mutants_") as tree:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in map(Path, listed.splitlines()):
            (Path(tree) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(tree) / name)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = tree
        sys.path[:] = [tree, *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, ROOT / "tools"))]
        killed = {
            group: judged(group, [mutant for mutant in mutants if mutant.group == group], args.out)
            for group in dict.fromkeys(mutant.group for mutant in mutants)
        }
    killed["all"] = [each for of_group in killed.values() for each in of_group]
    for group, which in killed.items():
        print(f"{sum(which):4d} of {len(which):4d} killed, {sum(which) / len(which):4.0%}  {group}")
    raise SystemExit(sum(killed["all"]) < args.least * len(mutants))


if __name__ == "__main__":
    main()

"""The structure of the package, kept by tests: who may import whom, and how large and how plain the code stays.

Every failure lists `file:line: what is wrong`, and the message of the test says what to do instead.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.structure import blocks, module_name, parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_rl"
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100

# Imports go down only. The longest matching prefix decides.
LEVELS = {
    "nemo_rl.types": 0,
    "nemo_rl.config": 0,
    "nemo_rl.utils": 0,
    "nemo_rl.distributed": 1,
    "nemo_rl.refit": 1,
    "nemo_rl.data": 2,
    "nemo_rl.environments": 2,
    "nemo_rl.models.policy": 2,
    "nemo_rl.models.generation": 2,
    "nemo_rl.refit.sync": 3,
    "nemo_rl.rollouts": 3,
    "nemo_rl.algorithms": 4,
    "nemo_rl.evals": 4,
    "nemo_rl.report": 4,
    "nemo_rl.compat": 4,
    "nemo_rl.compat_calls": 4,
}
# Within level 0, `utils` may use `types` and `config`, and those use nothing.
LEVEL_0_MAY_IMPORT = {
    "nemo_rl.utils": {"nemo_rl.types", "nemo_rl.config"},
    "nemo_rl.types": set(),
    "nemo_rl.config": set(),
}

# Heavy or optional packages: the only files that may import them, at any depth.
ENGINE_FILES = {
    "vllm": ("models/generation/vllm/*.py",),
    "megatron": ("models/policy/megatron/*.py",),
    "transformer_engine": ("models/policy/megatron/*.py",),
}
# Never at the top of a module: imported where they are switched on.
ONLY_INSIDE_FUNCTIONS = {"wandb", "mlflow", "swanlab", "trackio", "tensorboard", "matplotlib"}
# Configuration is read by `--help`; these would take seconds.
NOT_IN_CONFIG = {"torch", "ray", "vllm", "transformers", "datasets"}
RAY_FREE = ("types.py", "config/*.py", "data/*.py", "data/*/*.py", "algorithms/losses/*.py", "algorithms/plan/*.py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def scripts() -> list[Path]:
    return sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or base.is_dir()


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute module of every import, inside functions and TYPE_CHECKING too."""
    for node in blocks(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{where(path, node.lineno)}: write imports absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if node.module.startswith("nemo_rl") and is_module(full) else node.module


def imports_at_run_time_top(path: Path) -> Iterator[tuple[int, str]]:
    """Imports that happen when the module is imported: not in functions, not under `if TYPE_CHECKING`."""

    def walk(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                yield from walk(node.orelse)
                continue
            yield node
            yield from walk([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])

    for node in walk(parsed(path).body):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def package_of(module: str) -> str | None:
    return max((prefix for prefix in LEVELS if f"{module}.".startswith(f"{prefix}.")), key=len, default=None)


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.relative_to(PACKAGE).match(pattern) for pattern in patterns)


def report(problems: list[str], advice: str) -> None:
    assert not problems, advice + "\n  " + "\n  ".join(problems)


def forbidden(importer: str, imported: str) -> bool:
    """Whether `importer`, a module of the package, must not import `imported`, another one."""
    source, target = package_of(importer), package_of(imported)
    assert source is not None, f"{importer}: give its package a level in LEVELS"
    assert target is not None, f"{imported} (imported by {importer}): give its package a level in LEVELS"
    if source == target:
        return False
    last = imported.rpartition(".")[2]
    # The typed configuration of one owner may hold another's: policy.generation, and all of them in algorithms.
    if importer.endswith(".config") and last == "config" and LEVELS[target] <= LEVELS[source]:
        return False
    if LEVELS[source] == 0:
        return target not in LEVEL_0_MAY_IMPORT[source]
    if (source, target) == ("nemo_rl.refit", "nemo_rl.distributed"):
        return False
    if LEVELS[source] == 3 and LEVELS[target] == 2:
        return last not in ("interfaces", "config", "lm_policy")  # the last is the interface of a policy
    if LEVELS[source] == 4 and LEVELS[target] == 4:
        return False
    return LEVELS[target] >= LEVELS[source]


@pytest.mark.parametrize(
    ("importer", "imported", "expected"),
    [
        ("nemo_rl.utils.logger", "nemo_rl.types", False),
        ("nemo_rl.config.loader", "nemo_rl.utils.logger", True),
        ("nemo_rl.utils.venvs", "nemo_rl.distributed.virtual_cluster", True),
        ("nemo_rl.models.policy.lm_policy", "nemo_rl.distributed.worker_groups", False),
        ("nemo_rl.models.policy.lm_policy", "nemo_rl.models.generation.interfaces", True),
        ("nemo_rl.models.policy.config", "nemo_rl.models.generation.config", False),
        ("nemo_rl.data.rows.processors", "nemo_rl.environments.registry", True),
        ("nemo_rl.refit.sync", "nemo_rl.models.policy.lm_policy", False),
        ("nemo_rl.refit.sync", "nemo_rl.models.policy.worker", True),
        ("nemo_rl.rollouts.collector", "nemo_rl.models.generation.vllm.generation", True),
        ("nemo_rl.rollouts.collector", "nemo_rl.algorithms.config.grpo", True),
        ("nemo_rl.algorithms.grpo", "nemo_rl.models.policy.lm_policy", False),
    ],
)
def test_the_rule_of_imports_itself(importer, imported, expected):
    assert forbidden(importer, imported) is expected


def test_imports_go_down_only():
    problems = []
    for path in sources():
        for line, module in imports_of(path):
            if path == PACKAGE / "__init__.py" and module == "nemo_rl.compat":  # imports nothing itself
                continue
            # `nemo_rl`, `nemo_rl.models`: the empty packages themselves
            if module.split(".")[0] != "nemo_rl" or module in ("nemo_rl", "nemo_rl.models"):
                continue
            if forbidden(module_name(path), module):
                problems.append(f"{where(path, line)}: imports {module}")
    report(
        problems, "Imports go down only (docs/overview.md, package levels). Pass the object in, or move the code down:"
    )


def test_engines_are_imported_only_in_their_own_files():
    problems = [
        f"{where(path, line)}: imports {module}"
        for path in [*sources(), *ROOT.glob("examples/**/*.py")]
        for line, module in imports_of(path)
        if (engine := module.split(".")[0]) in ENGINE_FILES
        and not (path.is_relative_to(PACKAGE) and matches(path, ENGINE_FILES[engine]))
    ]
    report(problems, "An engine is imported only inside its worker and loader files; go through the interface:")


def test_optional_services_are_imported_where_they_are_switched_on():
    problems = [
        f"{where(path, line)}: imports {module}"
        for path in sources()
        for line, module in imports_at_run_time_top(path)
        if ONLY_INSIDE_FUNCTIONS & set(module.split("."))
    ]
    report(problems, "Import it inside the function that runs when it is switched on:")


def test_configuration_imports_nothing_heavy():
    problems = [
        f"{where(path, line)}: imports {module}"
        for path in sources()
        if path.name == "config.py" or path.parent == PACKAGE / "config" or path == PACKAGE / "types.py"
        for line, module in imports_at_run_time_top(path)
        if module.split(".")[0] in NOT_IN_CONFIG
    ]
    report(problems, "`--help` reads this file; import under TYPE_CHECKING or move the code:")


def test_pure_packages_do_not_know_ray():
    problems = [
        f"{where(path, line)}: imports {module}"
        for path in sources()
        if matches(path, RAY_FREE)
        for line, module in imports_of(path)
        if module.split(".")[0] == "ray"
    ]
    report(problems, "ray belongs where actors are spawned or called:")


@pytest.mark.parametrize("module", ["nemo_rl.algorithms.config.grpo", "nemo_rl.config.cli"])
def test_reading_a_configuration_loads_no_heavy_package(module):
    code = f"import sys, {module}; print(*sorted({NOT_IN_CONFIG!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"importing {module} pulls {done.stdout}"


def test_files_and_functions_stay_small():
    problems = []
    for path in [*sources(), *scripts()]:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            problems.append(f"{where(path, 1)}: {num_lines} lines")
        for node in blocks(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    problems.append(f"{where(path, node.lineno)}: {node.name} has {num_lines} lines")
    advice = (
        f"A file has at most {MAX_FILE_LINES} lines, a function {MAX_FUNCTION_LINES}. Split by phase or by carrier:"
    )
    report(problems, advice)


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    if f"{name}(" not in path.read_text(encoding="utf-8"):
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def test_nothing_prints():
    problems = [f"{where(path, node.lineno)}: print()" for path in sources() for node in calls(path, "print")]
    report(problems, "Use logging.getLogger(__name__), or the console for what a person should see:")


def test_no_attribute_is_read_with_a_fallback():
    problems = [
        f"{where(path, node.lineno)}: getattr with a default"
        for path in sources()
        for node in calls(path, "getattr")
        if len(node.args) == 3
    ]
    report(problems, "Declare the attribute; a misspelt name must fail:")


def test_no_exception_is_swallowed():
    """`except Exception` is right only where everything is raised again after cleaning up."""
    problems = []
    for path in sources():
        for node in blocks(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = (
                {"everything"} if node.type is None else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            )
            raises_again = isinstance(node.body[-1], ast.Raise)
            if caught & {"everything", "Exception", "BaseException"} and not raises_again:
                problems.append(f"{where(path, node.lineno)}: catches {', '.join(sorted(caught))}")
    report(problems, "Name the errors that can happen here, or end the handler in `raise`:")


def test_packages_are_empty_files():
    problems = [
        where(path, 1)
        for path in sources()
        if path.name == "__init__.py" and path.parent != PACKAGE and path.stat().st_size > 0
    ]
    assert len((PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines()) <= 5, "it only installs old names"
    report(problems, "`__init__.py` stays empty; import from the module that owns the name:")


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in [*sources(), *ROOT.glob("tests/**/*.py")]}
    problems = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    report(problems, "Add an empty `__init__.py`, so that files of equal name do not collide:")


def test_a_todo_says_what_is_to_do():
    problems = [
        where(path, number)
        for path in [*sources(), *scripts()]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!: \S)", line)
    ]
    report(problems, "Write `TODO: <what, and when it can be done>`, or do it:")

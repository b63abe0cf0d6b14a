"""The structure of the package, kept by tests: who may import whom, and how plain the code stays.

Every failure lists `file:line: what is wrong`, and the message of the test says what to do instead.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.structure import blocks, imports_as_text, module_name, parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_rl"
MAX_FUNCTION_LINES = 100

# Imports go down only. The longest matching prefix decides.
BY_LEVEL = (
    "types config utils",
    "distributed refit",
    "data environments models.policy models.generation",
    "refit.sync rollouts",
    "algorithms evals report compat compat_calls compat_environments",
)
LEVELS = {f"nemo_rl.{name}": level for level, names in enumerate(BY_LEVEL) for name in names.split()}

# Heavy or optional packages: the only files that may import them, at any depth.
ENGINE_FILES = {
    "vllm": ("models/generation/vllm/*.py",),
    "sglang": ("models/generation/sglang/*.py",),
    "megatron": ("models/policy/megatron/*.py",),
    "transformer_engine": ("models/policy/megatron/*.py",),
}
# An engine by its name or its keys: in its folder, in the registry, and where NeMo RL's names become ours.
AN_ENGINE = re.compile(r"vllm_(cfg|kwargs)|sglang|Vllm|=vllm|generation\.vllm|^vllm$")
MAY_NAME_ENGINES = ("models/generation/vllm/*.py", "models/generation/sglang/*.py", "models/generation/config.py")
MAY_NAME_ENGINES = (*MAY_NAME_ENGINES, "config/translations.py", "compat.py", "compat_calls.py")
LISTS_OF_PACKAGES = ("report/recorder.py", "distributed/doctor.py", "utils/folders.py")
# Never at the top of a module: imported where they are switched on.
ONLY_INSIDE_FUNCTIONS = {"wandb", "mlflow", "swanlab", "trackio", "tensorboard", "matplotlib"}
# Configuration is read by `--help`; these would take seconds.
NOT_IN_CONFIG = {"torch", "ray", "vllm", "sglang", "transformers", "datasets"}
RAY_FREE = ("types.py", "config/*.py", "data/*.py", "data/*/*.py", "algorithms/losses/*.py", "algorithms/plan/*.py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def scripts() -> list[Path]:
    return sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or base.is_dir()


def imports_of(path: Path, *, at_the_top: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute module of every import, inside functions, under TYPE_CHECKING and as text too.

    `at_the_top`: of those alone that happen when the module is imported.
    """
    for node in at_run_time_top(parsed(path).body) if at_the_top else blocks(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{where(path, node.lineno)}: write imports absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if node.module.startswith("nemo_rl") and is_module(full) else node.module
    if not at_the_top and path.is_relative_to(PACKAGE):
        yield from imports_as_text(path)


def at_run_time_top(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements neither in functions nor under `if TYPE_CHECKING`."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from at_run_time_top(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from at_run_time_top([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def package_of(module: str) -> str | None:
    return max((prefix for prefix in LEVELS if f"{module}.".startswith(f"{prefix}.")), key=len, default=None)


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return path.is_relative_to(PACKAGE) and any(path.relative_to(PACKAGE).match(pattern) for pattern in patterns)


def forbidden(importer: str, imported: str) -> bool:
    """True if the module `importer` of the package must not import its module `imported`."""
    source, target = package_of(importer), package_of(imported)
    assert source is not None, f"{importer}: give its package a level in BY_LEVEL"
    assert target is not None, f"{imported} (imported by {importer}): give its package a level in BY_LEVEL"
    if source == target:
        return False
    last = imported.rpartition(".")[2]
    # The typed configuration of one owner may hold another's: policy.generation, and all of them in algorithms.
    if importer.endswith(".config") and last == "config" and LEVELS[target] <= LEVELS[source]:
        return False
    if LEVELS[source] == 0:  # `utils` may use `types` and `config`, and those use nothing
        return source != "nemo_rl.utils" or LEVELS[target] > 0
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


# -- rules of imports: whether this file must not import that module


def goes_up(path: Path, module: str) -> bool:
    # `nemo_rl` and `nemo_rl.models` are empty packages; the package itself installs `compat` and shares bytecode.
    if module.split(".")[0] != "nemo_rl" or module in ("nemo_rl", "nemo_rl.models"):
        return False
    if not path.is_relative_to(PACKAGE) or path == PACKAGE / "__init__.py":
        return False
    return forbidden(module_name(path), module)


def is_engine_elsewhere(path: Path, module: str) -> bool:
    engine = module.split(".")[0]
    return engine in ENGINE_FILES and not matches(path, ENGINE_FILES[engine])


def is_service_at_the_top(path: Path, module: str) -> bool:
    return path.is_relative_to(PACKAGE) and bool(ONLY_INSIDE_FUNCTIONS & set(module.split(".")))


def is_heavy_for_configuration(path: Path, module: str) -> bool:
    return matches(path, ("config.py", "config/*.py", "types.py")) and module.split(".")[0] in NOT_IN_CONFIG


def is_ray_in_pure_code(path: Path, module: str) -> bool:
    return matches(path, RAY_FREE) and module.split(".")[0] == "ray"


IMPORT_RULES = {
    goes_up: "Imports go down only (docs/reading.md, package levels). Pass the object in, or move the code down:",
    is_engine_elsewhere: "An engine is imported only inside its worker and loader files; go through the interface:",
    is_service_at_the_top: "Import it inside the function that runs when it is switched on:",
    is_heavy_for_configuration: "`--help` reads this file; import under TYPE_CHECKING or move the code:",
    is_ray_in_pure_code: "ray belongs where actors are spawned or called:",
}
AT_THE_TOP = (is_service_at_the_top, is_heavy_for_configuration)


@pytest.mark.parametrize("rule", IMPORT_RULES)
def test_imports(rule):
    paths = [*sources(), *ROOT.glob("examples/**/*.py")]
    found = [(path, line, module) for path in paths for line, module in imports_of(path, at_the_top=rule in AT_THE_TOP)]
    problems = [f"{where(path, line)}: imports {module}" for path, line, module in found if rule(path, module)]
    assert not problems, "\n  ".join([IMPORT_RULES[rule], *problems])


# -- rules of a file: line and problem


def has_long_function(path: Path) -> Iterator[tuple[int, str]]:
    for node in blocks(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {num_lines} lines"


def has_vague_todo(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!: \S)", line):
            yield number, line.strip()


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    if f"{name}(" not in path.read_text(encoding="utf-8"):
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def prints(path: Path) -> Iterator[tuple[int, str]]:
    yield from ((node.lineno, "print()") for node in calls(path, "print"))


def reads_an_attribute_with_a_fallback(path: Path) -> Iterator[tuple[int, str]]:
    yield from ((node.lineno, "getattr with a default") for node in calls(path, "getattr") if len(node.args) == 3)


def swallows_an_exception(path: Path) -> Iterator[tuple[int, str]]:
    """`except Exception` is right only where everything is raised again after cleaning up."""
    for node in blocks(path):
        if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
            continue
        caught = {"everything"} if node.type is None else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        if caught & {"everything", "Exception", "BaseException"}:
            yield node.lineno, f"catches {', '.join(sorted(caught))}"


def names_an_engine(path: Path) -> Iterator[tuple[int, str]]:
    if matches(path, (*MAY_NAME_ENGINES, *LISTS_OF_PACKAGES)):
        return
    prose = {node.value for node in blocks(path) if isinstance(node, ast.Expr)}
    for node in ast.walk(parsed(path)):
        texts = [vars(node).get(name) for name in ("id", "attr", "arg", "module", "name")]
        if isinstance(node, ast.Constant) and node not in prose:
            texts.append(node.value)
        for text in texts:
            if isinstance(text, str) and (found := AN_ENGINE.search(text)):
                yield vars(node).get("lineno", 1), f"{found[0]!r}"


def is_package_with_content(path: Path) -> Iterator[tuple[int, str]]:
    if path.name == "__init__.py" and path.parent != PACKAGE and path.stat().st_size > 0:
        yield 1, "is not empty"


FILE_RULES = {
    has_long_function: f"A function has at most {MAX_FUNCTION_LINES} lines. Split by phase or carrier:",
    has_vague_todo: "Write `TODO: <what, and when it can be done>`, or do it:",
    prints: "Use logging.getLogger(__name__), or the console for what a person should see:",
    reads_an_attribute_with_a_fallback: "Declare the attribute; a misspelt name must fail:",
    swallows_an_exception: "Name the errors that can happen here, or end the handler in `raise`:",
    names_an_engine: "Read `generation.engine`, which answers for the engine that the run has:",
    is_package_with_content: "`__init__.py` stays empty; import from the module that owns the name:",
}


@pytest.mark.parametrize("rule", FILE_RULES)
def test_files(rule):
    paths = [*sources(), *scripts()] if rule in (has_long_function, has_vague_todo) else sources()
    problems = [f"{where(path, line)}: {problem}" for path in paths for line, problem in rule(path)]
    assert not problems, "\n  ".join([FILE_RULES[rule], *problems])


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in [*sources(), *ROOT.glob("tests/**/*.py")]}
    problems = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    assert not problems, "add an empty `__init__.py`, so that files of equal name do not collide"


def names_in(module: str) -> set[str]:
    """The names that a module of ours defines or imports, in whatever block."""
    base = ROOT.joinpath(*module.split("."))
    found: set[str] = set()
    for node in ast.walk(
        parsed(base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py")
    ):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_scripts_import_names_that_are_there():
    """Many benchmarks run in no test, and import inside functions."""
    problems = [
        f"{where(path, node.lineno)}: {node.module} has no {alias.name}"
        for path in [*scripts(), *ROOT.glob("tools/**/*.py")]
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("nemo_rl.")
        for alias in node.names
        if not is_module(f"{node.module}.{alias.name}") and alias.name not in names_in(node.module)
    ]
    assert not problems, "\n  ".join(["Import from the module that has the name:", *problems])

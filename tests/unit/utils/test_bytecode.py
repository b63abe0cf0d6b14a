"""Bytecode where PYTHONDONTWRITEBYTECODE is set: made once, used by every process, never beside sources."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# A parent without bytecode of its own and its child import a module of the user; the parent also a package.
PARENT = """
import os, subprocess, sys
sys.prefix = os.environ["ENVIRONMENT"]  # an environment of this test alone
from nemo_rl.utils import bytecode
import users_module
for options in ([], ["-I", "-S", *bytecode.interpreter_options()]):
    program = "import sys; sys.path[:0] = sys.argv[1:]; import users_module, package; print(package.__cached__)"
    paths = os.environ["SOURCES"], os.environ["PACKAGES"]
    subprocess.run([sys.executable, "-v", *options, "-c", program, *paths], check=True)
"""


def play(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sources, packages = tmp_path / "sources", tmp_path / "environment" / "lib" / version / "site-packages"
    for folder in (sources, packages / "package"):
        folder.mkdir(parents=True, exist_ok=True)
    (sources / "users_module.py").write_text("NAME = 'users'\n")
    (packages / "package" / "__init__.py").write_text("NAME = 'package'\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-m", "compileall", "-q", packages], env=own, check=True)  # as an installation does
    paths = {"ENVIRONMENT": str(tmp_path / "environment"), "SOURCES": str(sources), "PACKAGES": str(packages)}
    env = {**own, **paths, "PYTHONPATH": os.pathsep.join([str(ROOT), str(sources), str(packages)]), **variables}
    return subprocess.run([sys.executable, "-c", PARENT], env=env, capture_output=True, text=True, check=True)


def test_children_use_what_the_parent_and_the_installation_compiled_and_nothing_lies_beside_sources(tmp_path: Path):
    done = play(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    for name in ("users_module", "package"):
        made = [line for line in done.stderr.splitlines() if "code object from" in line and f"/{name}" in line]
        assert len(made) == 2 and all(".pyc'" in line for line in made), made  # of both children: read, not compiled
    kept = tmp_path / "environment" / "bytecode"
    [link] = [file for file in kept.rglob("package/*.pyc") if file.is_symlink() and tmp_path in file.resolve().parents]
    assert link.resolve().parent.name == "__pycache__"
    assert not list((tmp_path / "sources").rglob("*.pyc"))
    assert kept.stat().st_mode & 0o777 == 0o700


def test_without_the_variable_python_keeps_bytecode_where_it_always_does(tmp_path: Path):
    play(tmp_path)
    assert (tmp_path / "sources" / "__pycache__").is_dir() and not (tmp_path / "environment" / "bytecode").exists()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path):
    shared = tmp_path / "environment" / "bytecode"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    play(tmp_path, PYTHONDONTWRITEBYTECODE="1", NEMO_RL_CACHE=str(tmp_path / "cache"))
    assert not list(shared.iterdir()) and list((tmp_path / "cache" / "bytecode").rglob("users_module.*.pyc"))

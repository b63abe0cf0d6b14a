"""A Python of its own for the actors of an environment (`env.<name>.py_executable`), or for a dataset's items.

A list of requirements becomes an overlay: a small virtual environment that has only the packages that the run's own
environment lacks or has in another version, and shows the run's packages below them. torch, Ray and this library are
always the same as in the run, because both processes exchange their objects.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nemo_rl.utils import venvs

SHARED = ("nemo-rl", "ray", "torch")
_CHARACTERS_OF_DIGEST = 16


def runtime_env_of(py_executable: str | Sequence[str], key: str) -> dict[str, Any]:
    """Ray's `runtime_env` of an actor with this Python, which is made if needed. `key` names the setting in errors.

    ValueError for an extra that the project does not have, or a file that is missing or holds no requirements.
    VenvBuildError when uv cannot make it.
    """
    python = python_of(py_executable, key)
    # The driver's import paths without its packages, which would come before the packages of the actor's environment.
    paths = _paths_outside([os.path.realpath(sysconfig.get_path("stdlib")), *_package_folders()])
    return {"py_executable": python, "env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}


def python_of(py_executable: str | Sequence[str] | None, key: str) -> str:
    """The path of a Python: of a list or file (`.txt`) of requirements, of an extra of the project, or the given one;
    of this process for None.

    Raises as `runtime_env`.
    """
    if py_executable is None:
        return sys.executable
    if not isinstance(py_executable, str):
        return _with_requirements("\n".join(py_executable), None, key)
    if py_executable.endswith(".txt"):
        file = Path(py_executable).expanduser().absolute()
        if not file.is_file():
            raise ValueError(f"{key}: there is no file {file}")
        return _with_requirements(file.read_text(encoding="utf-8"), file, key)
    if "/" in py_executable:
        found = shutil.which(os.path.expanduser(py_executable))
        if found is None:
            raise ValueError(f"{key}: {py_executable} does not exist or cannot be run on this node")
        return os.path.abspath(found)
    try:
        return venvs.python_executable_for(py_executable)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def made_python(py_executable: str | Sequence[str] | None, key: str) -> str | None:
    """The path of a Python, as of `python_of`, if it is on this machine; nothing is made. Raises as `python_of`."""
    if py_executable is None or (
        isinstance(py_executable, str) and "/" in py_executable and py_executable[-4:] != ".txt"
    ):
        return python_of(py_executable, key)
    if not isinstance(py_executable, str):
        path = _overlay("\n".join(py_executable), None, key)[0]
    elif py_executable.endswith(".txt"):
        return None
    else:
        path = venvs.venv_path(py_executable, venvs.find_project_root())
    python = path / "bin" / "python"
    return str(python) if python.exists() else None


def _with_requirements(text: str, file: Path | None, key: str) -> str:
    """The Python of an overlay with the requirements of `text`. Relative paths begin beside the file that has them."""
    path, lines, folder = _overlay(text, file, key)
    return venvs.made_everywhere(path, partial(ensure_overlay, path, "\n".join(lines), file, folder, key))


def _overlay(text: str, file: Path | None, key: str) -> tuple[Path, list[str], Path]:
    """The folder of an overlay, whether it exists or not, its requirements, and where their relative paths begin."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not lines:
        raise ValueError(f"{key}: there are no requirements; set it to null for the environment of the run")
    if contradiction := next(filter(None, map(_contradiction, lines)), None):
        raise ValueError(f"{key}: {contradiction}, which actors share with the run; install it there, or leave it out")
    folder = Path.cwd() if file is None else file.parent
    digest = hashlib.sha256("\n".join([str(folder), *lines]).encode()).hexdigest()[:_CHARACTERS_OF_DIGEST]
    return venvs.venv_path(f"requirements-{digest}", venvs.find_project_root()).absolute(), lines, folder


def ensure_overlay(path: Path, text: str, file: Path | None, folder: Path, key: str, *, force: bool) -> str:
    """Make the overlay on this machine unless it is up to date. Returns the path of its Python."""
    # Name -> version of every package of this process; the first one on sys.path counts.
    paths = [*_package_folders(), *_paths_outside(_package_folders())]
    distributions = importlib.metadata.distributions(path=sorted(paths, key=sys.path.index))
    found = [(canonicalize_name(each.metadata["Name"]), each.version) for each in distributions]
    installed = dict[str, str](reversed(found))
    versions = "\n".join(f"{name}=={version}" for name, version in sorted(installed.items()))
    stamp = {"requirements": text, "python": sys.version, "below": hashlib.sha256(versions.encode()).hexdigest()}
    uv = partial(
        venvs.run_uv,
        what=f"the environment of {key}",
        folder=folder,
        otherwise=f"set {key} to the path of a Python that has the packages",
    )
    return venvs.made_once(path, stamp, partial(_build, path, text, file, key, installed, uv), force=force)


def _build(
    path: Path, text: str, file: Path | None, key: str, installed: Mapping[str, str], uv: Callable[..., None]
) -> None:
    uv(["venv", "--python", sys.executable, str(path)], by_hand=f"uv venv {path}")
    wanted, shared, resolved = file or path / "requirements.in", path / "shared.txt", path / "resolved.txt"
    if file is None:
        wanted.write_text(text + "\n")
    # Part of the resolution, but never installed.
    shared.write_text("".join(f"{name}; python_version < '0'\n" for name in SHARED))
    # uv prefers the versions that it finds in its output file: a package changes only where a requirement asks for it.
    resolved.write_text("".join(f"{name}=={version.partition('+')[0]}\n" for name, version in installed.items()))
    python = str(path / "bin" / "python")
    options = ["--python", python, "--overrides", str(shared), "--no-annotate", "--no-header"]
    options += ["--emit-index-url", "--emit-find-links"]
    compile_them = ["pip", "compile", str(wanted), *options, "-o", str(resolved)]
    uv(compile_them, by_hand=f"uv pip compile {wanted}")
    missing = [line for line in resolved.read_text().splitlines() if not _is_met(line, installed)]
    resolved.write_text("\n".join(missing) + "\n")
    if any(not line.startswith("--") for line in missing):
        install = ["pip", "install", "--python", python, "--no-deps", "--compile-bytecode", "-r", str(resolved)]
        uv(install, by_hand=f"uv pip install -r {resolved}")
    show = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip())
    for distribution in importlib.metadata.distributions(path=[str(packages)]):
        if contradiction := next(filter(None, map(_contradiction, distribution.requires or ())), None):
            name = distribution.metadata["Name"]
            raise venvs.VenvBuildError(
                f"{key}: {name} {distribution.version} asks for {contradiction}, which actors share with the run; "
                f"choose another version of {name}"
            )
    # Processed when the Python starts, in order: the overlay's own packages come first on sys.path.
    below = json.dumps(_package_folders())
    (packages / "below.pth").write_text(f"import site; list(map(site.addsitedir, {below}))\n")


def _is_met(line: str, installed: Mapping[str, str]) -> bool:
    """Whether the run has a package `name==version` of uv's resolution; other lines are paths and addresses."""
    name, equals, version = line.partition("==")
    have = installed.get(canonicalize_name(name), "")
    return bool(equals) and version in (have, have.partition("+")[0])


def _contradiction(line: str) -> str | None:
    """ "torch<2, and the run has torch 2.13.0" for a requirement of a shared package that the run does not meet."""
    try:
        requirement = Requirement(line.partition(" #")[0])
    except InvalidRequirement:  # an option, a path or an address: uv reads it
        return None
    name = canonicalize_name(requirement.name)
    if name not in SHARED or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
        return None
    version = importlib.metadata.version(name)
    if requirement.url is None and requirement.specifier.contains(version, prereleases=True):
        return None
    asked = f"{name} @ {requirement.url}" if requirement.url else f"{name}{requirement.specifier}"
    return f"{asked}, and the run has {name} {version}"


def _paths_outside(folders: Sequence[str]) -> list[str]:
    """The import paths outside of these folders; setuptools adds one inside its own package when it is imported."""
    real = [os.path.realpath(folder) for folder in folders]
    return [
        path
        for path in sys.path
        if path and not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in real)
    ]


def _package_folders() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]

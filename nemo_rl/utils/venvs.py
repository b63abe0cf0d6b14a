"""Python environments of workers: the driver's own if it suffices, else one that uv makes from an extra of the project.

Engines pin packages that contradict each other, so each is an extra of `pyproject.toml`, and its workers run in an
environment of that extra. It is made once on each node, and again if `pyproject.toml` changed or
`NRL_FORCE_REBUILD_VENVS=true`. `NEMO_RL_VENV_DIR` is the folder of environments (default: `venvs/` in the project).
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_rl.utils.bytecode import use_installed
from nemo_rl.utils.files import file_lock

logger = logging.getLogger(__name__)

_STAMP = ".nemo_rl_stamp.json"
_NUM_LINES_SHOWN = 40
_NODE_BUILD_TIMEOUT_S = 3600.0
_NETWORK_WORDS = ("error sending request", "dns error", "timed out", "connection", "network", "failed to fetch")

_rebuilt: set[Path] = set()  # environments that this process has rebuilt by force: once is enough


class VenvBuildError(RuntimeError):
    """An environment could not be made; the message has uv's message and a remedy."""


def python_executable_for(extra: str, project_root: Path | None = None) -> str:
    """Path of a Python whose environment has `extra` of the project. Makes the environment if needed.

    It is the driver's own Python if it meets all requirements of the extra. If Ray runs, the environment is made on
    each node. `project_root` is the folder of `pyproject.toml`, by default of this package.

    Raises:
        ValueError: for an unknown extra, or a package without its project.
        VenvBuildError: the build fails.
    """
    root = find_project_root() if project_root is None else project_root.resolve()
    unmet = unmet_requirements(extra, root)
    if not unmet:
        return sys.executable
    path = venv_path(extra, root)
    logger.info("%s does not have %s: using the environment %s", sys.executable, ", ".join(unmet), path)
    return made_everywhere(path, partial(ensure_venv, extra, root))


def made_everywhere(path: Path, ensure: Callable[..., str]) -> str:
    """`ensure(force=...)`, which makes the environment `path` where it is called, on every node if Ray runs.

    Returns the path of its Python. `ensure` must be importable on the other nodes.
    """
    force = _is_rebuild_forced() and path not in _rebuilt
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        python = _ensure_on_all_nodes(path, partial(ensure, force=force))
    else:
        python = ensure(force=force)
    _rebuilt.add(path)
    return python


def _is_rebuild_forced() -> bool:
    text = os.environ.get("NRL_FORCE_REBUILD_VENVS", "false").lower()
    if text not in ("true", "1", "false", "0", ""):
        raise ValueError(f"NRL_FORCE_REBUILD_VENVS must be true or false, got {text!r}")
    return text in ("true", "1")


def find_project_root() -> Path:
    """The folder of the project's `pyproject.toml`. Raises ValueError if the package was installed without it."""
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if not (root / "pyproject.toml").is_file():
        raise ValueError(
            f"{package} is installed apart from its pyproject.toml, so no worker environment can be made from "
            "it: run from a clone of the repository, or install the extra where the driver runs"
        )
    return root


def unmet_requirements(
    extra: str, project_root: Path, version_of: Callable[[str], str] = importlib.metadata.version
) -> list[str]:
    """Requirements of `extra` that an environment does not meet: ["vllm==0.32.0 (not installed)"].

    `version_of`: the version of a package there; by default in this process's environment.
    """
    with open(project_root / "pyproject.toml", "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    extras = {canonicalize_name(name): requirements for name, requirements in project["optional-dependencies"].items()}
    if canonicalize_name(extra) not in extras:
        raise ValueError(f"{project_root / 'pyproject.toml'} has no extra {extra!r}: it has {sorted(extras)}")
    asked = map(Requirement, extras[canonicalize_name(extra)])
    for_this_machine = (one for one in asked if one.marker is None or one.marker.evaluate())
    return [text for one in for_this_machine if (text := shortfall(one, version_of)) is not None]


def shortfall(requirement: Requirement, version_of: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """How an environment falls short: "vllm==0.32.0 (not installed)"; None if it meets the requirement."""
    try:
        version = version_of(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name}{requirement.specifier} (not installed)"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name}{requirement.specifier} ({version} is installed)"


def venv_path(name: str, project_root: Path) -> Path:
    """The path of the environment of an extra (`name`), whether it exists or not."""
    folder = os.environ.get("NEMO_RL_VENV_DIR")
    return (Path(folder).expanduser().resolve() if folder else project_root / "venvs") / name


def package_folder(extra: str, package: str) -> Path | None:
    """The folder of a package in the environment of `extra`; None as long as that is not made."""
    root = Path(__file__).resolve().parents[2]
    return next(venv_path(extra, root).glob(f"lib/python*/site-packages/{package}"), None)


def made_environments() -> list[str]:
    """The extras whose environments are made on this machine."""
    folder = venv_path("*", Path(__file__).resolve().parents[2])
    return sorted(path.parent.name for path in folder.parent.glob(f"*/{_STAMP}"))


def what_is_missing(extra: str) -> str | None:
    """Why no environment of `extra` can be had here; None if there is one, or uv makes it when a worker starts."""
    root = find_project_root()
    unmet, path = unmet_requirements(extra, root), venv_path(extra, root)
    if not unmet or _is_rebuild_forced():
        return None
    if (path / _STAMP).is_file():
        wrong = unmet_requirements(extra, root, lambda name: _version_in(path, name))
        return f"{path} has been changed: {', '.join(wrong)}; set NRL_FORCE_REBUILD_VENVS=true" if wrong else None
    if shutil.which("uv") is not None:
        return None
    return (
        f"{', '.join(unmet)}; its environment {path} is made by uv, which is not on PATH: install uv or the extra "
        f"{extra!r} where the driver runs"
    )


def _version_in(path: Path, name: str) -> str:
    """The version of a package in the environment `path`."""
    pattern = f"lib/python*/site-packages/{canonicalize_name(name).replace('-', '_')}-*.dist-info"
    for found in path.glob(pattern):
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    raise importlib.metadata.PackageNotFoundError(name)


def ensure_venv(extra: str, project_root: Path, *, force: bool = False) -> str:
    """Make the environment of `extra` on this machine unless it is up to date. Returns the path of its Python."""
    path = venv_path(extra, project_root)
    return made_once(path, _stamp(extra, project_root), partial(_build, extra, project_root, path), force=force)


def made_once(path: Path, stamp: Mapping[str, str], build: Callable[[], None], *, force: bool) -> str:
    """`build()` the environment `path` unless its stamp is `stamp`. Returns the path of its Python.

    A lock keeps two drivers from building at the same time. The stamp is written last, so that an unfinished
    environment is made again.
    """
    python = path / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.name}.lock")):
        text = json.dumps(stamp)
        is_made = (path / _STAMP).is_file() and (path / _STAMP).read_text() == text
        if force or not is_made or not python.exists():
            if path.exists():
                why = "a rebuild is forced" if force else "it is out of date or unfinished"
                logger.info("Removing %s: %s", path, why)
                shutil.rmtree(path)
            logger.info("Making the environment %s, once: uv downloads and compiles what is missing, in minutes", path)
            build()
            (path / _STAMP).write_text(text)
    use_installed(*path.glob("lib/python*/site-packages"))
    return str(python)


def _ensure_on_all_nodes(path: Path, ensure: Callable[[], str]) -> str:
    """`ensure()` on every node of the Ray cluster in parallel. The path is the same on all nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    remote = ray.remote(num_cpus=0, max_retries=0)(_ensure_on_node)
    refs = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(str(path), ensure)
        for node in others
    ]
    python = ensure()
    if refs:
        logger.info("Waiting for the environment %s on %d other nodes", path, len(refs))
        failures = [failure for failure in ray.get(refs, timeout=_NODE_BUILD_TIMEOUT_S) if failure is not None]
        if failures:
            raise VenvBuildError(f"failed on {len(failures)} of {len(refs)} other nodes; the first:\n{failures[0]}")
    return python


def _ensure_on_node(path: str, ensure: Callable[[], str]) -> str | None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ["NEMO_RL_VENV_DIR"] = str(Path(path).parent)
    try:
        ensure()  # on a shared file system, the other nodes find the environment of the first one
    except (VenvBuildError, ValueError, OSError) as error:
        return f"{os.uname().nodename}: {error}"
    return None


def _build(extra: str, project_root: Path, path: Path) -> None:
    # Ray refuses a worker whose Python version differs from the driver's in any digit.
    run_uv(
        ["sync", "--extra", extra, "--no-default-groups", "--compile-bytecode", "--python", sys.executable],
        what=f"the environment of extra {extra!r}",
        folder=project_root,
        env={"UV_PROJECT_ENVIRONMENT": str(path)},
        otherwise="start the driver from an environment that has the extra",
        by_hand=f"UV_PROJECT_ENVIRONMENT={path} uv sync --extra {extra} --no-default-groups",
    )


def run_uv(
    arguments: Sequence[str],
    *,
    what: str,
    folder: Path,
    otherwise: str,
    by_hand: str,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run uv in `folder`. VenvBuildError with its message and a remedy when it fails."""
    uv = shutil.which("uv")
    if uv is None:
        raise VenvBuildError(f"{what} is made by uv, which is not on PATH: install uv, or {otherwise}")
    own = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    lines: list[str] = []
    process = subprocess.Popen(
        [uv, *arguments],
        cwd=folder,
        env={**own, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if not line.startswith(" +"):  # about two hundred lines, one per package
                lines.append(line.rstrip())
                logger.info("uv: %s", line.rstrip())
        returncode = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if returncode != 0:
        raise VenvBuildError(_failure_message(what, f"cd {folder} && {by_hand}", lines, returncode))


def _failure_message(what: str, by_hand: str, lines: list[str], returncode: int) -> str:
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("error", "\N{MULTIPLICATION SIGN}"))]
    words = lines[starts[0] :] if starts else lines[-15:]
    text = "\n".join(words).lower()
    if len(words) > _NUM_LINES_SHOWN:  # the first lines name the package, the last ones the error of its build
        words = [*words[:10], "...", *words[10 - _NUM_LINES_SHOWN :]]
    advice = "see uv's message above"
    if "wheel" in text and "platform" in text:
        advice = "the package has no wheel for this platform: use a machine it is built for, or another extra"
    elif "no space left" in text:
        advice = "the disk is full: make room, or set NEMO_RL_VENV_DIR and UV_CACHE_DIR to another disk"
    elif "no solution found" in text:
        advice = "the requirements contradict each other, or name a version that no index has: change them"
    elif any(word in text for word in _NETWORK_WORDS):
        advice = "uv could not reach the package index: check the network and the proxy settings, then start again"
    return "\n".join(
        [
            f"uv could not make {what} (exit status {returncode}):",
            *(f"  {line}" for line in words),
            f"What to do: {advice}. By hand:",
            f"  {by_hand}",
        ]
    )


def _stamp(extra: str, project_root: Path) -> dict[str, str]:
    """The inputs of the environment. uv.lock is not among them, because uv itself writes it."""
    digest = hashlib.sha256((project_root / "pyproject.toml").read_bytes())
    version_file = project_root / ".python-version"
    if version_file.is_file():
        digest.update(version_file.read_bytes())
    return {"extra": extra, "python": sys.version, "project": digest.hexdigest()}

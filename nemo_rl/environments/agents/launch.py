"""Starts the command of an agent with its limits: what it may reach, and memory. Standard library only.

`launcher(...)` gives the arguments of the process, which restricts itself and then becomes the command.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.environments.code.sandbox import isolation
from nemo_rl.utils.bytecode import interpreter_options

if TYPE_CHECKING:
    from nemo_rl.environments.agents.config import AgentEnvironmentConfig

_ROOT = str(Path(__file__).parents[3])
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from nemo_rl.environments.agents.launch import main; main()"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
# Of /proc: the process itself and the machine, not the environment of other processes. Its children see less.
_PROC = tuple(
    f"/proc/{name}" for name in ("self", "cpuinfo", "meminfo", "stat", "sys", "version", "filesystems", "uptime")
)


def check(*, network: bool) -> None:
    """ValueError if this machine cannot keep commands apart."""
    version, what = (1, "Landlock (Linux 5.13)") if network else (4, "Landlock with ports (Linux 6.7)")
    if isolation.landlock_abi() < version:
        raise ValueError(f"isolate: this machine has no {what}; set isolate: false if you trust the command")


def readable(paths: Sequence[str], pythonpath: str, temporary: str) -> list[str]:
    """The paths that commands may read and run: no hidden files of the home folder, no temporary files of others.

    `temporary`: the folder of such files, without links.
    """
    home = os.path.expanduser("~")
    hidden = {f"/{temporary.split(os.sep)[1]}", "/tmp", "/dev", "/proc"}
    found = [*_children("/", {home, *hidden}), *_PROC, sys.prefix, sys.base_prefix]
    if home not in ("/", *hidden):
        found += [path for path in _children(home, set()) if not os.path.basename(path).startswith(".")]
        found += _children(os.path.dirname(home), {home}) if os.path.dirname(home) != "/" else []
    found += [path for path in pythonpath.split(os.pathsep) if path]
    parents = {os.path.dirname(home)} - {"/"}
    found = [part for path in found if path not in parents for part in _beside(path, temporary)]
    return list(dict.fromkeys([*found, *paths]))


def _beside(path: str, folder: str) -> list[str]:
    """`path`, or, if it holds `folder`, the other paths in it."""
    real = os.path.realpath(path)
    if not f"{folder}/".startswith(f"{real}/"):
        return [path]
    return [] if real == folder else [part for child in _children(path, set()) for part in _beside(child, folder)]


def _children(folder: str, without: set[str]) -> list[str]:
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK | os.X_OK) else []  # HOME may be missing
    return [path for name in names if (path := os.path.join(folder, name)) not in without]


def launcher(config: AgentEnvironmentConfig, *, folder: str, port: int, pythonpath: str) -> list[str]:
    """The arguments of a process that becomes `config.command`. `port`: of the session, which it always reaches."""
    assert config.command is not None
    options: dict[str, Any] = {"memory": None if config.memory_mib is None else config.memory_mib << 20}
    if config.isolate:
        options["isolate"] = {
            "readable": readable(config.paths, pythonpath, os.path.realpath(tempfile.gettempdir())),
            "writable": [folder, *config.paths],
            "ports": None if config.network else [port],
        }
    python = [sys.executable, "-I", "-S", *interpreter_options()]
    return [*python, "-c", _CODE, _ROOT, json.dumps(options), *config.command]


def main() -> None:
    """Become the command of `sys.argv`."""
    options: Mapping[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    if (own := options.get("isolate")) is not None:
        isolation.prctl(isolation.PR_SET_NO_NEW_PRIVS, 1)
        isolation.restrict(abi=isolation.landlock_abi(), devices=_DEVICES, runs_programs=True, **own)
    if (memory := options["memory"]) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error}")

"""The cluster, the folder and the token of Ray for a run on this machine. Ray is not loaded."""

import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.utils.folders import in_home, own_folder

_TOKEN = "~/.ray/auth_token"  # where Ray looks for it
_ANSWER_S = 0.5  # in which a cluster of this machine answers


def find_cluster(environment: Mapping[str, str] = os.environ) -> str | None:
    """The address (host:port) of the Ray cluster that a run joins; None: it starts its own.

    It is `RAY_ADDRESS`, else the address that `ray start` wrote down, if this user gave that command and the cluster
    answers. `RAY_ADDRESS=auto` is a cluster of any user's `ray start`, `RAY_ADDRESS=local` none.

    Raises ConfigError for a `RAY_ADDRESS` that names no cluster.
    """
    address = environment.get("RAY_ADDRESS", "")
    if address == "local":
        return None
    if address in ("", "auto"):
        found = _started_here(environment, by_anybody=address == "auto")
        if address and found is None:
            raise _error("auto finds no cluster that `ray start` has started on this machine: start one")
        return found
    if address.startswith("ray://"):
        raise _error(f"{address} is the address of Ray Client, through which no tensors can be shared")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise _error(f"{address} is no address of a cluster")
    return address


def _error(what: str) -> ConfigError:
    remedy = "set it to <address of the first node>:6379, or unset it for a cluster of this run on this machine"
    return ConfigError([Problem(("RAY_ADDRESS",), f"{what}; {remedy}")])


def _started_here(environment: Mapping[str, str], *, by_anybody: bool) -> str | None:
    """The address that `ray start` wrote down on this machine, if its cluster answers: the file outlives it."""
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # as Ray looks for it
    try:
        with Path(folder, "ray", "ray_current_cluster").open() as file:
            if not by_anybody and os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            address = file.read().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        return None
    return address


def folder_of_ray() -> str:
    """The folder of a local cluster's logs, ports and sockets: one that other users cannot enter, or in `RAY_TMPDIR`.

    Ray's own, /tmp/ray, may be written by everybody, who could so lead processes to a cluster of theirs.
    """
    if not (named := os.environ.get("RAY_TMPDIR")):
        return str(own_folder() / "ray")
    folder = Path(named).absolute() / "ray"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"RAY_TMPDIR={named} cannot be written to ({error.strerror}): name a folder of yours"
        ) from error
    return str(folder)


def own_token() -> Path:
    """The file with the token of this user's clusters, which is made if needed. Ray itself lets everybody read it."""
    path = Path(os.path.expanduser(_TOKEN))
    if not os.access(path, os.R_OK):
        path = (in_home(".ray") or own_folder()) / "auth_token"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # only of this user
            file.write(secrets.token_hex(32))
            file.flush()
            with suppress(FileExistsError):  # another run has just made it
                os.link(file.name, path)
    return path


def protect_token() -> None:
    """Let no other user read the token in the home folder: `ray get-auth-token --generate` lets everybody."""
    token = Path(os.path.expanduser(_TOKEN))
    with suppress(OSError):  # there is none, or it belongs to somebody else
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)

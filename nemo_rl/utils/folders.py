"""Folders of this user: the cache with the hub that fills it, and one for temporary files that nobody else reads.

Standard library only.
"""

import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

# Variables that name the caches of libraries, and folders of ours. Libraries read them when they are imported.
_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_HOME": "triton"}
_CACHES_OF_HUB = {"HF_DATASETS_CACHE": "datasets", "HF_MODULES_CACHE": "modules", "HF_HUB_CACHE": "hub"}


def move_caches() -> None:
    """Have libraries keep their caches in `cache_root()`, if this user cannot write to `~/.cache` and names no other.

    Models that are in `~/.cache` already are used there.
    """
    if os.environ.get("XDG_CACHE_HOME") or in_home(".cache") is not None:
        return
    try:
        root = cache_root()
    except ValueError:  # a run that needs the folder says why there is none
        return
    for name, folder in _CACHES.items():
        os.environ.setdefault(name, str(root / folder))
    if not os.environ.get("HF_HOME"):
        for name, folder in _CACHES_OF_HUB.items():
            if folder != "hub" or not os.path.isdir(os.path.expanduser("~/.cache/huggingface/hub")):
                os.environ.setdefault(name, str(root / "huggingface" / folder))


def cache_root() -> Path:
    """The folder of files that can be recreated: `$NEMO_RL_CACHE`, else `~/.cache/nemo_rl`, else `own_folder()`.

    ValueError if this user cannot write to the one that the variable names.
    """
    if named := os.environ.get("NEMO_RL_CACHE"):
        folder = Path(named).expanduser()
        if not _is_usable(folder):
            raise ValueError(f"NEMO_RL_CACHE={named} is no folder that this user can write to: name another one")
        return folder
    return in_home(".cache/nemo_rl") or own_folder()


def in_home(name: str) -> Path | None:
    """The folder `name` in the home folder, which is made if needed. None without a home folder that can be written."""
    home = Path(os.path.expanduser("~"))  # without an entry in /etc/passwd it stays "~"
    if not (home.is_absolute() and os.path.isdir(home)):
        return None
    folder = home / name
    return folder if _is_usable(folder) else None


def _is_usable(folder: Path) -> bool:
    """Whether this user can write to the folder, which is made if needed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def own_folder() -> Path:
    """`nemo_rl_<user id>` in the folder for temporary files, which is made if needed. Only this user can enter it.

    ValueError if TMPDIR cannot be written to, or if something else has the name.
    """
    named, parent = os.environ.get("TMPDIR"), tempfile.gettempdir()
    if named and os.path.abspath(named) != parent:  # Python has looked for another one
        raise ValueError(f"TMPDIR={named} is no folder that this user can write to: make it, or unset TMPDIR")
    folder = Path(parent, f"nemo_rl_{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ValueError(f"{folder} is no folder of this user: remove it, or set TMPDIR to a folder of yours")
    folder.chmod(0o700)
    return folder


_HUB_TIMEOUT_S = 5.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def hub_is_off() -> bool:
    """Whether the user has told the libraries of the Hugging Face hub to use only the cache."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")


def hub_failure() -> str | None:
    """Why no connection to the Hugging Face hub can be made, or None. A proxy is trusted: it may know another way."""
    if any(os.environ.get(name) for name in _PROXIES):
        return None
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), _HUB_TIMEOUT_S).close()
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error})"
    return None


def unreachable(name: str, failure: str) -> str:
    """The message for a name that only the hub may have, beside `hub_failure`."""
    return (
        f"{name!r} is no folder here, and {failure}: name a folder, take what is in the cache with HF_HUB_OFFLINE=1, "
        "or set HF_ENDPOINT or HTTPS_PROXY"
    )


def require_hub(name: str) -> None:
    """Raises ValueError if `name`, which is no folder, is to be looked up in a hub that cannot be reached.

    The libraries of the hub would try again for half a minute, for each file.
    """
    if not hub_is_off() and (failure := hub_failure()) is not None:
        raise ValueError(unreachable(name, failure))

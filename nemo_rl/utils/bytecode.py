"""Compiled Python files where PYTHONDONTWRITEBYTECODE is set, as in many container images.

Without bytecode every process of a run would compile all its imports again: a minute of CPU in each of a dozen. So a
run keeps bytecode where nobody has sources: inside the Python environment, or else in the cache folder. There it also
has what the installation compiled, because Python looks for bytecode in one place only
(https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPYCACHEPREFIX). Standard library only: the package imports
this file first.
"""

import os
import sys
import sysconfig
from pathlib import Path

from nemo_rl.utils.folders import cache_root

_NO_BYTECODE, _FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def share_bytecode() -> None:
    """Have this process and its children keep bytecode in a folder of their own, if they keep none beside sources.

    Nothing changes where PYTHONDONTWRITEBYTECODE is not set, or where no such folder can be written.
    """
    if not sys.dont_write_bytecode:
        return
    if sys.pycache_prefix is None:
        folder = _own_folder()
        if folder is None:
            return
        sys.pycache_prefix = os.environ[_FOLDER] = str(folder)
        use_installed(sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    sys.dont_write_bytecode = False
    os.environ.pop(_NO_BYTECODE, None)


def use_installed(*folders: str | Path) -> None:
    """Let processes that share bytecode find what the installation of these folders compiled: links to each file."""
    if sys.pycache_prefix is None:
        return
    for folder in dict.fromkeys(map(str, folders)):
        links = Path(sys.pycache_prefix, *Path(folder).parts[1:])
        try:
            stamp, installed = links / ".linked", str(os.stat(folder).st_mtime_ns)  # changes with each package
            if not stamp.is_file() or stamp.read_text() != installed:
                links.mkdir(parents=True, exist_ok=True)
                _link(folder, str(links))
                stamp.write_text(installed)
        except OSError:  # a full disk, or a folder that this user cannot read: the files are compiled once more
            continue


def interpreter_options() -> list[str]:
    """Options for a Python that starts without this process's environment, so that it shares bytecode too."""
    if sys.dont_write_bytecode:
        return ["-B"]
    return [] if sys.pycache_prefix is None else ["-X", f"pycache_prefix={sys.pycache_prefix}"]


def _own_folder() -> Path | None:
    """A folder that only this user writes: anybody else who could write there could run code in every process."""
    if sys.prefix != sys.base_prefix and (folder := _writable(Path(sys.prefix))) is not None:
        return folder
    try:
        return _writable(cache_root())
    except ValueError:  # a run that needs the folder says why there is none
        return None


def _writable(parent: Path) -> Path | None:
    """The folder for bytecode in `parent`, if it can be made and only this user writes there."""
    folder = parent / "bytecode"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


def _link(folder: str, links: str) -> None:
    """Link the bytecode of `folder` and of the folders below it into `links`, where there is none yet."""
    with os.scandir(folder) as entries:
        inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in inner:
        if name != "__pycache__":
            _link(f"{folder}/{name}", f"{links}/{name}")
            continue
        compiled = [file for file in os.listdir(f"{folder}/{name}") if file.endswith(".pyc")]
        if compiled:
            os.makedirs(links, exist_ok=True)
        there = set(os.listdir(links)) if compiled else set()
        for file in compiled:
            if file not in there:
                try:
                    os.symlink(f"{folder}/{name}/{file}", f"{links}/{file}")
                except FileExistsError:  # another process has just made it
                    continue

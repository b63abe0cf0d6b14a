"""Directories of checkpoints on a disk that may be full, shared, or written to by a process that is dying."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

# -- Where things that can be made again are kept.


def cache_root() -> Path:
    """`$NEMO_RL_CACHE`, else `~/.cache/nemo_rl`."""
    return Path(os.environ.get("NEMO_RL_CACHE") or "~/.cache/nemo_rl").expanduser()


# -- JSON that any parser accepts.
#
# Python writes the bare words `NaN` and `Infinity`, which are not JSON. Here a float that is not finite becomes the
# string "NaN", "Infinity" or "-Infinity": `float()` reads each of them back. Finite floats keep every digit.


def to_plain(value: Any) -> Any:
    """`value` as dict, list, str, int, float, bool and None only. Raises TypeError for anything else."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"cannot be written as JSON: the key {key!r} is no string")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_plain(item) for item in value]
    raise TypeError(f"cannot be written as JSON: {type(value).__name__} {value!r}")


def dumps(value: Any, *, indent: int | None = None) -> str:
    """One line, or several with `indent`. Raises TypeError for what `to_plain` does not take."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FULL_BELOW_BYTES = 1 << 20  # torch.save fails on a full disk with an error about a position in its file


def try_lock(directory_fd: int) -> bool:
    """Locks a directory for as long as this process lives. False when another process has it."""
    try:
        fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks. One run per directory is then the user's to keep.
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Inside, no other process is inside with the same file, which is made if it is not there."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def remove_tree(path: Path) -> None:
    """Removes `path`. Files that a dying worker still writes into it are left for the next start."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed entirely", path)


def bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def is_disk_full(error: BaseException, free_bytes: int) -> bool:
    """Looks through the chain of causes: a worker's OSError arrives wrapped, native writers leave a text or nothing.

    `free_bytes` is what was left before the half-written checkpoint was removed.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_SPACE:
            return True
        if any(os.strerror(code) in str(cause) for code in _NO_SPACE):
            return True
        cause = cause.__cause__ or cause.__context__
    return isinstance(error, Exception) and free_bytes < _FULL_BELOW_BYTES


def size_text(num_bytes: int) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


def digest(text: str) -> str:
    """16 hexadecimal digits that tell a text from others."""
    return xxhash.xxh3_64_hexdigest(text.encode())

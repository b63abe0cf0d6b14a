"""Directories of checkpoints on a disk that may be full, shared, or written to by a process that is dying."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

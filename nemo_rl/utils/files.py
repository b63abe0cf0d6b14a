"""Files: strict JSON, locks, and directories on a disk that may be full or shared.

Strict JSON is JSON that any parser accepts. Python writes the bare words `NaN` and `Infinity`, which are not JSON. Here
they become the strings "NaN", "Infinity" and "-Infinity", which `float()` reads back. Finite floats keep every digit.
"""

import errno
import fcntl
import glob
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

logger = logging.getLogger(__name__)

# What a run writes for its report, in its folder.
RUN, GROUPS, TIMELINE, SAMPLES = "run.json", "groups.jsonl", "timeline.jsonl", "samples"

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FULL_BELOW_BYTES = 1 << 20  # torch.save reports a full disk as an error about a position in its file


def to_plain(value: Any) -> Any:
    """`value` as dict, list, str, int, finite float, bool and None. Raises TypeError for other types.

    A scalar of numpy and a tensor without dimensions are numbers.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if hasattr(value, "item") and value.ndim == 0:  # a scalar of numpy or torch
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


def flatten_dict(tree: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """The leaves of nested mappings, by their keys joined with `sep`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}{sep}{inner}": leaf for inner, leaf in flatten_dict(value, sep).items()}
        else:
            flat[key] = value
    return flat


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON on one line, or on several with `indent`. Raises TypeError as `to_plain` does."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element and in a script: ASCII, and no character that ends either."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def try_lock(fd: int) -> bool:
    """Lock a file or directory until it is closed. Returns False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks. The user must then ensure that one process at a time writes there.
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextmanager
def file_lock(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file, which is created if needed. A wait for another process is logged."""
    with path.open("w") as handle:
        if not try_lock(handle.fileno()):
            logger.info("Waiting for another process that holds %s", path)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def whole_or_not_at_all(output: Path) -> Generator[Path]:
    """A directory beside `output` to write into; it is renamed to `output` if the block succeeds.

    Raises:
        ValueError: `output` holds files already.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; name a directory that is new or empty")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{output.name}.partial-", dir=output.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The directory `target`, which `make` fills if it does not exist.

    Several processes may call this at the same time. If one is killed in `make`, the next one begins again.
    """
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(target.with_name(f"{target.name}.lock")):
            if not target.is_dir():  # unless another process has made it meanwhile
                for left in target.parent.glob(f"{glob.escape(target.name)}.partial-*"):  # of a process that was killed
                    remove_tree(left)
                with whole_or_not_at_all(target) as partial:
                    make(partial)
    return target


def new_folder(parent: Path, prefix: str, first: int = 0) -> Path:
    """Create and return `<parent>/<prefix>NNN`, with the number after the highest. No two calls get the same folder."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        matches = (re.fullmatch(rf"{prefix}(\d+)", path.name) for path in parent.iterdir())
        number = max((int(match[1]) for match in matches if match), default=first - 1) + 1
        path = parent / f"{prefix}{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue  # another process has taken the number meanwhile
        return path


def remove_tree(path: Path) -> None:
    """Remove `path`. Files that a dying process still writes into it are left for the next start."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed entirely", path)


def is_disk_full(error: BaseException, free_bytes: int) -> bool:
    """Whether a full disk caused `error`. `free_bytes` were left before the unfinished checkpoint was removed.

    Searches the chain of causes: a worker's OSError arrives wrapped, and native writers report a text or nothing.
    """
    cause: BaseException | None = error
    while cause is not None:
        has_errno = isinstance(cause, OSError) and cause.errno in _NO_SPACE
        if has_errno or any(os.strerror(code) in str(cause) for code in _NO_SPACE):
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


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]

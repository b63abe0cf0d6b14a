"""The manifest of a checkpoint: size and digest of every file, written after all files are on stable storage.

A directory without a manifest was never finished; a directory that differs from its manifest is damaged.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

MANIFEST_NAME = "manifest.json"

_CHUNK_BYTES = 8 << 20
_NUM_THREADS = 8  # hashing and fsync both release the interpreter lock


def seal(directory: Path) -> int:
    """Digest and fsync every file, write the manifest, fsync every directory. Returns the bytes of all files.

    Raises OSError, ENOSPC included: a disk may report only now that it is full.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST_NAME)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(lambda path: _digest(path, sync=True), paths))
    files = {
        path.relative_to(directory).as_posix(): {"size": size, "xxh3_128": digest}
        for path, (size, digest) in zip(paths, digests, strict=True)
    }
    write_synced(directory / MANIFEST_NAME, json.dumps({"files": files, "sha256": _digest_of(files)}, indent=1))
    for parent, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(parent))
    return sum(size for size, _ in digests)


def find_damage(directory: Path, names: Iterable[str] | None = None) -> str | None:
    """Why `directory` must not be loaded, with the file; None if every file, or each of `names`, is as sealed."""
    manifest_path = directory / MANIFEST_NAME
    if not manifest_path.is_file():
        # This library renames only sealed directories to step_N.
        by_others = directory.name.startswith("step_")
        return f"{MANIFEST_NAME} is missing: " + (
            "another program wrote this directory, or the manifest was removed"
            if by_others
            else "the checkpoint was never finished"
        )
    files = _read_manifest(manifest_path)
    if files is None:
        return f"{MANIFEST_NAME} is damaged"

    def damage_of(name: str) -> str | None:
        if name not in files:
            return f"{name} was not saved"
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        expected_size, expected_digest = files[name]["size"], files[name]["xxh3_128"]
        if (size := path.stat().st_size) != expected_size:
            return f"{name} has {size} bytes instead of {expected_size}"
        try:
            _, digest = _digest(path, sync=False)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if digest == expected_digest else f"{name} is not what was saved: its digest differs"

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        damages = pool.map(damage_of, sorted(files if names is None else names))
        return next((damage for damage in damages if damage is not None), None)


def sealed_sizes(directory: Path) -> dict[str, int]:
    """Bytes of each file of the manifest, by its name relative to `directory`; {} when it is missing or damaged."""
    files = _read_manifest(directory / MANIFEST_NAME) or {}
    return {name: int(entry["size"]) for name, entry in files.items()}


def sealed_digest(directory: Path) -> str | None:
    """A digest of everything that was sealed; None when the manifest is missing or damaged."""
    files = _read_manifest(directory / MANIFEST_NAME)
    return None if files is None else _digest_of(files)


def write_synced(path: Path, text: str) -> None:
    """Write `text`; it is on stable storage on return."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make new files and renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(path: Path, *, sync: bool) -> tuple[int, str]:
    """Size in bytes and digest of a file, read through the descriptor that is fsynced."""
    hasher = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return size, hasher.hexdigest()


def _digest_of(files: dict[str, dict[str, int | str]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, dict] | None:
    """The `files` of a manifest; None if it is missing or its own digest is wrong."""
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.keys() != {"files", "sha256"}:
        return None
    return manifest["files"] if manifest["sha256"] == _digest_of(manifest["files"]) else None

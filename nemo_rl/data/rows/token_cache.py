"""A cache of tokenised rows on disk, for all processes, epochs and runs. The key is the content of the row."""

from __future__ import annotations

import datetime
import decimal
import fcntl
import json
import logging
import os
import sqlite3
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from nemo_rl.types import Example, ExampleMeta, Prompt
from nemo_rl.utils.files import cache_root

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # raise it when the layout of values changes
BUSY_TIMEOUT_S = 60.0
_PREFIX = struct.Struct("<QI")  # digest of what follows, bytes of the JSON header
_PLACEHOLDER = "\x00id\x00"  # stands for the prompt id: rows of equal content share an entry
_AS_REPR = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, bytes)

MadeRow = tuple[list[Example], ExampleMeta]


class DamagedCache(ValueError):
    """A file is no token cache, or a value in it has changed."""


class TokenCache:
    """One SQLite file `<directory>/<fingerprint>.sqlite`, used by one thread in each of any number of processes.

    `fingerprint` identifies everything except the row that determines its tokens (tokenizer, template, processor,
    limits). A damaged file is renamed, with a warning, and a new one is made. If rows cannot be written, for example to
    a full disk, the cache stops storing, with one warning.

    Raises:
        ValueError: if the directory cannot be written.
    """

    def __init__(self, fingerprint: str, directory: str | Path | None = None) -> None:
        self.fingerprint = fingerprint
        self.path = check_cache_dir(directory) / f"{fingerprint}.sqlite"
        self._stores = True
        self._inode = 0  # of the open file
        self._connection = self._open()

    def load(self, prompts: Sequence[Prompt]) -> list[MadeRow | None]:
        """The cached rows under the ids of the prompts; None for rows that are not cached."""
        keys = [self._key(prompt) for prompt in prompts]
        self._follow()
        try:
            known = [key for key in keys if key is not None]
            holes = ",".join("?" * len(known))
            values = dict(self._connection.execute(f"SELECT key, value FROM rows WHERE key IN ({holes})", known))
            pairs = zip(keys, prompts, strict=True)
            return [decode_row(values[key], prompt) if key in values else None for key, prompt in pairs]
        except (DamagedCache, sqlite3.DatabaseError) as error:
            self._connection.close()
            self._put_aside(error)
            self._connection = self._open()
            return [None] * len(prompts)

    def store(self, prompts: Sequence[Prompt], made: Sequence[MadeRow]) -> None:
        """Store tokenised rows in one transaction. Rows without an exact JSON form are omitted."""
        keys = [self._key(prompt) for prompt in prompts]
        entries = [
            (key, encode_row(row, prompt.prompt_id))
            for key, prompt, row in zip(keys, prompts, made, strict=True)
            if key is not None
        ]
        if not self._stores or not entries:
            return
        self._follow()
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?)", entries)
        except sqlite3.DatabaseError as error:
            logger.warning("tokenised rows are no longer stored in %s: %s", self.path, error)
            self._stores = False

    def close(self) -> None:
        self._connection.close()

    def _key(self, prompt: Prompt) -> bytes | None:
        try:
            # Keys are not sorted: a template writes the description of a tool in their order.
            row = json.dumps([prompt.task_name, prompt.row], default=_exact, ensure_ascii=False)
        except TypeError:
            return None
        return xxhash.xxh3_128_digest(f"{self.fingerprint}\n{row}".encode("utf-8", "surrogatepass"))

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except (DamagedCache, sqlite3.DatabaseError) as error:
            self._put_aside(error)
            return self._connect()

    def _follow(self) -> None:
        """Open the file again if another process has renamed or removed it."""
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            self._connection.close()
            check_cache_dir(self.path.parent)
            self._connection = self._open()

    def _connect(self) -> sqlite3.Connection:
        self._inode = self.path.stat().st_ino if self.path.exists() else 0
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        with ExitStack() as undo:
            undo.callback(connection.close)
            # The rollback journal: the write-ahead log needs memory shared by all processes, and the folder may be on a
            # network. No waiting for the disk: lost rows are made again.
            connection.execute("PRAGMA synchronous = OFF")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            self._inode = self.path.stat().st_ino
            if version not in (0, FORMAT_VERSION):
                raise DamagedCache(f"its format is {version}, not {FORMAT_VERSION}")
            if version == 0:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value BLOB)")
                connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                connection.execute("COMMIT")
            undo.pop_all()
        return connection

    def _put_aside(self, error: Exception) -> None:
        """Rename a damaged file, unless another process has already done so."""
        if isinstance(error, sqlite3.OperationalError):  # the file is sound; the disk, say, is not
            raise ValueError(
                f"the token cache {self.path} cannot be used: {error}; see that the folder is on a disk with room, or "
                "switch the cache off with data.cache_tokens=false"
            ) from error
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists() and self.path.stat().st_ino == self._inode:
                aside = self.path.with_suffix(f".damaged-{os.getpid()}")
                self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
                self.path.rename(aside)
                logger.warning("the token cache %s is damaged (%s): put aside as %s", self.path, error, aside.name)


def check_cache_dir(directory: str | Path | None = None) -> Path:
    """The directory of token caches, by default `tokens` in the cache folder; it is made if it does not exist.

    Raises:
        ValueError: if it cannot be written.
    """
    path = Path(directory) if directory is not None else cache_root() / "tokens"
    advice = "set NEMO_RL_CACHE to a folder that can be written, or switch the cache off with data.cache_tokens=false"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder of tokenised rows {path} cannot be made ({error.strerror}): {advice}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"the folder of tokenised rows {path} cannot be written: {advice}")
    return path


def encode_row(made: MadeRow, prompt_id: str) -> bytes:
    """A tokenised row as bytes: digest, JSON, token ids of all sequences, their masks. The inverse of `decode_row`."""
    examples, meta = made
    assert all(len(example.token_ids) == len(example.token_mask) for example in examples), prompt_id
    header = {
        "examples": [
            [example.sample_id.replace(prompt_id, _PLACEHOLDER), len(example.token_ids), example.margin]
            for example in examples
        ],
        "lengths": meta.lengths,
        "num_loss_tokens": meta.num_loss_tokens,
        "problem": None if meta.problem is None else meta.problem.replace(prompt_id, _PLACEHOLDER),
        "problem_kind": meta.problem_kind,
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)  # the token ids are aligned
    ids = [example.token_ids.astype("<i4").tobytes() for example in examples]
    masks = [example.token_mask.astype("?").tobytes() for example in examples]
    body = b"".join([text, *ids, *masks])
    return _PREFIX.pack(xxhash.xxh3_64_intdigest(body), len(text)) + body


def decode_row(value: bytes, prompt: Prompt) -> MadeRow:
    """The row that `encode_row` was given, with read-only arrays, under the id of `prompt`.

    Raises:
        DamagedCache: if the bytes have changed.
    """
    if len(value) < _PREFIX.size:
        raise DamagedCache("a value is too short")
    digest, num_header = _PREFIX.unpack_from(value)
    body = memoryview(value)[_PREFIX.size :]
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise DamagedCache("a value is not what was written")
    header = json.loads(bytes(body[:num_header]))
    counts = [count for _, count, _ in header["examples"]]
    first_mask = num_header + 4 * sum(counts)
    examples, before = [], 0
    for sample_id, count, margin in header["examples"]:
        examples.append(
            Example(
                sample_id=sample_id.replace(_PLACEHOLDER, prompt.prompt_id),
                token_ids=np.frombuffer(body, dtype="<i4", count=count, offset=num_header + 4 * before),
                token_mask=np.frombuffer(body, dtype="?", count=count, offset=first_mask + before),
                margin=margin,
            )
        )
        before += count
    problem = header["problem"]
    meta = ExampleMeta(
        prompt_id=prompt.prompt_id,
        index=0,
        lengths=tuple(header["lengths"]),
        num_loss_tokens=header["num_loss_tokens"],
        problem=None if problem is None else problem.replace(_PLACEHOLDER, prompt.prompt_id),
        problem_kind=header["problem_kind"],
    )
    return examples, meta


def _exact(value: Any) -> Any:
    """Values that JSON lacks, in a form that differs for different values. TypeError for all others."""
    if isinstance(value, _AS_REPR):
        return {type(value).__name__: repr(value)}
    if isinstance(value, np.ndarray | np.generic):
        return {str(value.dtype): value.tolist()}
    raise TypeError(f"{type(value).__name__} has no exact JSON form")

"""A cache of tokenised rows on disk, for all processes, epochs and runs. The key is the content of the row.

It holds only tokens. A row with images stays out: what it becomes depends on files and servers, too.
"""

import datetime
import decimal
import errno
import json
import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load, save

from nemo_rl.data.chat.images import has_images
from nemo_rl.types import Example, ExampleMeta, Prompt
from nemo_rl.utils.files import file_lock
from nemo_rl.utils.folders import cache_root

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2  # raise it when the layout of values changes
BUSY_TIMEOUT_S = 60.0
_DIGEST_BYTES = 8
_PLACEHOLDER = "\\u0000id\\u0000"  # in JSON, for the prompt id: rows of equal content share an entry
_AS_REPR = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, bytes)

MadeRow = tuple[list[Example], ExampleMeta]


class DamagedCache(ValueError):
    """A file is no token cache, or a value in it has changed."""


class TokenCache:
    """One SQLite file `<directory>/<fingerprint>.sqlite`, used by one thread in each of any number of processes.

    `fingerprint` identifies everything except the row that determines its tokens (tokenizer, template, processor,
    limits). A damaged file is renamed, with a warning, and a new one is made. If rows cannot be written, for example to
    a full disk, the cache stops storing, with one warning. Raises ValueError if the directory cannot be written, and
    OSError if there is no room for a new file.
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
        """Store tokenised rows in one transaction. Rows with images, or without an exact JSON form, are omitted."""
        if not self._stores:
            return
        keyed = [(self._key(prompt), prompt.prompt_id, row) for prompt, row in zip(prompts, made, strict=True)]
        entries = [(key, encode_row(row, prompt_id)) for key, prompt_id, row in keyed if key is not None]
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
        if has_images(prompt.row):
            return None
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
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            raise ValueError(
                f"the token cache {self.path} cannot be used: {error}; see that the folder is on a disk with room, or "
                "switch the cache off with data.cache_tokens=false"
            ) from error
        with file_lock(self.path.with_suffix(".lock")):
            if self.path.exists() and self.path.stat().st_ino == self._inode:
                aside = self.path.with_suffix(f".damaged-{os.getpid()}")
                self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
                self.path.rename(aside)
                logger.warning("the token cache %s is damaged (%s): put aside as %s", self.path, error, aside.name)


def check_cache_dir(directory: str | Path | None = None) -> Path:
    """The directory of token caches, by default `tokens` in the cache folder; it is made if it does not exist.

    Raises ValueError if it cannot be written.
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
    """A tokenised row as bytes: a digest, then safetensors of a JSON header, token ids and masks."""
    examples, meta = made
    header = {
        "examples": [[example.sample_id, example.margin] for example in examples],
        "lengths": meta.lengths,
        "num_loss_tokens": meta.num_loss_tokens,
        "problem": meta.problem,
        "problem_kind": meta.problem_kind,
    }
    text = json.dumps(header).replace(_quoted(prompt_id), _PLACEHOLDER)
    arrays: dict[str, np.ndarray] = {"header": np.frombuffer(text.encode(), dtype=np.uint8)}
    for number, example in enumerate(examples):
        arrays[f"ids_{number}"] = np.ascontiguousarray(example.token_ids, dtype=np.int32)
        arrays[f"mask_{number}"] = np.ascontiguousarray(example.token_mask, dtype=bool)
    body = save(arrays)
    return xxhash.xxh3_64_digest(body) + body


def decode_row(value: bytes, prompt: Prompt) -> MadeRow:
    """The row that `encode_row` was given, under the id of `prompt`. DamagedCache if the bytes have changed."""
    digest, body = value[:_DIGEST_BYTES], value[_DIGEST_BYTES:]
    if xxhash.xxh3_64_digest(body) != digest:
        raise DamagedCache("a value is not what was written")
    arrays = load(body)
    header = json.loads(arrays["header"].tobytes().decode().replace(_PLACEHOLDER, _quoted(prompt.prompt_id)))
    examples = []
    for number, (sample_id, margin) in enumerate(header.pop("examples")):
        ids, mask = arrays[f"ids_{number}"], arrays[f"mask_{number}"]
        examples.append(Example(sample_id=sample_id, token_ids=ids, token_mask=mask, margin=margin))
    lengths = tuple(header.pop("lengths"))
    return examples, ExampleMeta(prompt_id=prompt.prompt_id, index=0, lengths=lengths, **header)


def _quoted(prompt_id: str) -> str:
    """The id as it stands within a text of JSON."""
    return json.dumps(prompt_id)[1:-1]


def _exact(value: Any) -> Any:
    """Values that JSON lacks, in a form that differs for different values. TypeError for all others."""
    if isinstance(value, _AS_REPR):
        return {type(value).__name__: repr(value)}
    if isinstance(value, np.ndarray | np.generic):
        return {str(value.dtype): value.tolist()}
    raise TypeError(f"{type(value).__name__} has no exact JSON form")

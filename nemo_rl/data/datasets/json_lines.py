"""Rows of a JSONL file exactly as they are written: keys a row does not have are not there."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.data.interfaces import Row

NUM_ROWS_FOR_COLUMNS = 32


class JsonLines(Sequence[Row]):
    """One row per line that is not blank, parsed when it is asked for; what is kept is where each begins.

    A table with columns would give every row, and every object inside it, the keys of all others: the arguments of one
    tool in the calls of another.

    Raises:
        FileNotFoundError: when the file does not exist. ValueError: when it has no rows, or a line is no JSON object.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"dataset file {path!r} does not exist (looked in {Path.cwd()})")
        self.path = path
        self._bounds = _line_bounds(path)
        if len(self._bounds) == 0:
            raise ValueError(f"dataset file {path!r} is empty")

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: Any) -> Any:
        begin, end = self._bounds[int(index)]
        with open(self.path, "rb") as file:
            file.seek(int(begin))
            line = file.read(int(end - begin))
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"dataset file {self.path!r}: row {index} (from 0) is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"dataset file {self.path!r}: row {index} (from 0) is no JSON object: {line[:80]!r}")
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        """The keys of the first rows."""
        return list(dict.fromkeys(key for i in range(min(len(self), NUM_ROWS_FOR_COLUMNS)) for key in self[i]))


def _line_bounds(path: str) -> np.ndarray:
    """int64 [rows, 2]: where each line that is not blank begins and ends."""
    bounds: list[tuple[int, int]] = []
    if Path(path).stat().st_size == 0:
        return np.empty((0, 2), dtype=np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin)
            end = len(data) if end < 0 else end
            # Short lines only are looked at: a longer one is not blank.
            if end - begin > 16 or data[begin:end].strip():
                bounds.append((begin, end))
            begin = end + 1
    return np.array(bounds, dtype=np.int64).reshape(-1, 2)

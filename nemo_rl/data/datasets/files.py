"""Datasets from a local JSONL, CSV or Parquet file, a folder, or a Hugging Face path, with the names of two columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.interfaces import Row, Rows

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class MappedRows(Sequence[Row]):
    """Rows converted when they are asked for, so that millions of rows cost nothing until then."""

    def __init__(self, rows: Rows, convert: Callable[[Row], Row]) -> None:
        self.rows = rows
        self.convert = convert

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.convert(self.rows[int(index)])

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


class ColumnsToProblem:
    """Keeps a row's columns and adds `problem` and `expected_answer` from the two named ones."""

    def __init__(self, input_key: str, output_key: str, extract: Callable[[str], str] | None = None) -> None:
        self.input_key = input_key
        self.output_key = output_key
        self.extract = extract

    def __call__(self, row: Row) -> Row:
        for key in (self.input_key, self.output_key):
            if row[key] is None:
                raise ValueError(f"a row has nothing in column {key!r}: {dict(row)}; fill it in or remove the row")
        answer = str(row[self.output_key])
        return {
            **row,
            "problem": str(row[self.input_key]),
            "expected_answer": self.extract(answer) if self.extract else answer,
        }


def load_table(path: str, *, subset: str | None, split: str | None, cache_dir: str | None) -> Any:
    """A `datasets.Dataset` from a file, a folder of such files, or a Hugging Face path.

    Raises:
        FileNotFoundError: for a path of a file that is not there.
        ValueError: for an unknown file format, subset or split, a file that is damaged or has no rows, or a hub that
            cannot be reached.
    """
    import datasets

    table = _load_file(path, cache_dir) if is_file(path) else _load_named(path, subset, split, cache_dir)
    if isinstance(table, datasets.Dataset) and len(table) == 0:
        raise ValueError(f"dataset {path!r} is empty: it has no rows")
    return table


def is_file(path: str) -> bool:
    """Whether `path` means a single file, there or not."""
    return Path(path).suffix in FORMATS or Path(path).is_file()


def _load_file(path: str, cache_dir: str | None) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    local = Path(path)
    if not local.is_file():
        raise FileNotFoundError(f"dataset file {path!r} does not exist (looked in {Path.cwd()})")
    if local.suffix not in FORMATS:
        raise ValueError(f"dataset file {path!r}: unknown format; there are {', '.join(FORMATS)}")
    if local.stat().st_size == 0:
        raise ValueError(f"dataset file {path!r} is empty")
    try:
        return datasets.load_dataset(FORMATS[local.suffix], data_files=path, cache_dir=cache_dir)["train"]
    except (DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error  # what the reader of the format says
        if "corresponds to no data" in str(cause):  # a header and nothing below it
            raise ValueError(f"dataset {path!r} is empty: it has no rows") from error
        raise ValueError(f"dataset file {path!r} cannot be read as {local.suffix}: {cause}") from error


def _load_named(path: str, subset: str | None, split: str | None, cache_dir: str | None) -> Any:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        loaded = datasets.load_dataset(path, name=subset, cache_dir=cache_dir)
    except DatasetNotFoundError as error:
        raise ValueError(
            f"dataset {path!r} is neither a local path nor found on the Hugging Face hub (a private one needs "
            f"HF_TOKEN): {error}"
        ) from error
    except ConnectionError as error:
        raise ValueError(
            f"dataset {path!r} is no local path, and the Hugging Face hub cannot be reached: {error}. Without a "
            "network give data_path: a local file, or take data that is in the Hugging Face cache already"
        ) from error
    wanted = split or "train"
    if wanted not in loaded:
        raise ValueError(f"dataset {path!r} has no split {wanted!r}; it has {', '.join(map(str, loaded))}")
    return loaded[wanted]


def require_columns(table: Any, needed: dict[str, str], label: str) -> None:
    """Check that the columns exist.

    Raises:
        ValueError: naming the config key, the missing column and the columns there are.
    """
    for key, column in needed.items():
        if column not in table.column_names:
            raise ValueError(
                f"dataset {label!r} has no column {column!r} ({key}); its columns are: {', '.join(table.column_names)}"
            )


def load_response_rows(cfg: DatasetConfig) -> Rows:
    """Rows of `data_path` with `input_key` as problem and `output_key` as answer; `messages` rows pass as they are.

    Raises:
        ValueError: for a missing `data_path`, column, split or an empty table. FileNotFoundError: for a missing file.
    """
    if cfg.data_path is None:
        raise ValueError(f"dataset {cfg.dataset_name!r} needs data_path: a file or a Hugging Face path")
    table = load_table(cfg.data_path, subset=cfg.subset, split=cfg.split, cache_dir=cfg.download_dir)
    if "messages" in table.column_names and cfg.input_key not in table.column_names:
        return table
    require_columns(table, {"input_key": cfg.input_key, "output_key": cfg.output_key}, cfg.data_path)
    return MappedRows(table, ColumnsToProblem(cfg.input_key, cfg.output_key))

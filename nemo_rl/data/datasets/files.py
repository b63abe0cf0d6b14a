"""Datasets from a local JSONL, CSV or Parquet file, a folder, or a Hugging Face path, with the names of two columns."""

from __future__ import annotations

import copy
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from nemo_rl.config.base import StrictModel
from nemo_rl.data.config import DatasetConfig, ExampleTableConfig, TableConfig
from nemo_rl.data.interfaces import BAD_ROW, Row, Rows, StreamedTable

# -- Rows of a JSONL file exactly as they are written: keys a row does not have are not there.

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


FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class MappedRows(Sequence[Row]):
    """Rows converted when they are asked for, so that millions of rows cost nothing until then.

    Raises ValueError, with `label` and index of the row, for one that cannot be converted.
    """

    def __init__(self, rows: Rows, convert: Callable[[Row], Row], label: str = "") -> None:
        self.rows = rows
        self.convert = convert
        self.label = label

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        row = self.rows[int(index)]
        try:
            return self.convert(row)
        except KeyError as error:
            raise ValueError(
                f"row {self.label}:{index} has no {error.args[0]!r}; it has: {', '.join(map(str, row))}"
            ) from error
        except ValueError as error:
            raise ValueError(f"row {self.label}:{index}: {error}") from error

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


class MarkedRows(Sequence[Row]):
    """Rows converted when they are asked for; in the place of one that cannot be read or converted, {BAD_ROW: why}."""

    def __init__(self, rows: Rows, convert: Callable[[Row], Row]) -> None:
        self.rows = rows
        self.convert = convert

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        try:
            row = self.rows[int(index)]
        except ValueError as error:  # a line that is no JSON
            return {BAD_ROW: str(error)}
        return convert_or_mark(row, self.convert)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


def convert_or_mark(row: Row, convert: Callable[[Row], Row]) -> Row:
    """The converted row, or {BAD_ROW: why it cannot be}."""
    try:
        return convert(row)
    except KeyError as error:
        return {BAD_ROW: f"no column {error.args[0]!r}; it has: {', '.join(map(str, row))}"}
    except TypeError as error:  # a value of another kind, or none, where the layout has a list or an object
        return {BAD_ROW: f"its columns {', '.join(map(str, row))} do not have the layout of the dataset: {error}"}
    except ValueError as error:
        return {BAD_ROW: str(error)}


def converted(table: Any, convert: Callable[[Row], Row]) -> Rows | StreamedTable:
    """The rows of a table, in memory or streamed, converted when they are asked for; see `MarkedRows`."""
    import datasets

    if isinstance(table, datasets.IterableDataset):
        return StreamedTable(table=table, convert=partial(convert_or_mark, convert=convert))
    return MarkedRows(table, convert)


Options = TypeVar("Options", bound=StrictModel)


def options_of(cfg: TableConfig, model: type[Options]) -> Options:
    """The `kwargs` of a dataset as its options.

    Raises:
        ValueError: for an unknown or wrong one; it says which there are.
    """
    try:
        return model(**cfg.kwargs)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{cfg.dataset_name}: kwargs takes {', '.join(model.model_fields)}; {wrong}") from error


def generated_options(cfg: TableConfig, model: type[Options]) -> Options:
    """`options_of` for a dataset that reads nothing.

    Raises:
        ValueError: also for a file to read.
    """
    if cfg.data_path is not None:
        raise ValueError(
            f"dataset {cfg.dataset_name!r} is generated and reads no data_path ({cfg.data_path}); to read the file set "
            "dataset_name=null"
        )
    require_used_keys(cfg, (), "the dataset is generated")
    return options_of(cfg, model)


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


def load_table(
    path: str, *, subset: str | None, split: str | None, cache_dir: str | None, streaming: bool = False
) -> Any:
    """A `datasets.Dataset` from a file, a folder of such files, or a Hugging Face path; streamed an `IterableDataset`.

    Raises:
        FileNotFoundError: for a path of a file that is not there.
        ValueError: for an unknown file format, subset or split, a subset or split of a single file, a file that is
            damaged or has no rows, or a hub that cannot be reached.
    """
    import datasets

    if is_file(path):
        _require_whole_file(path, subset, split)
        table = _load_file(path, cache_dir, streaming)
    else:
        table = _load_named(path, subset, split, cache_dir, streaming)
    if isinstance(table, datasets.Dataset) and len(table) == 0:
        raise ValueError(f"dataset {path!r} is empty: it has no rows")
    return table


def is_file(path: str) -> bool:
    """Whether `path` means a single file, there or not."""
    return Path(path).suffix in FORMATS or Path(path).is_file()


def _require_whole_file(path: str, subset: str | None, split: str | None) -> None:
    """Raises ValueError for a part of a file, which has none: it would be the same rows under another name."""
    if split not in (None, "train"):
        raise ValueError(
            f"dataset file {path!r} has no split {split!r}: a file is read whole. Name another file in data_path (and "
            "set split=null), or set rows of the training data aside with split_validation_size"
        )
    if subset is not None:
        raise ValueError(f"dataset file {path!r} has no subset {subset!r}: a file is read whole; set subset=null")


def _load_file(path: str, cache_dir: str | None, streaming: bool) -> Any:
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
        return datasets.load_dataset(FORMATS[local.suffix], data_files=path, cache_dir=cache_dir, streaming=streaming)[
            "train"
        ]
    except (DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error  # what the reader of the format says
        if "corresponds to no data" in str(cause):  # a header and nothing below it
            raise ValueError(f"dataset {path!r} is empty: it has no rows") from error
        raise ValueError(f"dataset file {path!r} cannot be read as {local.suffix}: {cause}") from error


def _load_named(path: str, subset: str | None, split: str | None, cache_dir: str | None, streaming: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        loaded = datasets.load_dataset(path, name=subset, cache_dir=cache_dir, streaming=streaming)
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
    columns = column_names(table)
    for key, column in needed.items():
        if column not in columns:
            raise ValueError(
                f"dataset {label!r} has no column {column!r} ({key}); its columns are: {', '.join(columns)}"
            )


def require_used_keys(cfg: TableConfig, used: Sequence[str], what: str, table: Any = None) -> None:
    """Check that every column key that was set means something; `what` says why others do not, after "set but".

    Raises:
        ValueError: for a key that is not in `used`, and for one of a column that no row of `table` has.
    """
    if not isinstance(cfg, ExampleTableConfig):
        return
    fields = type(cfg).model_fields
    keys = {key: value for key, value in cfg.model_dump().items() if key.endswith("_key")}
    given = {key: value for key, value in keys.items() if value != fields[key].default}
    unused = [f"{key}={value}" for key, value in given.items() if key not in used]
    label = cfg.dataset_name or cfg.data_path
    if unused:
        raise ValueError(f"dataset {label!r}: {', '.join(unused)} is set but {what}; remove it")
    for key, column in given.items():
        if column not in column_names(table) and not (
            isinstance(table, JsonLines) and any(column in row for row in MarkedRows(table, dict))
        ):
            require_columns(table, {key: column}, str(label))


def column_names(table: Any) -> list[str]:
    """The columns of a table; of a streamed one that does not know them, those of its first row."""
    if table.column_names is not None:
        return list(table.column_names)
    return list(next(iter(copy.deepcopy(table)), {}))


def load_response_rows(cfg: TableConfig) -> Rows:
    """Rows of `data_path` with `input_key` as problem and `output_key` as answer; `messages` rows pass as they are.

    Raises:
        ValueError: for a missing `data_path`, column, split or an empty table. FileNotFoundError: for a missing file.
    """
    assert isinstance(cfg, DatasetConfig)
    if cfg.data_path is None:
        raise ValueError(f"dataset {cfg.dataset_name!r} needs data_path: a file or a Hugging Face path")
    table = load_table(cfg.data_path, subset=cfg.subset, split=cfg.split, cache_dir=cfg.download_dir)
    if "messages" in table.column_names and cfg.input_key not in table.column_names:
        return table
    require_columns(table, {"input_key": cfg.input_key, "output_key": cfg.output_key}, cfg.data_path)
    return MappedRows(table, ColumnsToProblem(cfg.input_key, cfg.output_key))


def load_example_table(cfg: ExampleTableConfig) -> tuple[Any, str]:
    """(table, what to call it) of `data_path`: rows as they are written in a JSONL file, else those of `load_table`.

    Raises:
        ValueError, FileNotFoundError: as `load_table`, and for a missing `data_path`.
    """
    if cfg.data_path is None:
        raise ValueError(f"dataset {cfg.dataset_name!r} needs data_path: a file or a Hugging Face path")
    if cfg.data_path.endswith(".jsonl") and not cfg.streaming:
        _require_whole_file(cfg.data_path, cfg.subset, cfg.split)
        return JsonLines(cfg.data_path), Path(cfg.data_path).stem
    table = load_table(
        cfg.data_path, subset=cfg.subset, split=cfg.split, cache_dir=cfg.download_dir, streaming=cfg.streaming
    )
    return table, Path(cfg.data_path).stem if is_file(cfg.data_path) else cfg.data_path

"""Tables from a local JSONL, JSON, CSV or Parquet file, a folder of such files, or a Hugging Face path.

Rows are read and converted one by one, when they are indexed, so that millions of rows cost nothing before that.
"""

import copy
import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from nemo_rl.config.errors import some_of
from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import DatasetConfig, ExampleTableConfig, TableConfig, dataset_label
from nemo_rl.data.interfaces import BAD_ROW, LazyRows, Row, Rows, StreamedTable
from nemo_rl.utils.task_formats import one_text

NUM_ROWS_FOR_COLUMNS = 32
MAX_ROW_BYTES = 256 << 20  # of a line of text: a longer one is a file without line breaks
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# Of files in folders, which the package datasets reads; the names are of files that it never takes for rows.
FOLDER_FORMATS = {**FORMATS, ".ndjson": "json", ".tsv": "tsv", ".arrow": "arrow"}
NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# What the readers of Parquet and CSV say.
SAID_OF_EMPTY_FILES = ("BatchSize must be greater than 0", "No columns to parse from file")

Convert = Callable[[Row], Row]
Options = TypeVar("Options", bound=StrictModel)

# -- Rows that are made when they are indexed.


class JsonLines(LazyRows):
    """The rows of a JSONL file exactly as they are written: one per line that is not blank.

    A table with columns gives every row, and every object inside it, the keys of all others: the arguments of one tool
    appear in the calls of another. In memory are only the positions of the lines.

    Raises:
        FileNotFoundError: if the file does not exist. ValueError: if it has no rows, or a line is no JSON object.
    """

    def __init__(self, path: str) -> None:
        _require_content(path)
        self.path = path
        bounds = list(_lines(path))
        if not bounds:
            raise ValueError(f"dataset file {path!r} is empty")
        self._bounds = np.array(bounds, dtype=np.int64)  # [rows, 2]: where each line begins and ends

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: Any) -> Any:
        begin, end = map(int, self._bounds[index])
        where = f"dataset file {self.path!r}: row {index} (from 0)"
        _require_short(end - begin, where)
        with open(self.path, "rb") as file:
            file.seek(begin)
            line = file.read(end - begin)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter of JSON with thousands of brackets
            raise ValueError(f"{where} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no JSON object: {line[:80]!r}")
        return row

    @property
    def column_names(self) -> list[str]:
        """The keys of the first rows."""
        return list(dict.fromkeys(key for i in range(min(len(self), NUM_ROWS_FOR_COLUMNS)) for key in self[i]))


def _lines(path: str) -> Iterator[tuple[int, int]]:
    """Where each line that is not blank begins and ends. An empty file cannot be mapped."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin)
            end = len(data) if end < 0 else end
            # Only short lines are read: a longer line is taken not to be blank.
            if end - begin > 16 or data[begin:end].strip():
                yield begin, end
            begin = end + 1


def _require_short(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_ROW_BYTES:
        size = f"{num_bytes / 2**20:,.0f} MiB, more than {MAX_ROW_BYTES >> 20} MiB"
        raise ValueError(f"{where} has {size}: every row is a line of its own")


@dataclass(eq=False, repr=False)
class MarkedRows(LazyRows):
    """Converted rows; a row that cannot be read or converted becomes {BAD_ROW: reason}."""

    rows: Rows
    convert: Convert

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        try:
            row = self.rows[index]
        except ValueError as error:  # a line that is no JSON
            return {BAD_ROW: str(error)}
        return convert_or_mark(row, self.convert)


@dataclass(eq=False, repr=False)
class MappedRows(MarkedRows):
    """Converted rows; a row that cannot be converted raises ValueError with `label` and the index of the row."""

    label: str

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        if BAD_ROW in row:
            raise ValueError(f"dataset {self.label!r}: row {index} {row[BAD_ROW]}")
        return row


def convert_or_mark(row: Row, convert: Convert) -> Row:
    """The converted row, or {BAD_ROW: reason}."""
    try:
        return convert(row)
    except KeyError as error:
        reason = f"has no column {error.args[0]!r}; it has: {', '.join(map(str, row))}"
    except TypeError as error:  # a value of another kind, or null, where the layout has a list or an object
        reason = f"has columns {', '.join(map(str, row))}, which do not have the layout of the dataset: {error}"
    except ValueError as error:
        reason = str(error)
    return {BAD_ROW: reason}


def converted(table: Any, convert: Convert) -> Rows | StreamedTable:
    """The rows of a table, in memory or streamed, converted when they are read; see `MarkedRows`."""
    import datasets

    if isinstance(table, datasets.IterableDataset):
        return StreamedTable(table=table, convert=partial(convert_or_mark, convert=convert))
    return MarkedRows(table, convert)


# -- Tables.


def load_table(
    path: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    cache_dir: str | None = None,
    streaming: bool = False,
    builder: str | None = None,
) -> Any:
    """A `datasets.Dataset` from a file, a folder of such files, or a Hugging Face path; streamed an `IterableDataset`.

    `builder`, a value of FORMATS, is the format of a file whose name does not end in it.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: for an unknown file format, subset or split, a subset or split of a single file, a file that is
            damaged or has no rows, or if the hub cannot be reached.
    """
    import datasets

    source: dict[str, Any] = {"path": path, "name": subset}
    if is_file(path):
        _require_whole_file(path, subset, split)
        builder = builder or FORMATS.get(Path(path).suffix)
        if builder is None:
            raise ValueError(f"dataset file {path!r}: unknown format; there are {', '.join(FORMATS)}")
        _require_content(path)
        if builder == "parquet":
            _require_rows_of_parquet(path)
        if path.endswith(".jsonl") and Path(path).stat().st_size > MAX_ROW_BYTES:
            for row, (begin, end) in enumerate(_lines(path)):
                _require_short(end - begin, f"dataset file {path!r}: row {row} (from 0)")
        source = {"path": builder, "data_files": path}
    elif Path(path).is_dir():
        _require_readable(Path(path))
    with _naming_errors(path, builder):
        loaded = datasets.load_dataset(**source, cache_dir=cache_dir, streaming=streaming)
    if Path(path).is_dir():
        read: Any = datasets.load_dataset_builder(path, name=subset, cache_dir=cache_dir).config.data_files
        _require_all_files(Path(path), read)
    wanted = split or "train"
    if wanted not in loaded:
        raise ValueError(f"dataset {path!r} has no split {wanted!r}; it has {', '.join(map(str, loaded))}")
    table = loaded[wanted]
    with _naming_errors(path, builder):
        has_rows = len(table) if isinstance(table, datasets.Dataset) else any(True for _ in copy.deepcopy(table))
    if not has_rows:
        raise ValueError(f"dataset {path!r} is empty: it has no rows")
    return table


@contextmanager
def _naming_errors(path: str, builder: str | None) -> Iterator[None]:
    """Raises what the package datasets says of a table as ValueError, naming the table and, if it can, the remedy."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        yield
    except DatasetNotFoundError as error:
        raise ValueError(
            f"dataset {path!r} is neither a local path nor found on the Hugging Face hub (a private one needs "
            f"HF_TOKEN): {error}"
        ) from error
    except ConnectionError as error:
        raise ValueError(
            f"dataset {path!r} is no local path, and the Hugging Face hub cannot be reached: {error}. Without a "
            "network name a local file, or take data that is in the Hugging Face cache already"
        ) from error
    except (DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error  # the message of the format's reader
        if "corresponds to no data" in str(cause):  # a header and nothing below it
            raise ValueError(f"dataset {path!r} is empty: it has no rows") from error
        if any(text in str(cause) for text in SAID_OF_EMPTY_FILES):
            raise ValueError(
                f"dataset {path!r} is empty: it has no rows"
                if is_file(path)
                else f"dataset {path!r} has a file without rows; remove it"
            ) from error
        raise ValueError(f"dataset {path!r} cannot be read{f' as {builder}' if builder else ''}: {cause}") from error


def is_file(path: str) -> bool:
    """Whether `path` names a single file, which may not exist."""
    return Path(path).suffix in FORMATS or Path(path).is_file()


def _require_whole_file(path: str, subset: str | None, split: str | None) -> None:
    """Raises ValueError for a part of a file: a file has no parts, and would give the same rows under another name."""
    if split not in (None, "train"):
        raise ValueError(
            f"dataset file {path!r} has no split {split!r}: a file is read whole. Name another file in data_path (and "
            "set split=null), or set rows of the training data aside with split_validation_size"
        )
    if subset is not None:
        raise ValueError(f"dataset file {path!r} has no subset {subset!r}: a file is read whole; set subset=null")


def _files_of_rows(folder: Path) -> list[Path]:
    """The files of a folder that look like rows; none if its card says which they are."""
    from huggingface_hub import metadata_load  # a hundred modules, which configurations do not need

    card = folder / "README.md"
    if card.is_file() and "configs" in (metadata_load(card) or {}):
        return []
    inside = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file())
    return [
        file
        for file in inside
        if _folder_format(file) is not None
        and file.name not in NO_ROWS
        and file.stem != "metadata"
        and not any(part.startswith((".", "__")) for part in file.parts)
    ]


def _folder_format(file: Path) -> str | None:
    """The format of a file, which may be compressed."""
    return next((FOLDER_FORMATS[s] for s in map(str.lower, file.suffixes) if s in FOLDER_FORMATS), None)


def _require_readable(folder: Path) -> None:
    """Raises ValueError for files of several formats, of which the package datasets reads one, or without bytes."""
    files = _files_of_rows(folder)
    examples = {_folder_format(file): str(file) for file in files}
    if len(examples) > 1:
        raise ValueError(
            f"dataset {str(folder)!r} has files of several formats, such as {' and '.join(sorted(examples.values()))}, "
            "of which only one would be read: give each format a folder of its own, and name each as a dataset"
        )
    if files and all((folder / file).stat().st_size == 0 for file in files):
        raise ValueError(f"dataset {str(folder)!r} is empty: its files hold no byte")


def _require_all_files(folder: Path, read: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for a file that belongs to none of the splits `read`: their names decide."""
    known = {Path(file).resolve() for files in read.values() for file in files}
    left_out = [str(file) for file in _files_of_rows(folder) if (folder / file).resolve() not in known]
    if left_out:
        raise ValueError(
            f"dataset {str(folder)!r} has the splits {', '.join(map(str, read))}, and files that belong to none: "
            f"{some_of(left_out, 4)}; name each after its split, such as train-2.jsonl, or move it away"
        )


def _require_content(path: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"dataset file {path!r} does not exist (looked in {Path.cwd()})")
    if Path(path).stat().st_size == 0:
        raise ValueError(f"dataset file {path!r} is empty")


def _require_rows_of_parquet(path: str) -> None:
    """Raises ValueError for a file without rows, of which the package datasets logs an error of its own."""
    from pyarrow import parquet

    with _naming_errors(path, "parquet"):
        num_rows = parquet.read_metadata(path).num_rows
    if num_rows == 0:
        raise ValueError(f"dataset {path!r} is empty: it has no rows")


def load_data_path(cfg: TableConfig, path: str | None = None) -> Any:
    """The table of `path`, or else of `data_path`. ValueError if there is neither; otherwise as `load_table`."""
    if (path := path or cfg.data_path) is None:
        raise ValueError(f"dataset {cfg.dataset_name!r} needs data_path: a file or a Hugging Face path")
    cache, streaming = cfg.download_dir, cfg.is_streamed
    return load_table(path, subset=cfg.subset, split=cfg.split, cache_dir=cache, streaming=streaming)


def load_as_written(cfg: TableConfig) -> Any:
    """The table of `data_path`: rows of a JSONL file as they are written, other tables from `load_table`.

    Raises ValueError or FileNotFoundError as `load_table`, and if there is no `data_path`.
    """
    path = cfg.data_path
    if path is not None and path.endswith(".jsonl") and not cfg.is_streamed:
        _require_whole_file(path, cfg.subset, cfg.split)
        return JsonLines(path)
    return load_data_path(cfg)


# -- Prompts: a problem and its answer from two columns.


def problem_row(row: Row, *, input_key: str, output_key: str, extract: Callable[[str], str] | None = None) -> Row:
    """The row with `problem` and `expected_answer` from two of its columns, the latter through `extract`."""
    answer = extract(column_text(row, output_key)) if extract else text_or_value(row, output_key)
    return {**row, "problem": text_or_value(row, input_key), "expected_answer": answer}


def column_text(row: Row, column: str) -> str:
    """The text of a column. ValueError for a value that is neither text nor number."""
    return one_text(row[column], f"in column {column!r}")


def text_or_value(row: Row, column: str) -> Any:
    """The text of a column; a list or an object as it is, for processors that take one. ValueError for nothing."""
    return row[column] if isinstance(row[column], list | dict) else column_text(row, column)


def load_response_rows(cfg: TableConfig) -> Rows:
    """Rows of `data_path` with `input_key` as problem and `output_key` as answer; rows with `messages` stay unchanged.

    Raises:
        ValueError: for a missing `data_path`, column or split, or an empty table. FileNotFoundError: for a missing
            file.
    """
    assert isinstance(cfg, DatasetConfig)
    table, label = load_data_path(cfg), dataset_label(cfg)
    if "messages" in table.column_names and cfg.input_key not in table.column_names:
        return table
    require_columns(table, {"input_key": cfg.input_key, "output_key": cfg.output_key}, label)
    return MappedRows(table, partial(problem_row, input_key=cfg.input_key, output_key=cfg.output_key), label)


# -- Options and columns, checked.


def options_of[Options: StrictModel](cfg: TableConfig, model: type[Options]) -> Options:
    """The `kwargs` of a dataset. ValueError for an unknown or invalid one, naming those there are."""
    try:
        return model(**cfg.kwargs)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{cfg.dataset_name}: kwargs takes {', '.join(model.model_fields)}; {wrong}") from error


def column_names(table: Any) -> list[str]:
    """The columns of a table; of a streamed table without this information, the columns of its first row."""
    if table.column_names is not None:
        return list(table.column_names)
    return list(next(iter(copy.deepcopy(table)), {}))


def require_columns(table: Any, needed: dict[str, str], label: str) -> None:
    """Raises ValueError for a column that does not exist. `needed`: configuration key -> column."""
    columns = column_names(table)
    for key, column in needed.items():
        if column not in columns:
            there = ", ".join(columns)
            raise ValueError(f"dataset {label!r} has no column {column!r} ({key}); its columns are: {there}")


def require_used_keys(cfg: TableConfig, used: Sequence[str], reason: str, table: Any = None) -> None:
    """Check that every column key (`..._key`) that is set has an effect. Those not in `used` have none, for `reason`.

    Raises ValueError for a key that is not in `used`, and for a column that no row of `table` has.
    """
    if not isinstance(cfg, ExampleTableConfig):
        return
    given = {key: value for key, value in cfg.model_dump(exclude_defaults=True).items() if key.endswith("_key")}
    unused = [f"{key}={value}" for key, value in given.items() if key not in used]
    label = dataset_label(cfg)
    if unused:
        raise ValueError(f"dataset {label!r}: {', '.join(unused)} is set but {reason}; remove it")
    for key, column in given.items():
        # The first rows of a JSONL file, which tell its columns, may lack one that later rows have.
        if not isinstance(table, JsonLines) or not any(column in row for row in MarkedRows(table, dict)):
            require_columns(table, {key: column}, label)


# -- Tasks of NeMo Gym.


def gym_row(row: Row) -> Row:
    """{"messages", "gym": the row as NeMo Gym has it}."""
    params = row.get("responses_create_params")
    asked = params.get("input") if isinstance(params, dict) else None
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise ValueError("has no responses_create_params.input, a text or a list of items")
    messages = [{"role": item["role"], "content": item.get("content", "")} for item in items if "role" in item]
    return {"messages": messages, "gym": row}


def load_gym_tasks(cfg: TableConfig) -> Rows:
    """The tasks of `data_path`, a JSONL file, for `nemo_rl.environments.agents.nemo_gym:play`."""
    return MappedRows(load_as_written(cfg), gym_row, dataset_label(cfg))

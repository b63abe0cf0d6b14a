"""Tables from a local JSONL, JSON, CSV or Parquet file, a folder of such files, or a Hugging Face path.

Rows are read and converted one by one, when they are indexed, so that millions of rows cost nothing before that.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import DatasetConfig, ExampleTableConfig, TableConfig, dataset_label
from nemo_rl.data.interfaces import BAD_ROW, LazyRows, Row, Rows, StreamedTable
from nemo_rl.utils.tables import lines, load_table, require_content, require_short, require_whole_file
from nemo_rl.utils.task_formats import one_text

NUM_ROWS_FOR_COLUMNS = 32

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
        require_content(path)
        self.path = path
        bounds = list(lines(path))
        if not bounds:
            raise ValueError(f"dataset file {path!r} is empty")
        self._bounds = np.array(bounds, dtype=np.int64)  # [rows, 2]: where each line begins and ends

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: Any) -> Any:
        begin, end = map(int, self._bounds[index])
        where = f"dataset file {self.path!r}: row {index} (from 0)"
        require_short(end - begin, where)
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
        require_whole_file(path, cfg.subset, cfg.split)
        return JsonLines(path)
    return load_data_path(cfg)


# -- Prompts: a problem and its answer from two columns.


def problem_row(row: Row, *, input_key: str, output_key: str, extract: Callable[[str], str] | None = None) -> Row:
    """The row with `problem` and `expected_answer` from two of its columns, the latter through `extract`.

    A conversation of the row (`messages`) is left out: it may end with another question.
    """
    answer = extract(column_text(row, output_key)) if extract else text_or_value(row, output_key)
    others = {key: value for key, value in row.items() if key != "messages"}
    return {**others, "problem": text_or_value(row, input_key), "expected_answer": answer}


def column_text(row: Row, column: str) -> str:
    """The text of a column. ValueError for a value that is neither text nor number."""
    return one_text(row[column], f"in column {column!r}")


def text_or_value(row: Row, column: str) -> Any:
    """The text of a column; a list or an object as it is, for processors that take one. ValueError for nothing."""
    return row[column] if isinstance(row[column], list | dict) else column_text(row, column)


def load_response_rows(cfg: TableConfig) -> Rows:
    """Rows of `data_path` with `input_key` as problem and `output_key` as answer; conversations stay unchanged.

    Raises:
        ValueError: for a missing `data_path`, column or split, for an empty table, or if `input_key` does not say
            which of two columns is the prompt. FileNotFoundError: for a missing file.
    """
    assert isinstance(cfg, DatasetConfig)
    table, label = load_data_path(cfg), dataset_label(cfg)
    if cfg.input_key is None and {"input", "messages"} <= set(table.column_names):
        raise ValueError(
            f"dataset {label!r} has columns 'input' and 'messages', and each could be the prompt: choose with "
            "input_key: input or input_key: messages"
        )
    if "messages" in table.column_names and cfg.input_key in (None, "messages"):
        return table
    columns = {"input_key": cfg.input_key or "input", "output_key": cfg.output_key}
    require_columns(table, columns, label)
    return MappedRows(table, partial(problem_row, **columns), label)


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

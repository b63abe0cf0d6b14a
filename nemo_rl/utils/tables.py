"""Tables from a local JSONL, JSON, CSV or Parquet file, a folder, or a Hugging Face path.

A folder holds such files, or one `Dataset` or `DatasetDict` as `save_to_disk` of the package datasets writes it.
"""

import copy
import mmap
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl.config.errors import some_of
from nemo_rl.utils.folders import require_hub

MAX_ROW_BYTES = 256 << 20  # of a line of text: a longer one is a file without line breaks
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# Of files in folders, which the package datasets reads; the names are of files that it never takes for rows.
FOLDER_FORMATS = {**FORMATS, ".ndjson": "json", ".tsv": "tsv", ".arrow": "arrow"}
NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
SAVED_TO_DISK = ("dataset_dict.json", "state.json")  # of a `DatasetDict`, of a `Dataset`
# What the readers of Parquet and CSV say.
SAID_OF_EMPTY_FILES = ("BatchSize must be greater than 0", "No columns to parse from file")


def load_table(
    path: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    cache_dir: str | None = None,
    streaming: bool = False,
    builder: str | None = None,
) -> Any:
    """A `datasets.Dataset` from a file, a folder, or a Hugging Face path; streamed an `IterableDataset`.

    `builder`, a value of FORMATS, is the format of a file whose name does not end in it.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: for an unknown file format, subset or split, a subset or split of what has none, a file that is
            damaged or has no rows, or if the hub cannot be reached.
    """
    import datasets

    source: dict[str, Any] = {"path": path, "name": subset}
    if is_file(path):
        require_whole_file(path, subset, split)
        builder = builder or FORMATS.get(Path(path).suffix)
        if builder is None:
            raise ValueError(f"dataset file {path!r}: unknown format; there are {', '.join(FORMATS)}")
        require_content(path)
        if builder == "parquet":
            _require_rows_of_parquet(path)
        if path.endswith(".jsonl") and Path(path).stat().st_size > MAX_ROW_BYTES:
            for row, (begin, end) in enumerate(lines(path)):
                require_short(end - begin, f"dataset file {path!r}: row {row} (from 0)")
        source = {"path": builder, "data_files": path}
    elif Path(path).is_dir():
        _require_readable(Path(path))
    else:
        require_hub(path)
    is_saved = any((Path(path) / name).is_file() for name in SAVED_TO_DISK)
    if is_saved:
        loaded = _saved_to_disk(path, subset, split, streaming=streaming)
    else:
        with _naming_errors(path, builder):
            loaded = datasets.load_dataset(**source, cache_dir=cache_dir, streaming=streaming)
    if Path(path).is_dir() and not is_saved:
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


def _saved_to_disk(path: str, subset: str | None, split: str | None, *, streaming: bool) -> dict[str, Any]:
    """The tables by split of a folder that `save_to_disk` wrote. A single one is `train` unless it says more."""
    import datasets

    if subset is not None:
        raise ValueError(f"dataset {path!r} was written by save_to_disk and has no subset {subset!r}; set subset=null")
    with _naming_errors(path, None):
        saved: Any = datasets.load_from_disk(path)
    tables = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    if split is None and len(tables) == 1:
        tables = {"train": next(iter(tables.values()))}
    return {str(name): table.to_iterable_dataset() if streaming else table for name, table in tables.items()}


@contextmanager
def _naming_errors(path: str, builder: str | None) -> Generator[None]:
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


def require_whole_file(path: str, subset: str | None, split: str | None) -> None:
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


def require_content(path: str) -> None:
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


def lines(path: str) -> Iterator[tuple[int, int]]:
    """The beginning and the end of each line that is not blank. An empty file cannot be mapped."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin)
            end = len(data) if end < 0 else end
            # Only short lines are read: a longer line is taken not to be blank.
            if end - begin > 16 or data[begin:end].strip():
                yield begin, end
            begin = end + 1


def require_short(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_ROW_BYTES:
        size = f"{num_bytes / 2**20:,.0f} MiB, more than {MAX_ROW_BYTES >> 20} MiB"
        raise ValueError(f"{where} has {size}: every row is a line of its own")

"""Datasets by name: from a section of the configuration (`data.train.dataset_name`) to its rows."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.config import TableConfig, dataset_label, is_local
from nemo_rl.data.interfaces import IndexedRows, Rows, StreamedTable
from nemo_rl.utils.registry import import_object

DatasetFactory = Callable[[Any], Rows | StreamedTable]
"""Dataset section (`TableConfig`) -> its rows; a `StreamedTable` if the section `is_streamed`."""

_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # pkg.module.Class

# Loaders are named by import path: a run imports only the module of its dataset.
_PACKAGE = "nemo_rl.data.datasets"
_LOAD_FILE = f"{_PACKAGE}.examples:load_file"
_LOAD_PREFERENCES = f"{_PACKAGE}.examples:load_preferences"
# Their rows repeat a small set of problems, so rows set aside at random would be problems that are trained on.
GENERATED = {
    "arithmetic": f"{_PACKAGE}.arithmetic:load_arithmetic",
    "arithmetic_preference": f"{_PACKAGE}.arithmetic:load_arithmetic_preference",
    "lookup": f"{_PACKAGE}.lookup:load_lookup",
    "code_arithmetic": f"{_PACKAGE}.arithmetic:load_code_arithmetic",
    "reasoning_gym": f"{_PACKAGE}.reasoning_gym:load_reasoning_gym",
    "shapes": f"{_PACKAGE}.shapes:load_shapes",
    "sliding_puzzle": f"{_PACKAGE}.sliding_puzzle:load_sliding_puzzle",
    "tool_arithmetic": f"{_PACKAGE}.arithmetic:load_tool_arithmetic",
}
CHECK_TASKS = f"{_PACKAGE}.reasoning_gym:check_tasks"
"""Of the one generated dataset whose rows another Python makes."""
DATASET_REGISTRY: dict[str, str | DatasetFactory] = {
    **GENERATED,
    "ResponseDataset": _LOAD_FILE,
    "nemo_gym": f"{_PACKAGE}.files:load_gym_tasks",
    "openai_format": f"{_PACKAGE}.examples:load_conversations",
    "arrow_text": f"{_PACKAGE}.examples:load_texts",
    "open_assistant": f"{_PACKAGE}.examples:load_open_assistant",
    "PreferenceDataset": _LOAD_PREFERENCES,
    "BinaryPreferenceDataset": _LOAD_PREFERENCES,
}
"""The datasets that `hub.py` does not hold."""


def known_datasets() -> dict[str, str | DatasetFactory]:
    """All datasets with a name of their own: the registry and the well-known sets of the Hugging Face hub."""
    return DATASET_REGISTRY | import_object(f"{_PACKAGE}.hub:LOADERS", "dataset_name")


def register_dataset(name: str, factory: DatasetFactory) -> None:
    """Make `factory(TableConfig) -> rows` available as `dataset_name: <name>`.

    Raises ValueError if the name is taken.
    """
    if name in known_datasets():
        raise ValueError(f"a dataset named {name!r} is registered already")
    DATASET_REGISTRY[name] = factory


def is_import_path(name: str) -> bool:
    """Whether a name that is not registered names code: `pkg.module:function`, or a class by its dotted path."""
    return ":" in name or (_CLASS.fullmatch(name) is not None and not is_local(name))


def find_factory(cfg: TableConfig) -> DatasetFactory:
    """The function that loads this dataset.

    Raises ValueError for a name that is neither registered, nor an import path, a file or a Hugging Face path; for a
    path beside `data_path`.
    """
    name = cfg.dataset_name
    known = DATASET_REGISTRY if name is None or name in DATASET_REGISTRY else known_datasets()
    factory = _LOAD_FILE if name is None else known.get(name, name)
    if not isinstance(factory, str):
        return factory
    if "://" in factory:
        raise ValueError(
            f"dataset {factory!r} is an address, and addresses are not read; download it, and name the file"
        )
    if ":" in factory:
        return import_object(factory, "dataset_name")
    if is_import_path(factory):
        return partial(_rows_of_class, import_object(factory, "dataset_name"))
    if "/" in factory or is_local(factory):
        if cfg.data_path is not None:
            raise ValueError(
                f"dataset_name={factory!r} is a path itself, and data_path={cfg.data_path!r} is another: set one of "
                "them to null"
            )
        load_file = import_object(_LOAD_FILE, "dataset_name")
        return lambda cfg: load_file(cfg.model_copy(update={"data_path": factory}))
    raise ValueError(
        f"unknown dataset {name!r}; {did_you_mean(factory, known)} A file (.jsonl, .csv, .parquet), a "
        "Hugging Face path (owner/name) and an import path (package.module:function) work too"
    )


def _rows_of_class(made_by: Callable[..., Any], cfg: TableConfig) -> Rows:
    """The rows of a dataset class of NeMo RL: it is called with the keys of its section, and has them as `dataset`.

    It gets the keys that differ from their defaults, and `kwargs` as keywords of their own. Rows are set aside for
    validation here, and the processor is the one of the section.
    """
    given = {**cfg.model_dump(exclude_defaults=True, exclude={"kwargs", "split_validation_size"}), **cfg.kwargs}
    try:
        return made_by(**given).dataset
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"dataset_name {cfg.dataset_name!r} is called with {', '.join(given)}, and what it makes has `dataset`: "
            f"{error}"
        ) from error


def all_rows(cfg: TableConfig) -> Rows:
    """The rows of a dataset that is not streamed.

    Raises ValueError or FileNotFoundError for anything wrong with the dataset; see the factories.
    """
    rows = find_factory(cfg)(cfg)
    if isinstance(rows, StreamedTable):
        raise ValueError(f"dataset {dataset_label(cfg)!r} can only be streamed: set streaming: true")
    if cfg.max_samples is not None and cfg.max_samples < len(rows):
        return IndexedRows(rows, range(cfg.max_samples))
    return rows


def load_rows(cfg: TableConfig) -> tuple[Rows, Rows | None]:
    """(training rows, validation rows that `split_validation_size` sets aside, or None), before `repeat`.

    Raises ValueError or FileNotFoundError for anything wrong with the dataset; see the factories.
    """
    rows, share = all_rows(cfg), cfg.split_validation_size
    label = dataset_label(cfg)
    if cfg.dataset_name in GENERATED and share > 0:
        if cfg.split not in (None, "train"):
            raise ValueError(
                f"dataset {label!r}: split_validation_size sets its split validation aside, which split={cfg.split} "
                "trains on; set split=train, or name the rows to validate on in data.validation"
            )
        # Not a share of the rows but the validation split, each problem once; of a number, at most so many.
        kwargs = {key: value for key, value in cfg.kwargs.items() if key != "num_samples"}
        held_out = {"split": "validation", "kwargs": kwargs, "max_samples": int(share) or None}
        return rows, all_rows(cfg.model_copy(update=held_out))
    if len(rows) == 0:
        raise ValueError(f"dataset {label!r} is empty: it has no row to train on")
    if share == 0:
        return rows, None
    num_validation = round(len(rows) * share) if share < 1 else int(share)
    if not 0 < num_validation < len(rows):
        raise ValueError(
            f"dataset {label!r}: split_validation_size {share:g} of {len(rows)} rows leaves "
            f"{num_validation} for validation and {len(rows) - num_validation} for training; both need at least one"
        )
    order = np.random.default_rng(cfg.seed).permutation(len(rows))
    train, validation = order[num_validation:], order[:num_validation]
    return IndexedRows(rows, np.sort(train).tolist()), IndexedRows(rows, np.sort(validation).tolist())


def load_stream(cfg: TableConfig) -> StreamedTable:
    """A dataset with `streaming: true`.

    Raises ValueError if the dataset cannot be streamed; otherwise as `load_rows`.
    """
    table = find_factory(cfg)(cfg)
    if not isinstance(table, StreamedTable):
        raise ValueError(
            f"dataset {dataset_label(cfg)!r} cannot be streamed: it is generated, or its factory does not return a "
            "StreamedTable; set streaming: false"
        )
    return table

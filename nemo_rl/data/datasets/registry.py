"""Datasets by name: from a section of the configuration (`data.train.dataset_name`) to its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig, dataset_label, is_local
from nemo_rl.data.datasets import arithmetic, examples
from nemo_rl.data.datasets.files import IndexedRows, load_response_rows
from nemo_rl.data.datasets.hub import EVAL_DATASETS, HUB_SETS
from nemo_rl.data.datasets.lookup import load_lookup
from nemo_rl.data.datasets.sliding_puzzle import load_sliding_puzzle
from nemo_rl.data.interfaces import Rows, StreamedTable
from nemo_rl.utils.registry import import_object

DatasetFactory = Callable[[Any], Rows | StreamedTable]
"""Dataset section (`TableConfig`) -> its rows; a `StreamedTable` if the section `is_streamed`."""


def load_file(cfg: TableConfig) -> Rows | StreamedTable:
    """The rows of a file or a Hugging Face path, in the form that their section needs."""
    if isinstance(cfg, PreferenceDatasetConfig):
        return examples.load_preferences(cfg)
    return examples.load_conversations(cfg) if isinstance(cfg, ExampleDatasetConfig) else load_response_rows(cfg)


# Their rows repeat a small set of problems, so rows set aside at random would be problems that are trained on.
GENERATED: dict[str, DatasetFactory] = {
    "arithmetic": arithmetic.load_arithmetic,
    "arithmetic_preference": arithmetic.load_arithmetic_preference,
    "lookup": load_lookup,
    "code_arithmetic": arithmetic.load_code_arithmetic,
    "sliding_puzzle": load_sliding_puzzle,
    "tool_arithmetic": arithmetic.load_tool_arithmetic,
}
DATASET_REGISTRY: dict[str, DatasetFactory] = {
    **GENERATED,
    "ResponseDataset": load_file,
    "openai_format": examples.load_openai_format,
    "open_assistant": examples.load_open_assistant,
    "PreferenceDataset": examples.load_preferences,
    "BinaryPreferenceDataset": examples.load_preferences,
    **{name: dataset.load for name, dataset in EVAL_DATASETS.items()},
    **{name: dataset.load for name, dataset in HUB_SETS.items()},
}
"""`gsm8k` is the training split here."""


def register_dataset(name: str, factory: DatasetFactory) -> None:
    """Make `factory(TableConfig) -> rows` available as `dataset_name: <name>`.

    Raises:
        ValueError: if the name is taken.
    """
    if name in DATASET_REGISTRY:
        raise ValueError(f"a dataset named {name!r} is registered already")
    DATASET_REGISTRY[name] = factory


def find_factory(cfg: TableConfig) -> DatasetFactory:
    """The function that loads this dataset.

    Raises:
        ValueError: for a name that is neither registered, nor an import path, a file or a Hugging Face path.
    """
    name = cfg.dataset_name
    if name is None:
        return load_file
    if name in DATASET_REGISTRY:
        return DATASET_REGISTRY[name]
    if ":" in name:
        return import_object(name, "dataset_name")
    if "/" in name or is_local(name):
        return lambda cfg: load_file(cfg.model_copy(update={"data_path": name}))
    raise ValueError(
        f"unknown dataset {name!r}; {did_you_mean(name, DATASET_REGISTRY)} A file (.jsonl, .csv, .parquet), a "
        "Hugging Face path (owner/name) and an import path (package.module:function) work too"
    )


def all_rows(cfg: TableConfig) -> Rows:
    """The rows of a dataset that is not streamed.

    Raises:
        ValueError, FileNotFoundError: for anything wrong with the dataset; see the factories.
    """
    rows = find_factory(cfg)(cfg)
    if isinstance(rows, StreamedTable):
        raise ValueError(f"dataset {dataset_label(cfg)!r} can only be streamed: set streaming: true")
    return rows


def load_rows(cfg: TableConfig) -> tuple[Rows, Rows | None]:
    """(training rows, validation rows that `split_validation_size` sets aside, or None), before `repeat`.

    Raises:
        ValueError, FileNotFoundError: for anything wrong with the dataset; see the factories.
    """
    rows = all_rows(cfg)
    if cfg.dataset_name in GENERATED and cfg.split_validation_size > 0:
        # Not a share of the rows but the validation split, each problem once.
        kwargs = {key: value for key, value in cfg.kwargs.items() if key != "num_samples"}
        return rows, all_rows(cfg.model_copy(update={"split": "validation", "kwargs": kwargs}))
    label = dataset_label(cfg)
    if len(rows) == 0:
        raise ValueError(f"dataset {label!r} is empty: it has no row to train on")
    if cfg.split_validation_size == 0:
        return rows, None
    num_validation = round(len(rows) * cfg.split_validation_size)
    if not 0 < num_validation < len(rows):
        raise ValueError(
            f"dataset {label!r}: split_validation_size {cfg.split_validation_size} of {len(rows)} rows leaves "
            f"{num_validation} for validation and {len(rows) - num_validation} for training; both need at least one"
        )
    order = np.random.default_rng(cfg.seed).permutation(len(rows))
    train, validation = order[num_validation:], order[:num_validation]
    return IndexedRows(rows, np.sort(train).tolist()), IndexedRows(rows, np.sort(validation).tolist())


def load_stream(cfg: TableConfig) -> StreamedTable:
    """A dataset with `streaming: true`.

    Raises:
        ValueError: if the dataset cannot be streamed; otherwise as `load_rows`.
    """
    table = find_factory(cfg)(cfg)
    if not isinstance(table, StreamedTable):
        raise ValueError(
            f"dataset {dataset_label(cfg)!r} cannot be streamed: it is generated, or its factory does not return a "
            "StreamedTable; set streaming: false"
        )
    return table

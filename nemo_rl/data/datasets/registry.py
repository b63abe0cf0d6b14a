"""Datasets by name: `data.train.dataset_name` -> rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig, dataset_label, is_local
from nemo_rl.data.datasets import (
    arithmetic,
    code_arithmetic,
    conversations,
    evaluation,
    hub,
    lookup,
    preferences,
    sliding_puzzle,
    tool_arithmetic,
)
from nemo_rl.data.datasets.files import load_response_rows
from nemo_rl.data.interfaces import IndexedRows, Rows, StreamedTable
from nemo_rl.utils.registry import import_object

DatasetFactory = Callable[[Any], Rows | StreamedTable]
"""Of the dataset's section of the configuration, a `TableConfig`; it streams when that `is_streamed`."""


def load_file(cfg: TableConfig) -> Rows | StreamedTable:
    """The rows of a file or a Hugging Face path, in the form that the section they stand in needs."""
    if isinstance(cfg, PreferenceDatasetConfig):
        return preferences.load_preferences(cfg)
    return conversations.load_conversations(cfg) if isinstance(cfg, ExampleDatasetConfig) else load_response_rows(cfg)


DATASET_REGISTRY: dict[str, DatasetFactory] = {
    "arithmetic": arithmetic.load_arithmetic,
    "arithmetic_preference": preferences.load_arithmetic_preference,
    "lookup": lookup.load_lookup,
    "code_arithmetic": code_arithmetic.load_code_arithmetic,
    "sliding_puzzle": sliding_puzzle.load_sliding_puzzle,
    "tool_arithmetic": tool_arithmetic.load_tool_arithmetic,
    "ResponseDataset": load_file,
    "openai_format": conversations.load_openai_format,
    "open_assistant": conversations.load_open_assistant,
    "PreferenceDataset": preferences.load_preferences,
    "BinaryPreferenceDataset": preferences.load_preferences,
    **evaluation.EVAL_DATASETS,
    **hub.FACTORIES,
    **hub.CONVERSATIONS,
    **hub.PREFERENCES,
}
# Generated rows repeat a small set of problems: rows set aside at random would be problems trained on.
HELD_OUT: dict[str, Callable[[TableConfig], Rows]] = {
    "arithmetic": arithmetic.load_held_out,
    "arithmetic_preference": preferences.load_held_out,
    "lookup": lookup.load_held_out,
    "code_arithmetic": code_arithmetic.load_held_out,
    "sliding_puzzle": sliding_puzzle.load_held_out,
    "tool_arithmetic": tool_arithmetic.load_held_out,
}


def register_dataset(name: str, factory: DatasetFactory) -> None:
    """Make `factory(TableConfig) -> rows` available as `dataset_name: <name>`.

    Raises:
        ValueError: when the name is taken.
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
        if cfg.kwargs and isinstance(DATASET_REGISTRY[name], hub.HubDataset | hub.HubTable | evaluation.EvalDataset):
            raise ValueError(f"dataset {name!r} takes no kwargs, got {', '.join(cfg.kwargs)}")
        return DATASET_REGISTRY[name]
    if ":" in name:
        return import_object(name, "dataset_name")
    if "/" in name or is_local(name):
        return lambda cfg: load_file(cfg.model_copy(update={"data_path": name}))
    raise ValueError(
        f"unknown dataset {name!r}; {did_you_mean(name, DATASET_REGISTRY)} A file (.jsonl, .csv, .parquet), a Hugging "
        "Face path (owner/name) and an import path (package.module:function) work too"
    )


def all_rows(cfg: TableConfig) -> Rows:
    """The rows of a dataset that is not streamed.

    Raises:
        ValueError, FileNotFoundError: for whatever is wrong with the dataset; see the factories.
    """
    rows = find_factory(cfg)(cfg)
    if isinstance(rows, StreamedTable):
        raise ValueError(f"dataset {dataset_label(cfg)!r} can only be streamed: set streaming: true")
    return rows


def load_rows(cfg: TableConfig) -> tuple[Rows, Rows | None]:
    """(training rows, validation rows set aside by `split_validation_size` or None), before `repeat`.

    Raises:
        ValueError, FileNotFoundError: for whatever is wrong with the dataset; see the factories.
    """
    rows = all_rows(cfg)
    if cfg.dataset_name in HELD_OUT and cfg.split_validation_size > 0:
        return rows, HELD_OUT[cfg.dataset_name](cfg)
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
    return (
        IndexedRows(rows, np.sort(order[num_validation:]).tolist()),
        IndexedRows(rows, np.sort(order[:num_validation]).tolist()),
    )


def load_stream(cfg: TableConfig) -> StreamedTable:
    """A dataset with `streaming: true`.

    Raises:
        ValueError: when the dataset cannot be streamed; otherwise as `load_rows`.
    """
    table = find_factory(cfg)(cfg)
    if not isinstance(table, StreamedTable):
        raise ValueError(
            f"dataset {dataset_label(cfg)!r} cannot be streamed: it is generated, or its factory does not return a "
            "StreamedTable; set streaming: false"
        )
    return table

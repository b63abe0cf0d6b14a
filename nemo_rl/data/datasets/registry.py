"""Datasets by name: `data.train.dataset_name` -> rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets import arithmetic, evaluation, hub
from nemo_rl.data.datasets.files import load_response_rows
from nemo_rl.data.interfaces import IndexedRows, Rows

DatasetFactory = Callable[[DatasetConfig], Rows]

DATASET_REGISTRY: dict[str, DatasetFactory] = {
    "arithmetic": arithmetic.load_arithmetic,
    "ResponseDataset": load_response_rows,
    **evaluation.EVAL_DATASETS,
    **hub.FACTORIES,
}


def register_dataset(name: str, factory: DatasetFactory) -> None:
    """Make `factory(DatasetConfig) -> rows` available as `dataset_name: <name>`.

    Raises:
        ValueError: when the name is taken.
    """
    if name in DATASET_REGISTRY:
        raise ValueError(f"a dataset named {name!r} is registered already")
    DATASET_REGISTRY[name] = factory


def import_object(path: str, what: str) -> Any:
    """The object behind `package.module:name`.

    Raises:
        ValueError: when the module or the name in it does not exist.
    """
    module_name, _, name = path.partition(":")
    try:
        return vars(importlib.import_module(module_name))[name]
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} {path!r}: no module {error.name!r} can be imported from here") from error
    except KeyError as error:
        raise ValueError(f"{what} {path!r}: module {module_name!r} has no {name!r}") from error


def dataset_label(cfg: DatasetConfig) -> str:
    """What a dataset is called in prompt ids, task names and messages."""
    name = cfg.dataset_name or cfg.data_path
    if name == "ResponseDataset":
        name = cfg.data_path
    return Path(name).stem if name and _is_local(name) else str(name)


def _is_local(name: str) -> bool:
    return Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet") or Path(name).exists()


def find_factory(cfg: DatasetConfig) -> DatasetFactory:
    """The function that loads this dataset.

    Raises:
        ValueError: for a name that is neither registered, nor an import path, a file or a Hugging Face path.
    """
    name = cfg.dataset_name
    if name is None:
        return load_response_rows
    if name in DATASET_REGISTRY:
        if cfg.kwargs and isinstance(DATASET_REGISTRY[name], hub.HubDataset | evaluation.EvalDataset):
            raise ValueError(f"dataset {name!r} takes no kwargs, got {', '.join(cfg.kwargs)}")
        return DATASET_REGISTRY[name]
    if ":" in name:
        return import_object(name, "dataset_name")
    if "/" in name or _is_local(name):
        return lambda cfg: load_response_rows(cfg.model_copy(update={"data_path": name}))
    lowered = {known.lower(): known for known in DATASET_REGISTRY}
    near = [lowered[match] for match in get_close_matches(name.lower(), lowered, n=3, cutoff=0.4)]
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(DATASET_REGISTRY)}."
    raise ValueError(
        f"unknown dataset {name!r}. {hint} A file (.jsonl, .csv, .parquet), a Hugging Face path (owner/name) and an "
        "import path (package.module:function) work too"
    )


def load_rows(cfg: DatasetConfig) -> tuple[Rows, Rows | None]:
    """(training rows, validation rows set aside by `split_validation_size` or None), before `repeat`.

    Raises:
        ValueError, FileNotFoundError: for whatever is wrong with the dataset; see the factories.
    """
    if cfg.dataset_name == "arithmetic" and cfg.split_validation_size > 0:
        # Its rows repeat a small set of problems, so rows set aside at random would be problems trained on.
        return arithmetic.load_arithmetic(cfg), arithmetic.load_held_out(cfg)
    rows = find_factory(cfg)(cfg)
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

"""What datasets and tasks are called: known from the configuration, before a row is read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path

from nemo_rl.data.config import DataConfig, DatasetConfig, TableConfig

# Datasets that say what `data_path` is.
OF_FILES = ("ResponseDataset", "openai_format", "PreferenceDataset", "BinaryPreferenceDataset")
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def dataset_label(cfg: TableConfig) -> str:
    """What a dataset is called in prompt ids, task names and messages."""
    name = cfg.dataset_name or cfg.data_path
    if name in OF_FILES and cfg.data_path is not None:
        name = cfg.data_path
    return Path(name).stem if name and is_local(name) else str(name)


def is_local(name: str) -> bool:
    """Whether a name is that of a file or folder."""
    return Path(name).suffix in FILE_SUFFIXES or Path(name).exists()


def first_free(name: str, taken: Iterable[str]) -> str:
    """The name, with the lowest number from 2 that makes it new."""
    taken = set(taken)
    number, candidate = 2, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}#{number}"
    return candidate


class TaskNames:
    """Names of tasks: the dataset's own, with a number where the same dataset has other settings."""

    def __init__(self) -> None:
        self._settings: dict[str, Hashable] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._settings

    def name(self, label: str, settings: Hashable) -> str:
        """The name for these settings of a dataset: a new one, where they are."""
        for name, known in self._settings.items():
            if known == settings and (name == label or name.startswith(label + "#")):
                return name
        name = first_free(label, self._settings)
        self._settings[name] = settings
        return name


def prompt_settings(cfg: DatasetConfig) -> Hashable:
    """What two datasets of prompts must share to be of one task, beside their name."""
    return (cfg.prompt_file, cfg.system_prompt_file, cfg.tools_file, cfg.processor, cfg.env_name)


def prompt_tasks(data: DataConfig) -> tuple[list[str], list[str]]:
    """(tasks of training, tasks of validation) of a run, each once, in their order."""
    names = TaskNames()

    def of(dataset: DatasetConfig) -> str:
        return names.name(dataset_label(dataset), prompt_settings(dataset))

    train = [of(dataset) for dataset in data.train]
    held_out = [name for name, cfg in zip(train, data.train, strict=True) if cfg.split_validation_size > 0]
    validation = [of(dataset) for dataset in data.validation or []]
    return list(dict.fromkeys(train)), list(dict.fromkeys([*held_out, *validation]))

"""From the section `data` to the datasets and tasks of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.config import DataConfig, DatasetConfig
from nemo_rl.data.dataloader import NamedRows, PromptDataset
from nemo_rl.data.datasets.registry import dataset_label, load_rows
from nemo_rl.data.interfaces import Rows, TaskDataSpec
from nemo_rl.data.processing import Task
from nemo_rl.data.processors import find_processor


@dataclass(frozen=True, kw_only=True)
class DataSetup:
    """What `setup_data` returns."""

    train: PromptDataset
    validation: PromptDataset | None
    tasks: dict[str, Task]

    @property
    def task_to_env(self) -> dict[str, str]:
        """Task name -> section of `env`."""
        return {name: task.env_name for name, task in self.tasks.items()}


def setup_data(cfg: DataConfig, env_config: Mapping[str, Any]) -> DataSetup:
    """Load all datasets and find their processors, prompt files and environments.

    Raises:
        ValueError, FileNotFoundError: for an unknown dataset, processor or environment, a missing file or column, an
            empty dataset, a missing prompt file; the message says what there is.
    """
    tasks = _Tasks(env_config)
    train: list[NamedRows] = []
    validation: list[NamedRows] = []
    for dataset in cfg.train:
        rows, held_out = load_rows(dataset)
        train.append(tasks.named(dataset, rows, "train"))
        if held_out is not None:
            validation.append(tasks.named(dataset, held_out, "validation"))
    for dataset in cfg.validation or []:
        validation.append(tasks.named(dataset, load_rows(dataset)[0], "validation"))
    return DataSetup(
        train=PromptDataset(train),
        validation=PromptDataset(validation) if validation else None,
        tasks=tasks.tasks,
    )


class _Tasks:
    """Names tasks and datasets: the dataset's own name, with a number where the same name means something else."""

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        self.env_config = env_config
        self.tasks: dict[str, Task] = {}
        self._settings: dict[str, tuple[Any, ...]] = {}
        self._names: set[str] = set()

    def named(self, cfg: DatasetConfig, rows: Rows, role: str) -> NamedRows:
        label = dataset_label(cfg)
        name = _first_free(label if role == "train" else f"{label}/{role}", self._names)
        self._names.add(name)
        return NamedRows(
            name=name, task_name=self._task(label, cfg), rows=rows, repeat=cfg.repeat if role == "train" else 1
        )

    def _task(self, label: str, cfg: DatasetConfig) -> str:
        settings = (cfg.prompt_file, cfg.system_prompt_file, cfg.processor, cfg.env_name)
        for name, known in self._settings.items():
            if known == settings and (name == label or name.startswith(label + "#")):
                return name
        if cfg.env_name not in self.env_config:
            raise ValueError(
                f"dataset {label!r}: env_name {cfg.env_name!r} is no section of env; there are: "
                f"{', '.join(self.env_config) or 'none'}"
            )
        name = _first_free(label, self._settings)
        spec = TaskDataSpec(name, cfg.prompt_file, cfg.system_prompt_file)
        self.tasks[name] = Task(spec=spec, processor=find_processor(cfg.processor), env_name=cfg.env_name)
        self._settings[name] = settings
        return name


def _first_free(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    number, candidate = 2, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}#{number}"
    return candidate

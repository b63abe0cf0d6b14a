"""From the section `data` to the datasets and tasks of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.config import (
    DataConfig,
    DatasetConfig,
    TableConfig,
    TaskNames,
    dataset_label,
    first_free,
    prompt_settings,
)
from nemo_rl.data.datasets.registry import load_rows
from nemo_rl.data.interfaces import Rows, TaskDataSpec
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.data.rows.processors import answer_text, find_processor, problem_text
from nemo_rl.types import DatumSpec, ProcessorFn, Prompt

# -- From a prompt as the controller knows it (text) to what an episode needs (tokens, metadata).


@dataclass(frozen=True, kw_only=True)
class Task:
    """How the prompts of one task are made and who answers them."""

    spec: TaskDataSpec
    processor: ProcessorFn
    env_name: str


@dataclass(frozen=True)
class PromptProcessor:
    """Picklable. Called with a `Prompt`, returns its `DatumSpec`."""

    tasks: Mapping[str, Task]
    tokenizer: PreTrainedTokenizerBase
    max_input_seq_length: int

    def __call__(self, prompt: Prompt) -> DatumSpec:
        """Tokenise. A prompt longer than `max_input_seq_length` tokens comes back as a stub with loss_multiplier 0.

        Raises:
            ValueError: when the row lacks what the processor needs.
        """
        task = self.tasks[prompt.task_name]
        try:
            datum = task.processor(
                both_forms(prompt.row), task.spec, self.tokenizer, self.max_input_seq_length, prompt.idx
            )
        except KeyError as error:
            raise ValueError(
                f"row {prompt.prompt_id} has no {error.args[0]!r}, which the processor of task {prompt.task_name!r} "
                f"needs; it has: {', '.join(prompt.row)}"
            ) from error
        return DatumSpec(**{**datum, "task_name": prompt.task_name})


def both_forms(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `messages` as well as `problem` and `expected_answer`, whichever it came with."""
    if "messages" in row:
        roles = {message["role"] for message in row["messages"]}
        texts = {"problem": problem_text(row)} if "user" in roles else {}
        return {**texts, **({"expected_answer": answer_text(row)} if "assistant" in roles else {}), **row}
    if "problem" in row and "expected_answer" in row:
        messages = [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": row["expected_answer"]},
        ]
        return {"messages": messages, **row}
    return dict(row)


C = TypeVar("C", bound=TableConfig)
T = TypeVar("T")


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

    def make_task(name: str, dataset: DatasetConfig) -> Task:
        if dataset.env_name not in env_config:
            raise ValueError(
                f"dataset {dataset_label(dataset)!r}: env_name {dataset.env_name!r} is no section of env; there are: "
                f"{', '.join(env_config) or 'none'}"
            )
        spec = TaskDataSpec(name, dataset.prompt_file, dataset.system_prompt_file, dataset.tools_file)
        return Task(spec=spec, processor=find_processor(dataset.processor), env_name=dataset.env_name)

    tasks: TaskBook[DatasetConfig, Task] = TaskBook(make_task, prompt_settings)
    train: list[NamedRows] = []
    validation: list[NamedRows] = []
    for dataset in cfg.train:
        rows, held_out = load_rows(dataset)
        train.append(replace(tasks.named(dataset, rows, "train"), weight=dataset.weight))
        if held_out is not None:
            validation.append(tasks.named(dataset, held_out, "validation"))
    for dataset in cfg.validation or []:
        validation.append(tasks.named(dataset, load_rows(dataset)[0], "validation"))
    return DataSetup(
        train=PromptDataset(train),
        validation=PromptDataset(validation) if validation else None,
        tasks=tasks.tasks,
    )


class TaskBook(Generic[C, T]):
    """Names tasks and datasets: the dataset's own name, with a number where the same name means something else.

    `make(name, config)` makes a task, and `settings(config)` says what it depends on.
    """

    def __init__(self, make: Callable[[str, C], T], settings: Callable[[C], Hashable]) -> None:
        self.tasks: dict[str, T] = {}
        self._make = make
        self._settings_of = settings
        self._task_names = TaskNames()
        self._names: set[str] = set()

    def named(self, cfg: C, rows: Rows, role: str) -> NamedRows:
        """The rows of a dataset for `role`, "train" or "validation"."""
        repeat = cfg.repeat if role == "train" else 1
        return NamedRows(name=self.name(cfg, role), task_name=self.task(cfg), rows=rows, repeat=repeat)

    def name(self, cfg: C, role: str) -> str:
        """A name for rows that no other rows have."""
        label = dataset_label(cfg)
        name = first_free(label if role == "train" else f"{label}/{role}", self._names)
        self._names.add(name)
        return name

    def task(self, cfg: C) -> str:
        """The name of the task of a dataset, made now if it is new."""
        name = self._task_names.name(dataset_label(cfg), self._settings_of(cfg))
        if name not in self.tasks:
            self.tasks[name] = self._make(name, cfg)
        return name

"""From the section `data` to prompts whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_rl.data.config import DatasetConfig, dataset_label
from nemo_rl.data.datasets.files import is_file
from nemo_rl.data.datasets.hub import load_evaluation_set, load_problem_table
from nemo_rl.data.datasets.registry import DATASET_REGISTRY, EVALUATION_SETS, all_rows
from nemo_rl.data.interfaces import Rows, TaskDataSpec
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.rows.setup import Task
from nemo_rl.environments.registry import find_env_class
from nemo_rl.evals.config import EvalDatasetConfig, EvalMasterConfig


@dataclass(frozen=True, kw_only=True)
class EvalData:
    """Prompts in the order of the datasets, and their tasks, one by dataset and named like it."""

    prompts: PromptDataset
    tasks: dict[str, Task]

    @property
    def environments(self) -> list[str]:
        """The sections of `env` that are used."""
        return sorted({task.env_name for task in self.tasks.values()})

    def identity(self, config: EvalMasterConfig) -> dict[str, Any]:
        """What decides what is asked and how answers are judged."""
        chosen = zip(self.tasks.values(), config.data.chosen, strict=True)
        texts = {
            str(task.spec.task_name): {
                "prompt": task.spec.prompt,
                "system_prompt": task.spec.system_prompt,
                "processor": config.processor_of(dataset),
                "env_name": task.env_name,
            }
            for task, dataset in chosen
        }
        judges = {name: config.env[name].model_dump() for name in self.environments}
        for judge in judges.values():
            judge.pop("num_workers", None)  # how many judge at a time changes no verdict
        return {
            "data": self.prompts.fingerprint(),
            "data.prompts": texts,
            "data.max_input_seq_length": config.data.max_input_seq_length,
            "env": judges,
        }


def load_eval_data(config: EvalMasterConfig) -> EvalData:
    """Load all datasets, and read every row once.

    Raises:
        ValueError, FileNotFoundError: for an unknown dataset or processor, an environment that cannot be imported, a
            missing file or column, an empty dataset, and a row without an answer; the message says what to change.
    """
    parts: list[NamedRows] = []
    tasks: dict[str, Task] = {}
    for dataset in config.data.chosen:
        label = dataset_label(DatasetConfig(dataset_name=dataset.dataset_name, processor="", env_name=""))
        number, name = 1, label
        while name in tasks:
            number, name = number + 1, f"{label}#{number + 1}"
        rows = load_eval_rows(dataset)
        _check_answers(rows, label)
        env_name = config.environment_of(dataset)
        assert env_name is not None, "the configuration was checked"
        find_env_class(config.env[env_name].type)
        tasks[name] = Task(
            spec=TaskDataSpec(name, dataset.prompt_file, dataset.system_prompt_file),
            processor=find_processor(config.processor_of(dataset)),
            env_name=env_name,
        )
        parts.append(NamedRows(name=name, task_name=name, rows=rows))
    return EvalData(prompts=PromptDataset(parts), tasks=tasks)


def load_eval_rows(dataset: EvalDatasetConfig) -> Rows:
    """The rows of one dataset; see `load_eval_data` for what it raises."""
    name = dataset.dataset_name
    assert name is not None, "the configuration was checked"
    cfg = DatasetConfig(
        dataset_name=name,
        data_path=dataset.data_path,
        input_key=dataset.problem_key or "input",
        output_key=dataset.solution_key or "output",
        subset=dataset.subset,
        split=dataset.split,
        seed=dataset.seed,
        download_dir=dataset.download_dir,
        kwargs=dataset.kwargs,
        processor="",
        env_name="",
    )
    if name in EVALUATION_SETS:
        return load_evaluation_set(cfg)
    is_path = dataset.file_format is not None or is_file(name) or "/" in name
    if name in DATASET_REGISTRY or ":" in name or not is_path:
        return all_rows(cfg)
    return load_problem_table(
        name,
        problem_key=dataset.problem_key or "problem",
        solution_key=dataset.solution_key or "answer",
        file_format=dataset.file_format,
        subset=dataset.subset,
        split=dataset.split,
        cache_dir=dataset.download_dir,
    )


def _check_answers(rows: Rows, label: str) -> None:
    """Read every row: most say themselves what is wrong with them."""
    if len(rows) == 0:
        raise ValueError(f"dataset {label!r} is empty: it has no row to ask")
    for index in range(len(rows)):
        row = rows[index]
        if "expected_answer" in row and not str(row["expected_answer"] or "").strip():
            raise ValueError(
                f"dataset {label!r}: row {index} has no answer: column 'expected_answer' is empty; fill it in or "
                "remove the row"
            )

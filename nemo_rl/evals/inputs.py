"""The model, the prompts and the environments of an evaluation, found and checked before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.setup.preflight import tokenizer_identity
from nemo_rl.config.loader import build_config
from nemo_rl.data.config import DatasetConfig, dataset_label
from nemo_rl.data.datasets.files import is_file
from nemo_rl.data.datasets.hub import EVAL_DATASETS, load_problem_table
from nemo_rl.data.datasets.registry import all_rows, known_datasets
from nemo_rl.data.interfaces import Rows, TaskDataSpec
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.rows.setup import Task
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.environments.registry import find_env_class
from nemo_rl.evals.config import EvalDatasetConfig, EvalMasterConfig
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.convert import is_checkpoint, model_of_checkpoint
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.models.policy.weight_loading import weights_identity
from nemo_rl.types import Prompt
from nemo_rl.utils.files import cache_root, digest
from nemo_rl.utils.tokenizer import get_tokenizer


class _EvaluatedModel(RolloutPolicyConfig):
    """The evaluation's model as the section `policy`, for checks that training shares."""

    _path: str = ""

    def key(self, name: str) -> str:
        """The evaluation's own key."""
        own = {
            "model_name": "generation.model_name",
            "max_total_sequence_length": "generation.vllm_cfg.max_model_len",
            "hf_config_overrides": "generation.vllm_kwargs.hf_overrides",
        }
        return own.get(name, name)


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """What the engines are made from, checked."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    name: str  # for people
    identity: dict[str, Any]
    processor_path: str | None = None  # see `ModelInputs`


def prepare_model(config: EvalMasterConfig) -> EvalModel:
    """Find the model, convert a checkpoint that no engine can read, and check that everything fits.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    name = config.generation.model_name
    path, checkpoint = Path(name).expanduser(), None
    if not (path / "config.json").is_file() and is_checkpoint(path):
        dtype = config.generation.vllm_cfg.dtype
        checkpoint = model_of_checkpoint(path, dtype=dtype, cache=cache_root(), resolve_base=resolve_model)
    model_path = str(checkpoint.model) if checkpoint is not None else resolve_model(name)
    tokenizer_path = model_path if config.tokenizer.name == name else resolve_model(config.tokenizer.name)
    policy = _as_policy(config)
    model = read_model_config(policy, model_path)
    tokenizer = get_tokenizer(config.tokenizer.model_copy(update={"name": tokenizer_path}))
    check_fit(policy, model, tokenizer)
    return EvalModel(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        name=name if checkpoint is None else str(checkpoint.step),
        processor_path=tokenizer_path if sees_images(model) else None,
        identity={
            "generation.model_name": {
                "weights": checkpoint.digest if checkpoint is not None else weights_identity(name, model_path, model),
                "config_hash": digest(model.to_json_string()),
            },
            "tokenizer": tokenizer_identity(tokenizer),
        },
    )


def _as_policy(config: EvalMasterConfig) -> RolloutPolicyConfig:
    own = ("model_name", "num_prompts_per_step")
    generation = config.generation.model_dump()
    values: dict[str, Any] = {
        "model_name": config.generation.model_name,
        "precision": config.generation.vllm_cfg.dtype,
        "max_total_sequence_length": config.generation.vllm_cfg.max_model_len,
        "train_global_batch_size": 1,
        "tokenizer": config.tokenizer.model_dump(),
        "generation": {key: value for key, value in generation.items() if key not in own},
    }
    return build_config(_EvaluatedModel, values)


@dataclass(frozen=True, kw_only=True)
class EvalData:
    """Prompts in the order of the datasets, and their tasks, one by dataset and named like it."""

    prompts: PromptDataset
    tasks: dict[str, Task]

    @property
    def environments(self) -> list[str]:
        """The sections of `env` that are used."""
        return sorted({task.env_name for task in self.tasks.values()})

    def all_prompts(self) -> Iterator[Prompt]:
        """The prompts in order."""
        return (self.prompts[index] for index in range(len(self.prompts)))

    def identity(self, config: EvalMasterConfig) -> dict[str, Any]:
        """What decides the prompts and how answers are scored."""
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
            judge.pop("num_workers", None)  # how many processes score changes no score
        return {
            "data": self.prompts.fingerprint(),
            "data.prompts": texts,
            "data.max_input_seq_length": config.data.max_input_seq_length,
            "env": judges,
        }


def load_eval_data(config: EvalMasterConfig) -> EvalData:
    """Load all datasets, and read every row once.

    Raises:
        ValueError, FileNotFoundError: for an unknown dataset or processor, a missing file or column, an empty dataset,
            and a row without an answer; the message says what to change.
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
    same = {"dataset_name", "data_path", "subset", "split", "seed", "download_dir", "kwargs"}
    columns: dict[str, Any] = {
        "input_key": dataset.problem_key or "input",
        "output_key": dataset.solution_key or "output",
    }
    cfg = DatasetConfig(**dataset.model_dump(include=same), **columns, processor="", env_name="")
    if name in EVAL_DATASETS:
        return EVAL_DATASETS[name].load(cfg)
    is_path = dataset.file_format is not None or is_file(name) or "/" in name
    if name in known_datasets() or ":" in name or not is_path:
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
    """Read every row, which raises for most faults; then check that it has an answer."""
    if len(rows) == 0:
        raise ValueError(f"dataset {label!r} is empty: it has no row to ask")
    for index in range(len(rows)):
        row = rows[index]
        if "expected_answer" in row and not str(row["expected_answer"] or "").strip():
            raise ValueError(
                f"dataset {label!r}: row {index} has no answer: column 'expected_answer' is empty; fill it in or "
                "remove the row"
            )

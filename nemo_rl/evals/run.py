"""A whole evaluation: prepare, sample what is missing, write, report."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from nemo_rl.algorithms.interruption import Interruption
from nemo_rl.algorithms.parts.devices import Devices
from nemo_rl.algorithms.parts.environments import Environments
from nemo_rl.algorithms.parts.hardware import slow_precision
from nemo_rl.algorithms.parts.model import image_reader, tokenizer_identity
from nemo_rl.algorithms.parts.prompts import check_prompts
from nemo_rl.algorithms.parts.worker_settings import sampling_params, worker_settings
from nemo_rl.algorithms.run import Command
from nemo_rl.algorithms.trainers.group_sources import TooManyFailures
from nemo_rl.config.loader import build_config, dump_config
from nemo_rl.data.config import DatasetConfig, dataset_label, first_free
from nemo_rl.data.datasets.hub import EVAL_DATASETS, load_problem_table
from nemo_rl.data.datasets.registry import all_rows, known_datasets
from nemo_rl.data.interfaces import Rows, TaskDataSpec
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.rows.setup import PromptProcessor, Task
from nemo_rl.distributed.errors import WorkerError, WorkerHang, first_line
from nemo_rl.distributed.virtual_cluster import init_ray, shutdown_ray
from nemo_rl.environments.config import MathEnvironmentConfig, judges_of, named_sections
from nemo_rl.environments.registry import find_env_class, wait_for_envs
from nemo_rl.environments.rewards import prompt_and_episode, response_text
from nemo_rl.evals.config import EvalDatasetConfig, EvalMasterConfig
from nemo_rl.evals.metrics import SCORED, Outcome, show_results, summarize
from nemo_rl.evals.samples import SampleFolder, SampleRecord, open_folder
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.replicas import engines_of
from nemo_rl.models.policy.attention import can_share_prompts
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.convert import is_checkpoint, model_of_checkpoint
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.models.policy.weight_loading import weights_identity
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle, LLMMessageLogType, Prompt, SampleStatus, SamplingParams
from nemo_rl.utils import files as strict_json
from nemo_rl.utils.console import RunConsole, format_duration
from nemo_rl.utils.files import digest
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.seeds import sample_seed, seed_everything
from nemo_rl.utils.tables import is_file
from nemo_rl.utils.tokenizer import get_tokenizer

COLOCATED_GROUPS = 2  # generation and the rollout worker share each bundle
SAMPLES_IN_FLIGHT = 1024  # of each engine, with num_prompts_per_step=-1: it computes 256 at a time
WRITE_EVERY_S = 2.0
SHOW_EVERY_S = 10.0
SEED_STEP = 0
MAX_REASONS_SHOWN = 5
MAX_LOSSES = 3  # in a row, of groups that ended with their worker
MAX_UNANSWERED = 32  # prompts without an answer, after which an environment seems to return none


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of an evaluation."""

    model: EvalModel
    data: EvalData
    environments: Environments
    process: PromptProcessor
    identity: dict[str, Any]
    folder: Path


def run_eval(config: EvalMasterConfig) -> int:
    """Prepare, sample, score, report. Returns the exit status (see `Command`)."""
    files, again = "the samples so far are", "continues"
    with Command(num_steps=1, files=files, again=again, interruption=Interruption()) as command:
        inputs = prepare(config)
        command.keep_files_in(inputs.folder)
        if (workers := config.workers_line) is not None:
            command.console.info(workers)
        if (slow := slow_precision(config)) is not None:
            command.console.warn(slow)
        num_samples = config.eval.num_tests_per_prompt
        with open_folder(inputs.folder, inputs.identity, dump_config(config), num_samples) as samples:
            _report_start(samples, inputs.data, command.console)
            play(config, inputs, samples, command)
            results = make_results(config, inputs.model, outcomes_by_dataset(inputs.data, samples))
            path = samples.write_results(results)
        show_results(results)
        command.last_words = f"done; the numbers are in {path}, the samples in {samples.path}"
    return command.status


def prepare(config: EvalMasterConfig) -> Inputs:
    """Load and check everything that needs no worker.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    seed_everything(config.eval.seed)
    data = load_eval_data(config)
    environments = Environments.prepare(config.env, data.environments)
    model = prepare_eval_model(config)
    engine_class = engines_of(config.generation.backend)
    engine_class.check(config.generation, model.config, on_gpus=config.cluster.use_gpus)
    images = image_reader(model.processor_path, config.data.max_images)
    process = PromptProcessor(data.tasks, model.tokenizer, config.data.max_input_seq_length, images)
    check_prompts(process, data.prompts, "evaluation", config.generation.key(config.generation.length_path))
    sampling = vars(sampling_params(config.generation, model.tokenizer))
    # The order of the keys is part of the folder's name.
    order = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "stop_strings")
    engine, chat = config.generation.engine, set[str]()
    if any(config.env[name].type == "agent" for name in data.environments):
        chat.add("http_server_serving_chat_kwargs")
    identity = {
        **model.identity,
        **data.identity(config),
        "eval": {key: vars(config.eval)[key] for key in ("seed", "num_tests_per_prompt", "max_rollout_turns")},
        "generation": {
            **{key: sampling[key] for key in order},
            **({"bad_words": sampling["bad_words"]} if sampling["bad_words"] else {}),
            "max_model_len": engine.longest_sequence,
            "precision": engine.wire_dtype,
            engine.kwargs_key: config.generation.arguments,
            # Defaults are not part of the folder's name.
            **engine.of_samples(),
            **engine.model_dump(include=chat, exclude_defaults=True),
        },
    }
    names = [re.sub(r"[^\w.-]+", "-", name).strip("-.") for name in (config.generation.model_name, *data.tasks)]
    folder = Path("results/eval") / "_".join([*names, digest(strict_json.dumps(identity))[:8]])
    if config.eval.save_path is not None:
        folder = Path(config.eval.save_path).expanduser()
    return Inputs(model=model, data=data, environments=environments, process=process, identity=identity, folder=folder)


def outcomes_by_dataset(data: EvalData, samples: SampleFolder) -> dict[str, list[list[Outcome]]]:
    """The samples of each prompt, in the order of the data."""
    found: dict[str, list[list[Outcome]]] = {part.name: [] for part in data.prompts.parts}
    for prompt in data.prompts:
        found[prompt.task_name].append(samples.outcomes[prompt.prompt_id])
    return found


def make_results(
    config: EvalMasterConfig, model: EvalModel, prompts: Mapping[str, list[list[Outcome]]]
) -> dict[str, Any]:
    """The content of results.json. `prompts`: dataset -> samples of each of its prompts."""
    metric, k = config.eval.metric, config.eval.k_value
    return {
        "metric": metric.replace("@k", f"@{k}"),
        "model": model.name,
        # Every prompt counts the same, whichever dataset it is from.
        "overall": summarize([prompt for group in prompts.values() for prompt in group], metric=metric, k=k),
        "datasets": {name: summarize(group, metric=metric, k=k) for name, group in prompts.items()},
        "identity": model.identity,
        "config": config.model_dump(),
    }


def _report_start(samples: SampleFolder, data: EvalData, console: RunConsole) -> None:
    if samples.num_bytes_dropped:
        console.warn(f"{samples.path}: {samples.num_bytes_dropped} bytes of unfinished samples are dropped")
    num, total = len(samples.outcomes), len(data.prompts)
    if num == total:
        console.info(f"this evaluation is finished; its samples are in {samples.path}, and only the numbers are new")
    elif num:
        console.info(f"continuing in {samples.folder}: {num:,} of {total:,} prompts are there already")
    else:
        console.info(f"{total:,} prompts; samples go to {samples.path}")


# -- sampling


def play(config: EvalMasterConfig, inputs: Inputs, samples: SampleFolder, command: Command) -> None:
    """Sample and score every prompt that is not in the folder yet, and write each one when it is finished.

    Raises:
        TooManyFailures: if more samples failed than `eval.max_failed_sample_fraction` allows. Prompts with failed
            samples are then not written, so the same command samples them again.
    """
    left = {prompt.prompt_id: prompt for prompt in inputs.data.prompts if prompt.prompt_id not in samples.outcomes}
    if not left:
        return
    with command.stack:  # the workers end before the results are shown
        init_ray(str(samples.folder), forks_workers=not config.cluster.use_gpus)
        command.stack.callback(shutdown_ray)
        collector, num_engines = _start(config, command, inputs)
        in_flight = config.generation.num_prompts_per_step
        if in_flight == -1:
            in_flight = max(1, SAMPLES_IN_FLIGHT * num_engines // config.eval.num_tests_per_prompt)
        sampling = sampling_params(config.generation, inputs.model.tokenizer)
        _Writer(config, inputs, samples, command.console, collector, left).ask_all(sampling, in_flight)


def _start(config: EvalMasterConfig, command: Command, inputs: Inputs) -> tuple[RolloutCollector, int]:
    """The running collector and the number of engines. Everything ends with `command.stack`."""
    machines = config.cluster
    devices = Devices.start(command, machines, COLOCATED_GROUPS, "eval", take_turns=True)
    cluster, accelerator = devices.cluster, devices.accelerator
    # Created first, so that they start while the model loads.
    environments = inputs.environments.start(command, cluster)
    generation = engines_of(config.generation.backend)(
        cluster,
        EngineSettings(
            model=inputs.model.model_path,
            tokenizer=inputs.model.tokenizer_path,
            cfg=config.generation,
            seed=config.eval.seed,
            load_format="auto",
            can_share_prompts=inputs.model.can_share_prompts,
            max_images=config.data.max_images if inputs.model.processor_path is not None else None,
        ),
        accelerator=accelerator,
        timeout_s=machines.worker_timeout_s,
    )
    command.stack.callback(generation.shutdown)
    wait_for_envs(environments, machines.worker_timeout_s)
    settings = worker_settings(
        inputs.process,
        environments=environments,
        env=config.env,
        limits=EpisodeLimits(
            max_turns=config.eval.max_rollout_turns, max_total_tokens=config.generation.engine.longest_sequence
        ),
        env_step_timeout_s=config.eval.env_step_timeout_s,
        worker_timeout_s=machines.worker_timeout_s,
        seed=config.eval.seed,
        model_name=config.generation.model_name,
        vocab_size=len(inputs.model.tokenizer),
        engine=config.generation.engine,
    )
    collector = RolloutCollector(
        cluster, settings, generation.workers, accelerator, timeout_s=machines.worker_timeout_s
    )
    command.stack.callback(collector.shutdown)
    collector.engines = generation
    return collector, len(generation.workers)


@dataclass(eq=False)
class _Writer:
    """Writes finished groups to disk every few seconds, and counts and reports failures.

    It fetches conversations immediately, because a group is lost if the rollout worker that holds it dies.
    """

    config: EvalMasterConfig
    inputs: Inputs
    samples: SampleFolder
    console: RunConsole
    collector: RolloutCollector
    prompts: dict[str, Prompt]  # that are left, by id
    pending: list[list[SampleRecord]] = field(default_factory=list)
    num_losses: int = 0  # failed fetches in a row
    held_back: list[list[SampleRecord]] = field(default_factory=list)  # with failed samples: at the end, or asked again
    reasons: Counter[str] = field(default_factory=Counter)  # of failures
    num_tokens: int = 0
    num_played: int = 0

    def __post_init__(self) -> None:
        self.started = self.written_at = self.shown_at = time.monotonic()
        found = self.samples.outcomes.items()
        # Datasets with an answer. The id of a prompt begins with the name of its dataset.
        self.answered = {id.rpartition(":")[0] for id, group in found if any(s.answer is not None for s in group)}

    def ask_all(self, sampling: SamplingParams, in_flight: int) -> None:
        """Sample and write every prompt, and repeat the prompts whose groups were lost with the rollout worker."""
        left = list(self.prompts.values())
        while left:
            requests = (
                GroupRequest(
                    group_id=f"eval/{prompt.prompt_id}",
                    prompt=prompt,
                    num_generations=self.config.eval.num_tests_per_prompt,
                    sampling=sampling,
                    seed_step=SEED_STEP,
                )
                for prompt in left
            )
            left = [prompt for handles in self.collector.stream(requests, in_flight) for prompt in self.take(handles)]
        self.finish()

    def take(self, handles: Sequence[GroupHandle]) -> list[Prompt]:
        """Add finished groups; write and report from time to time.

        Returns the prompts to repeat: their groups were lost with the rollout worker before they were fetched. Raises
        WorkerError if that happens too often in a row, or if the worker raised.
        """
        lost: list[Prompt] = []
        try:
            spoken = self.collector.conversations(handles)
        except WorkerError as error:
            if error.exception_type or isinstance(error, WorkerHang) or self.num_losses == MAX_LOSSES:
                raise
            self.num_losses += 1
            lost = [self.prompts[handle.prompt_id] for handle in handles]
            self.console.warn(f"{first_line(error)}; {len(lost)} prompts are asked again")
        else:
            self.num_losses = 0
            self.pending += [
                [self._record(handle, index, messages) for index, messages in enumerate(conversations)]
                for handle, conversations in zip(handles, spoken, strict=True)
            ]
        now = time.monotonic()
        if now - self.written_at >= WRITE_EVERY_S:
            self._write()
            self.written_at = now
        if now - self.shown_at >= SHOW_EVERY_S:
            self._show(now)
            self.shown_at = now
        return lost

    def finish(self) -> None:
        """Write the remaining groups."""
        self._write(is_last=True)
        self.samples.append(self.held_back)
        too_long = [p for p, group in self.samples.outcomes.items() if group[0].status is SampleStatus.PROMPT_TOO_LONG]
        if too_long:
            self.console.warn(
                f"{len(too_long)} prompts are longer than data.max_input_seq_length="
                f"{self.config.data.max_input_seq_length} and were not asked, so they are in no score: "
                f"{', '.join(too_long[:8])}"
            )
        if self.reasons:
            self.console.warn(f"{self.reasons.total()} samples failed and are in no score:\n{self._said()}")

    def _write(self, *, is_last: bool = False) -> None:
        if not self.pending or self._awaits_answers(1 if is_last else MAX_UNANSWERED):
            return
        groups, self.pending = self.pending, []
        self.num_played += len(groups)
        self.num_tokens += sum(record.num_tokens for group in groups for record in group)
        self.held_back += [group for group in groups if any(record.outcome.failed for record in group)]
        self.samples.append([group for group in groups if not any(record.outcome.failed for record in group)])
        self._check_failures(groups)

    def _record(self, handle: GroupHandle, index: int, messages: LLMMessageLogType) -> SampleRecord:
        meta, prompt = handle.samples[index], self.prompts[handle.prompt_id]
        asked, spoken = prompt_and_episode(messages) if messages else ([], [])  # none of a sample that failed
        expected = prompt.row.get("expected_answer")
        is_other = not isinstance(expected, str | None)  # a number, or a list of right answers
        return SampleRecord(
            dataset=handle.task_name,
            prompt_id=handle.prompt_id,
            sample_index=index,
            prompt="\n".join(message["content"] for message in asked),
            response=response_text(spoken) if spoken else "",
            answer=meta.answer,
            expected_answer=json.dumps(expected, default=str) if is_other else expected,
            reward=meta.reward if meta.has_reward else None,
            status=meta.status.value,
            num_prompt_tokens=meta.num_prompt_tokens,
            num_tokens=sum(row.num_generated_tokens for row in meta.rows),
            num_turns=sum(row.num_turns for row in meta.rows),
            seed=sample_seed(self.config.eval.seed, SEED_STEP, handle.prompt_id, index, 0),
            failure=meta.failure,
        )

    def _awaits_answers(self, least: int) -> bool:
        """Whether the pending groups are kept back, because no sample of a dataset has an answer yet and cons@k needs
        them. Samples without an answer must not be in the folder when the environment has been mended.

        Raises ValueError if there are none in the samples of `least` prompts of a dataset.
        """
        if self.config.eval.metric != "cons@k":
            return False
        awaits = False
        for name, task in self.inputs.data.tasks.items():
            if name in self.answered or isinstance(self.config.env[task.env_name], MathEnvironmentConfig):
                continue
            mine = [g for g in self.pending if g[0].dataset == name and any(r.outcome.status in SCORED for r in g)]
            if any(record.answer is not None for group in mine for record in group):
                self.answered.add(name)
            elif len(mine) >= least:
                raise ValueError(
                    f"eval.metric: cons@k takes a vote on answers, and env.{task.env_name} found none in the samples "
                    f"of {len(mine)} prompt(s); return answers from its step, or set eval.metric=pass@k"
                )
            else:
                awaits = awaits or bool(mine)
        return awaits

    def _check_failures(self, groups: Sequence[Sequence[SampleRecord]]) -> None:
        self.reasons.update(str(record.failure) for group in groups for record in group if record.outcome.failed)
        num_failed, fraction = self.reasons.total(), self.config.eval.max_failed_sample_fraction
        total = len(self.prompts) * self.config.eval.num_tests_per_prompt
        if num_failed > fraction * total:
            raise TooManyFailures(
                f"{num_failed} of {total} samples failed already, more than eval.max_failed_sample_fraction="
                f"{fraction}:\n{self._said()}"
            )

    def _said(self) -> str:
        return "\n".join(f"{number}x {reason}" for reason, number in self.reasons.most_common(MAX_REASONS_SHOWN))

    def _show(self, now: float) -> None:
        outcomes = self.samples.outcomes.values()
        rewards = [sample.reward for group in outcomes for sample in group if sample.status in SCORED]
        if not rewards or not self.num_played:
            return
        seconds = now - self.started
        left = (len(self.prompts) - self.num_played) * seconds / self.num_played
        self.console.info(
            f"{len(self.samples.outcomes):,}/{len(self.inputs.data.prompts):,} prompts  mean reward "
            f"{sum(rewards) / len(rewards):.4f}  {self.num_tokens / seconds:,.0f} tok/s  {format_duration(left)} left"
        )


# -- the model, the prompts and the environments, found and checked before Ray starts


class _EvaluatedModel(RolloutPolicyConfig):
    """The evaluation's model as the section `policy`, for checks that training shares."""

    _path: str = ""

    def key(self, name: str) -> str:
        """The evaluation's own key."""
        own = {
            "model_name": "generation.model_name",
            "max_total_sequence_length": f"generation.{self.generation.length_path}",
            "hf_config_overrides": f"generation.{self.generation.engine.kwargs_key}",
        }
        return own.get(name, name)


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """The checked model of the engines."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    name: str  # for people
    identity: dict[str, Any]
    config: PretrainedConfig
    can_share_prompts: bool  # its engines may compute the prompt of several samples once
    processor_path: str | None = None  # see `ModelInputs`


def prepare_eval_model(config: EvalMasterConfig) -> EvalModel:
    """Find the model, convert a checkpoint that no engine can read, and check that everything fits.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    name = config.generation.model_name
    path, checkpoint = Path(name).expanduser(), None
    if not (path / "config.json").is_file() and is_checkpoint(path):
        dtype = config.generation.engine.wire_dtype
        checkpoint = model_of_checkpoint(path, dtype=dtype, cache=cache_root(), resolve_base=resolve_model)
    model_path = str(checkpoint.model) if checkpoint is not None else resolve_model(name)
    tokenizer_path = model_path if config.tokenizer.name == name else resolve_model(config.tokenizer.name)
    values: dict[str, Any] = {
        "model_name": name,
        "precision": config.generation.engine.wire_dtype,
        "max_total_sequence_length": config.generation.engine.longest_sequence,
        "train_global_batch_size": 1,
        "tokenizer": config.tokenizer.model_dump(),
        "generation": config.generation.model_dump(exclude={"model_name", "num_prompts_per_step"}),
    }
    policy = build_config(_EvaluatedModel, values)
    model = read_model_config(policy, model_path)
    tokenizer = get_tokenizer(config.tokenizer.model_copy(update={"name": tokenizer_path}))
    check_fit(policy, model, tokenizer)
    return EvalModel(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        name=name if checkpoint is None else str(checkpoint.step),
        config=model,
        processor_path=tokenizer_path if sees_images(model) else None,
        can_share_prompts=can_share_prompts(model),
        identity={
            "generation.model_name": {
                "weights": checkpoint.digest if checkpoint is not None else weights_identity(name, model_path, model),
                "config_hash": digest(model.to_json_string()),
            },
            "tokenizer": tokenizer_identity(tokenizer),
        },
    )


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
        """The settings that decide the prompts and the scores of answers."""
        texts = {
            name: {
                "prompt": task.spec.prompt,
                "system_prompt": task.spec.system_prompt,
                "processor": task.processor_name,
                "env_name": task.env_name,
            }
            for name, task in self.tasks.items()
        }
        # Composites and agents get rewards from sections that they name.
        used = named_sections(config.env, sorted(judges_of(config.env, self.environments)))
        judges = {name: config.env[name].model_dump() for name in used}
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
        name = first_free(label, tasks)
        rows = load_eval_rows(dataset)
        _check_answers(rows, label)
        env_name = config.environment_of(dataset)
        assert env_name is not None, "the configuration was checked"
        find_env_class(config.env[env_name].type)
        tasks[name] = Task(
            spec=TaskDataSpec(name, dataset.prompt_file, dataset.system_prompt_file),
            processor=find_processor(config.processor_of(dataset)),
            processor_name=config.processor_of(dataset),
            env_name=env_name,
        )
        parts.append(NamedRows(name=name, task_name=name, rows=rows, repeat=dataset.repeat))
    return EvalData(prompts=PromptDataset(parts), tasks=tasks)


def load_eval_rows(dataset: EvalDatasetConfig) -> Rows:
    """The rows of one dataset; see `load_eval_data` for what it raises."""
    name = dataset.dataset_name
    assert name is not None, "the configuration was checked"
    same = {"dataset_name", "data_path", "subset", "split", "seed", "download_dir", "kwargs"}
    columns: dict[str, Any] = {"input_key": dataset.problem_key, "output_key": dataset.solution_key or "output"}
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
    for index, row in enumerate(rows[index] for index in range(len(rows))):
        if "expected_answer" in row and (row["expected_answer"] is None or not str(row["expected_answer"]).strip()):
            raise ValueError(
                f"dataset {label!r}: row {index} has no answer: column 'expected_answer' is empty; fill it in or "
                "remove the row"
            )

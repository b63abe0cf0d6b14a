"""From a configuration to running distillation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.distillation import DistillationTrainer, Teacher
from nemo_rl.algorithms.distillation_config import DistillationMasterConfig, TeacherConfig
from nemo_rl.algorithms.launch import launch
from nemo_rl.algorithms.model_inputs import ModelInputs, prepare_model, rename_section
from nemo_rl.algorithms.openai_setup import start_openai_server
from nemo_rl.algorithms.rollout_batch import Batching
from nemo_rl.algorithms.rollout_setup import RolloutInputs, RolloutSetup, build_rollouts, prepare_rollouts
from nemo_rl.algorithms.teacher_checks import check_teacher
from nemo_rl.algorithms.trainer import RunTools
from nemo_rl.algorithms.worker_setup import start_machines, start_policy
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.models.policy.head_tasks import HeadTask
from nemo_rl.models.policy.head_tasks_distillation import (
    TEACHER_STATES,
    TEACHER_TOPK,
    FullKL,
    LastStates,
    StoredHead,
    TopKLogits,
    TopKLogprobs,
)
from nemo_rl.models.policy.policy_model import DTYPES
from nemo_rl.types import SamplingParams

logger = logging.getLogger(__name__)

MANY_STATE_BYTES = 8 * 2**30
"""Hidden states of a teacher in one step that are worth a warning: they are in the object store and on the workers."""


@dataclass(frozen=True, kw_only=True)
class TeacherInputs:
    """What a teacher is made from, checked."""

    config: TeacherConfig
    model: ModelInputs
    vocab_size: int  # tokens that it shares with the student
    tasks: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class PreparedDistillation:
    """What a run of distillation is made from, checked."""

    rollouts: RolloutInputs
    teachers: dict[str, TeacherInputs]  # by section

    @property
    def identity(self) -> dict[str, Any]:
        return self.rollouts.identity


def run_distillation(config: DistillationMasterConfig) -> int:
    """The whole run; returns the exit status (see `launch`)."""
    return launch(config, prepare=prepare, build=build, num_steps=config.distillation.max_num_steps)


def prepare(config: DistillationMasterConfig) -> PreparedDistillation:
    """Load what needs no worker, and find what is wrong with it; see `prepare_rollouts`."""
    configs = teacher_configs(config)
    models = {key: prepare_model(teacher, config.checkpointing, key) for key, teacher in configs.items()}
    own_identity = {name: value for model in models.values() for name, value in model.identity.items()}
    rollouts = prepare_rollouts(config, own_identity)
    tasks = tasks_by_teacher(config, {part.task_name for part in rollouts.data.train.parts})
    teachers = {
        key: TeacherInputs(
            config=configs[key],
            model=model,
            vocab_size=_shared_vocabulary(config, key, rollouts.model, model),
            tasks=tasks[key],
        )
        for key, model in models.items()
    }
    if config.distillation.topk_logits_k is None:
        for key, teacher in teachers.items():
            warn_of_large_states(config, key, teacher)
    return PreparedDistillation(rollouts=rollouts, teachers=teachers)


def warn_of_large_states(config: DistillationMasterConfig, key: str, teacher: TeacherInputs) -> None:
    """Say how much room the last hidden states of a teacher may take, where that is much."""
    samples, length = config.distillation.num_samples_per_step, config.policy.max_total_sequence_length
    hidden_size = teacher.model.config.get_text_config().hidden_size
    itemsize = DTYPES[teacher.config.precision].itemsize
    num_bytes = samples * length * hidden_size * itemsize
    if num_bytes > MANY_STATE_BYTES:
        logger.warning(
            "distillation.topk_logits_k=null: the hidden states of %s take up to %.1f GiB of host memory in each step "
            "(%d samples x %d tokens x %d numbers x %d bytes); distillation.topk_logits_k=64 would take less",
            key,
            num_bytes / 2**30,
            samples,
            length,
            hidden_size,
            itemsize,
        )


def _shared_vocabulary(config: DistillationMasterConfig, key: str, student: ModelInputs, teacher: ModelInputs) -> int:
    """How many tokens of the vocabulary are compared. ValueError when the teacher has other ones."""
    k = config.distillation.topk_logits_k
    try:
        return check_teacher(student.tokenizer, teacher.tokenizer, student.config, teacher.config, k)
    except ValueError as error:  # which names keys of the section `teacher`
        raise ValueError(rename_section(str(error), "teacher", key, TeacherConfig.model_fields)) from error


def teacher_configs(config: DistillationMasterConfig) -> dict[str, TeacherConfig]:
    """By section: `teacher`, or `teachers.<name>` of each."""
    if config.teacher is not None:
        return {"teacher": config.teacher}
    return {f"teachers.{name}": teacher for name, teacher in config.teachers.items()}


def tasks_by_teacher(config: DistillationMasterConfig, tasks: Iterable[str]) -> dict[str, frozenset[str]]:
    """The tasks of the training data that each teacher teaches, by its section.

    Raises:
        ValueError: a task has no teacher, or `distillation.task_to_teacher` names one that is not there.
    """
    there = sorted(set(tasks))
    chosen: Mapping[str, str] = config.distillation.task_to_teacher
    keys = list(teacher_configs(config))
    if not chosen and len(keys) == 1:
        return {keys[0]: frozenset(there)}
    unknown, untaught = sorted(set(chosen) - set(there)), sorted(set(there) - set(chosen))
    if unknown:
        raise ValueError(
            f"distillation.task_to_teacher: no training dataset is called {', '.join(unknown)}; there are: "
            f"{', '.join(there)}"
        )
    if untaught:
        raise ValueError(
            f"distillation.task_to_teacher: nobody teaches {', '.join(untaught)}; name one of "
            f"{', '.join(config.teachers)} for each, e.g. distillation.task_to_teacher="
            f"{{{untaught[0]}: {next(iter(config.teachers))}}}"
        )
    return {f"teachers.{name}": frozenset(task for task in there if chosen[task] == name) for name in config.teachers}


def build(
    config: DistillationMasterConfig, stack: ExitStack, tools: RunTools, inputs: PreparedDistillation
) -> DistillationTrainer:
    """A trainer ready to run, resumed if there is a checkpoint; everything it started ends with the stack."""
    is_apart = config.distillation.teacher_resources is not None
    setup = build_rollouts(
        config,
        stack,
        inputs.rollouts,
        init_reference_model=False,
        num_further_groups=0 if is_apart else len(inputs.teachers),
    )
    student_task, column = _student_task(config, inputs)
    trainer = DistillationTrainer(
        config,
        tools,
        setup.parts,
        _start_teachers(config, stack, setup, inputs),
        student_task=student_task,
        column=column,
    )
    trainer.start()
    start_openai_server(config, stack, tools, inputs.rollouts, setup)
    return trainer


def _student_task(config: DistillationMasterConfig, inputs: PreparedDistillation) -> tuple[HeadTask, str]:
    """What the student's head says of each token, and the column of the teachers that it reads."""
    k = config.distillation.topk_logits_k
    if k is not None:
        return TopKLogprobs(k), TEACHER_TOPK
    (teacher,) = inputs.teachers.values()  # of several only the largest logits can be told apart
    head = StoredHead.of(teacher.model.config, teacher.model.model_path, teacher.config.precision)
    return FullKL(head, teacher.vocab_size), TEACHER_STATES


def _teacher_task(config: DistillationMasterConfig, teacher: TeacherInputs) -> HeadTask:
    k = config.distillation.topk_logits_k
    if k is not None:
        return TopKLogits(k, teacher.vocab_size)
    return LastStates(teacher.model.config.get_text_config().hidden_size, teacher.config.precision)


def _start_teachers(
    config: DistillationMasterConfig, stack: ExitStack, setup: RolloutSetup, inputs: PreparedDistillation
) -> list[Teacher]:
    machines, cluster, accelerator = config.training_cluster, setup.cluster, setup.accelerator
    if config.distillation.teacher_resources is not None:
        machines = config.teacher_cluster
        cluster = start_machines(machines, stack, len(inputs.teachers), "teachers")
        accelerator = Accelerator(exclusive=machines.use_gpus)
    # As the student's: its distribution is that which it samples from.
    sampling = SamplingParams(max_new_tokens=1, temperature=config.policy.generation.temperature)
    teachers = []
    for key, teacher in inputs.teachers.items():
        policy = start_policy(
            config,
            teacher.config,
            stack,
            teacher.model,
            cluster,
            accelerator,
            seed=config.distillation.seed,
            sampling=sampling,
            name=key.replace("teachers.", "teacher-"),
            init_optimizer=False,
            machines=machines,
        )
        batching = Batching.of(teacher.config, quadratic_weight=teacher.model.flops.quadratic_weight, key=key)
        teachers.append(
            Teacher(
                policy=policy,
                config=teacher.config,
                batching=batching.of_scoring(),
                task=_teacher_task(config, teacher),
                tasks=teacher.tasks,
            )
        )
    return teachers

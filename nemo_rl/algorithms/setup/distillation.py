"""From a configuration to running distillation."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig, TeacherConfig
from nemo_rl.algorithms.distillation import DistillationTrainer, Teacher
from nemo_rl.algorithms.plan.batch import Batching
from nemo_rl.algorithms.setup.launch import launch
from nemo_rl.algorithms.setup.model_inputs import ModelInputs, prepare_model, rename_section
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, RolloutSetup, build_rollouts, prepare_rollouts
from nemo_rl.algorithms.setup.serve import start_openai_server
from nemo_rl.algorithms.setup.workers import start_machines, start_policy
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.models.policy.head.distillation import (
    TEACHER_STATES,
    TEACHER_TOPK,
    FullKL,
    LastStates,
    StoredHead,
    TopKLogits,
    TopKLogprobs,
)
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.pretrained import DTYPES
from nemo_rl.types import SamplingParams

# -- Whether a teacher's distributions can be compared with a student's, token by token. Needs no weights.

logger = logging.getLogger(__name__)

MAX_LISTED = 3
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
OTHER_TEACHER = "set teacher.model_name to a model with the student's tokenizer, such as a larger one of its family"


def check_teacher(
    student_tokenizer: PreTrainedTokenizerFast,
    teacher_tokenizer: PreTrainedTokenizerFast,
    student_config: PretrainedConfig,
    teacher_config: PretrainedConfig,
    topk: int | None,
) -> int:
    """How many tokens, the first of the vocabulary, are compared: all that the student's tokenizer has.

    Every token of the student must be the same token of the teacher, and text must be cut into them by the same merges.
    A teacher may know more tokens, after those; the student never samples them. Heads may be larger than both
    vocabularies: checkpoints pad them. What else differs, special tokens by role and chat templates as between a base
    model and its chat model, is logged as a warning.

    Args:
        topk: `distillation.topk_logits_k`; None when whole distributions are compared.

    Raises:
        ValueError: saying what differs, and what to change.
    """
    student, teacher = _tokens(student_tokenizer), _tokens(teacher_tokenizer)
    _check_tokens(student, teacher)
    _check_merges(student_tokenizer, teacher_tokenizer)
    num_tokens = max(student) + 1
    for key, config in {"policy": student_config, "teacher": teacher_config}.items():
        rows = config.get_text_config().vocab_size
        if rows < num_tokens:
            raise ValueError(
                f"{key}.model_name: the head of this {config.model_type} model has {rows} rows (vocab_size in its "
                f"config.json), but the student's tokenizer has {num_tokens} tokens; the tokenizer belongs to another "
                f"model: set {key}.model_name and {key}.tokenizer.name to the same one"
            )
    if topk is not None and not 1 <= topk <= num_tokens:
        raise ValueError(
            f"distillation.topk_logits_k={topk}: the vocabulary has {num_tokens} tokens; set it to one of 1 to "
            f"{num_tokens}"
        )
    _warn_of_the_rest(student_tokenizer, teacher_tokenizer)
    num_more = sum(number >= num_tokens for number in teacher)
    if num_more:
        logger.warning("the teacher has %d tokens more than the student; they are left out of the comparison", num_more)
    return num_tokens


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _check_tokens(student: dict[int, str], teacher: dict[int, str]) -> None:
    differing = [number for number in sorted(student) if student[number] != teacher.get(number)]
    if not differing:
        return
    listed = "".join(
        f"\n  token {number}: student {student[number]!r}, teacher {_shown(teacher, number)}"
        for number in differing[:MAX_LISTED]
    )
    num_absent = sum(number not in teacher for number in differing)
    absent = f" ({num_absent} of them the teacher does not have)" if num_absent else ""
    raise ValueError(
        f"teacher.tokenizer.name: {len(differing)} of the student's {len(student)} tokens are others for the teacher"
        f"{absent}, so the two distributions are not of the same things:{listed}\n{OTHER_TEACHER}"
    )


def _shown(tokens: dict[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "none"


def _check_merges(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    models = [json.loads(tokenizer.backend_tokenizer.to_str())["model"] for tokenizer in (student, teacher)]
    if models[0]["type"] != models[1]["type"]:
        raise ValueError(
            f"teacher.tokenizer.name: the tokens are the same, but the student's tokenizer is a {models[0]['type']} "
            f"and the teacher's a {models[1]['type']}, which cut text differently; {OTHER_TEACHER}"
        )
    pairs = list(zip_longest(*(_merges(model) for model in models)))
    differing = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if not differing:
        return
    listed = "".join(
        f"\n  merge {number}: student {ours!r}, teacher {theirs!r}" for number, ours, theirs in differing[:MAX_LISTED]
    )
    raise ValueError(
        f"teacher.tokenizer.name: the tokens are the same, but {len(differing)} of {len(pairs)} merges differ, so the "
        f"teacher knows the same text as other tokens than the student writes:{listed}\n{OTHER_TEACHER}"
    )


def _merges(model: dict[str, Any]) -> list[str]:
    """In their order; none where the tokenizer is not made of merges."""
    return [" ".join(pair) for pair in model.get("merges", [])]


def _warn_of_the_rest(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    roles = {role: (getattr(student, role), getattr(teacher, role)) for role in NAMED_TOKENS}
    differing = [f"{role} {ours!r} and {theirs!r}" for role, (ours, theirs) in roles.items() if ours != theirs]
    if differing:
        logger.warning(
            "student and teacher use different special tokens: %s. The student stops at its own; a teacher that ends "
            "its answers otherwise teaches it to",
            ", ".join(differing),
        )
    if student.chat_template != teacher.chat_template:
        logger.warning(
            "student and teacher have different chat templates: the teacher judges prompts in the student's format"
        )


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

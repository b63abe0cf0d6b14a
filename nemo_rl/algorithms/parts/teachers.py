"""The teachers of distillation: checked against the student, then started."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig
from nemo_rl.algorithms.parts.devices import Devices
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.rollouts import Rollouts
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.algorithms.run import Run
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head.distillation import FullKL, LastStates, StoredHead, TopKLogits, TopKLogprobs
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.pretrained import DTYPES
from nemo_rl.types import SamplingParams

logger = logging.getLogger(__name__)

MANY_STATE_BYTES = 8 * 2**30  # of a teacher in one step: from here on the log says so
MAX_LISTED = 3
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A running teacher, its tasks, and its outputs for the student."""

    policy: Policy
    batching: Batching
    task: HeadTask  # the student's head or loss reads its column
    tasks: frozenset[str]  # names of the tasks that it teaches


@dataclass(frozen=True, kw_only=True)
class CheckedTeacher:
    """A teacher whose tokens are the student's."""

    config: PolicyConfig
    model: Model
    vocab_size: int  # tokens that it shares with the student
    tasks: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """The teachers of a run by section: `teacher`, or `teachers.<name>`. `topk` None: whole distributions."""

    checked: Mapping[str, CheckedTeacher]
    topk: int | None

    @classmethod
    def prepare(cls, config: DistillationMasterConfig, rollouts: Rollouts, models: Mapping[str, Model]) -> Self:
        """Check the models of teachers, by section, against the student.

        Raises:
            ValueError: see `check_teacher` and `tasks_by_teacher`.
        """
        topk = config.distillation.topk_logits_k
        tasks = tasks_by_teacher(config, {part.task_name for part in rollouts.prompts.data.train.parts})
        checked = {}
        for further in config.further_models:
            key, model = further.key, models[further.key]
            vocab_size = check_teacher(rollouts.model.tokenizer, model.tokenizer, topk, section=key)
            checked[key] = CheckedTeacher(config=further.config, model=model, vocab_size=vocab_size, tasks=tasks[key])
            if topk is None:
                warn_of_large_states(config, key, checked[key])
        return cls(checked=checked, topk=topk)

    def student_task(self) -> HeadTask:
        """The student's outputs, which its loss compares with the teachers'."""
        if self.topk is not None:
            return TopKLogprobs(self.topk)
        (only,) = self.checked.values()  # several teachers need `topk_logits_k`: the student stores one head
        return FullKL(StoredHead.of(only.model.config, only.model.model_path, only.config.precision), only.vocab_size)

    def start(self, run: Run[DistillationMasterConfig], training: Devices) -> list[Teacher]:
        """Start the teachers: on machines of their own, or on the student's. They end with the run."""
        config, devices = run.config, training
        if config.distillation.teacher_resources is not None:
            devices = Devices.start(run, config.teacher_cluster, len(self.checked), "teachers", take_turns=True)
        # The student samples from its distribution at this temperature, so the teacher's is taken at the same.
        sampling = SamplingParams(max_new_tokens=1, temperature=config.policy.generation.temperature)
        return [self._start(key, teacher, run, devices, sampling) for key, teacher in self.checked.items()]

    def _start(
        self,
        key: str,
        teacher: CheckedTeacher,
        run: Run[DistillationMasterConfig],
        devices: Devices,
        sampling: SamplingParams,
    ) -> Teacher:
        policy = teacher.model.start(
            run,
            teacher.config,
            devices,
            sampling=sampling,
            name=key.replace("teachers.", "teacher-"),
            init_optimizer=False,
        )
        states = LastStates(teacher.model.config.get_text_config().hidden_size, teacher.config.precision)
        return Teacher(
            policy=policy,
            batching=Batching.of(teacher.config, **teacher.model.flops.cost_weights).of_scoring(),
            task=states if self.topk is None else TopKLogits(self.topk, teacher.vocab_size),
            tasks=teacher.tasks,
        )


def tasks_by_teacher(config: DistillationMasterConfig, tasks: Iterable[str]) -> dict[str, frozenset[str]]:
    """The tasks of the training data that each teacher teaches, by its section.

    Raises:
        ValueError: if a task has no teacher, or `distillation.task_to_teacher` names an unknown task.
    """
    existing = sorted(set(tasks))
    chosen: Mapping[str, str] = config.distillation.task_to_teacher
    keys = [model.key for model in config.further_models]
    if not chosen and len(keys) == 1:
        return {keys[0]: frozenset(existing)}
    unknown, untaught = sorted(set(chosen) - set(existing)), sorted(set(existing) - set(chosen))
    if unknown:
        raise ValueError(
            f"distillation.task_to_teacher: no training dataset is called {', '.join(unknown)}; there are: "
            f"{', '.join(existing)}"
        )
    if untaught:
        raise ValueError(
            f"distillation.task_to_teacher: nobody teaches {', '.join(untaught)}; name one of "
            f"{', '.join(config.teachers)} for each, e.g. distillation.task_to_teacher="
            f"{{{untaught[0]}: {next(iter(config.teachers))}}}"
        )
    return {
        f"teachers.{name}": frozenset(task for task in existing if chosen[task] == name) for name in config.teachers
    }


def warn_of_large_states(config: DistillationMasterConfig, key: str, teacher: CheckedTeacher) -> None:
    """Log how much memory the last hidden states of a teacher may take, if that is much."""
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


# -- whether the distributions of teacher and student can be compared token by token


def check_teacher(
    student_tokenizer: PreTrainedTokenizerFast,
    teacher_tokenizer: PreTrainedTokenizerFast,
    topk: int | None,
    section: str = "teacher",
) -> int:
    """Check that a teacher knows the student's tokens. Returns how many tokens are compared: all of the student's.

    Every token of the student must be the same token of the teacher, and both must cut text by the same merges. A
    teacher may know further tokens behind those, which the student never samples. Other special tokens and chat
    templates, as between a base model and its chat model, are logged as a warning.

    Args:
        topk: `distillation.topk_logits_k`; None if whole distributions are compared.
        section: of the teacher, for messages.

    Raises:
        ValueError: saying what differs, and what to change.
    """
    remedy = f"set {section}.model_name to a model with the student's tokenizer, such as a larger one of its family"
    student, teacher = (
        {number: token for token, number in tokenizer.get_vocab().items()}
        for tokenizer in (student_tokenizer, teacher_tokenizer)
    )
    differing = [number for number in sorted(student) if student[number] != teacher.get(number)]
    if differing:
        shown = {number: repr(teacher[number]) if number in teacher else "none" for number in differing[:MAX_LISTED]}
        listed = "".join(f"\n  token {n}: student {student[n]!r}, teacher {text}" for n, text in shown.items())
        num_absent = sum(number not in teacher for number in differing)
        absent = f" ({num_absent} of them the teacher does not have)" if num_absent else ""
        raise ValueError(
            f"{section}.tokenizer.name: {len(differing)} of the student's {len(student)} tokens differ for the "
            f"teacher{absent}, so the two distributions are not of the same things:{listed}\n{remedy}"
        )
    _check_merges(student_tokenizer, teacher_tokenizer, section, remedy)
    num_tokens = max(student) + 1
    if topk is not None and not 1 <= topk <= num_tokens:
        raise ValueError(f"distillation.topk_logits_k={topk}: set it to 1 to {num_tokens}, the size of the vocabulary")
    _warn_of_differences(student_tokenizer, teacher_tokenizer)
    num_more = sum(number >= num_tokens for number in teacher)
    if num_more:
        logger.warning("the teacher has %d tokens more than the student; they are left out of the comparison", num_more)
    return num_tokens


def _check_merges(
    student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, section: str, remedy: str
) -> None:
    models = [json.loads(tokenizer.backend_tokenizer.to_str())["model"] for tokenizer in (student, teacher)]
    kinds = [model["type"] for model in models]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{section}.tokenizer.name: the tokens are the same, but the student's tokenizer is a {kinds[0]} and "
            f"the teacher's a {kinds[1]}, which cut text differently; {remedy}"
        )
    # Without "merges" the tokenizer is of a kind that has none.
    merges = ([" ".join(pair) for pair in model.get("merges", [])] for model in models)
    pairs = list(zip_longest(*merges))
    differing = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if differing:
        listed = "".join(f"\n  merge {n}: student {a!r}, teacher {b!r}" for n, a, b in differing[:MAX_LISTED])
        raise ValueError(
            f"{section}.tokenizer.name: the tokens are the same, but {len(differing)} of {len(pairs)} merges differ, "
            f"so the teacher knows the same text as other tokens than the student writes:{listed}\n{remedy}"
        )


def _warn_of_differences(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    pairs = {
        role: (student.special_tokens_map.get(role), teacher.special_tokens_map.get(role)) for role in SPECIAL_TOKENS
    }
    differing = [f"{role} {own!r} and {other!r}" for role, (own, other) in pairs.items() if own != other]
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

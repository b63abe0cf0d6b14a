"""Configuration of on-policy distillation: the algorithm, its teachers, and the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.checks import check_rollout_run, data_parallel_size
from nemo_rl.algorithms.config.loss import DistillationLossConfig
from nemo_rl.algorithms.config.rollout import FurtherModel, RolloutConfig, RolloutMasterConfig
from nemo_rl.algorithms.plan.batch import check_budgets
from nemo_rl.config.base import Derived, StrictModel
from nemo_rl.config.errors import nearest_key
from nemo_rl.config.rules import NotYet, anything
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.models.policy.config import PolicyConfig


class TeacherResourcesConfig(StrictModel):
    """Machines of the teachers alone."""

    gpus_per_node: int = Field(default=1, ge=0)
    """GPUs used on each node; 0: the teachers run on CPU."""

    num_nodes: int = Field(default=1, ge=1)
    """Nodes of the teachers."""

    cpu_workers_per_node: int = Field(default=1, ge=1)
    """Ranks of a teacher on each node when `gpus_per_node` is 0."""


class DistillationConfig(RolloutConfig):
    """Distillation: batch shape, what the teacher is asked, validation."""

    num_prompts_per_step: int = Field(default=128, ge=1)
    """Prompts of one step."""

    num_generations_per_prompt: int = Field(default=1, ge=1)
    """Samples of each prompt."""

    max_num_epochs: int = Field(default=10, ge=1)
    """The run ends after so many passes over the training data or after `max_num_steps`, whichever comes first."""

    max_num_steps: int = Field(default=1000, ge=1)
    """Steps of the run at most."""

    val_batch_size: int = Field(default=64, ge=1)
    """Prompts of a validation batch."""

    max_val_samples: int = Field(default=512, ge=1)
    """Prompts of a validation at most."""

    topk_logits_k: int | None = Field(default=64, ge=1)
    """The teacher's largest logits of each token, over which student and teacher are compared; null: over the whole
    vocabulary."""

    task_to_teacher: dict[str, str] = Field(default_factory=dict)
    """Which of `teachers` teaches which task: name of a training dataset -> name of a teacher."""

    teacher_resources: TeacherResourcesConfig | None = None
    """Machines of the teachers alone; null: they take turns with the student on its machines."""


class TeacherConfig(PolicyConfig):
    """A teacher: keys as in `policy`, with its own layout. It is not trained."""

    max_total_sequence_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)] = 512
    """Tokens of the longest sample: prompt, completions and environment turns."""

    train_micro_batch_size: Annotated[int, Derived("${policy.train_micro_batch_size}"), Field(ge=1)] = 4
    """Only as the default of `logprob_batch_size`: a teacher is not trained."""

    precision: Annotated[Literal["float32", "bfloat16", "float16"], Derived("${policy.precision}")] = "bfloat16"
    """Data type of the forward pass."""

    not_yet: ClassVar = (*PolicyConfig.not_yet, NotYet("generation", anything))

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        if self.reward_model_cfg.enabled:
            yield "reward_model_cfg.enabled", "a teacher has the head of a language model; set it to false"


class DistillationMasterConfig(RolloutMasterConfig):
    """A whole run of distillation."""

    section: ClassVar = "distillation"

    distillation: DistillationConfig = DistillationConfig()
    """Distillation: batch shape, what the teacher is asked, validation."""

    loss_fn: DistillationLossConfig = DistillationLossConfig()
    """The divergence between teacher and student."""

    teacher: TeacherConfig | None = None
    """The teacher of everything: keys as in `policy`. Or name several in `teachers`."""

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Several teachers by name, told apart by `distillation.task_to_teacher`."""

    @property
    def rollout(self) -> DistillationConfig:
        return self.distillation

    @property
    def train_metrics(self) -> frozenset[str]:
        return metric_names.distillation(self.distillation) | self.task_metrics | self.generation_metrics

    @property
    def teacher_cluster(self) -> ClusterConfig:
        """The machines that the teachers are on."""
        own = self.distillation.teacher_resources
        if own is None:
            return self.training_cluster
        return ClusterConfig(**own.model_dump(), worker_timeout_s=self.cluster.worker_timeout_s)

    @property
    def further_models(self) -> list[FurtherModel]:
        apart = self.distillation.teacher_resources is not None
        found = {} if self.teacher is None else {"teacher": self.teacher}
        found |= {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return [
            FurtherModel(key=key, config=teacher, cluster=self.teacher_cluster, is_apart=apart)
            for key, teacher in found.items()
        ]

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from check_rollout_run(self)
        yield from self._check_who_teaches()
        yield from self._check_distributions()
        for model in self.further_models:
            yield from self._check_teacher(model)

    def _check_who_teaches(self) -> Iterator[tuple[str, str]]:
        tasks = self.distillation.task_to_teacher
        if self.teacher is None and not self.teachers:
            yield "teacher", "is required, e.g. teacher: {model_name: Qwen/Qwen3-4B}; or name several in `teachers`"
        if self.teacher is not None and self.teachers:
            yield "teacher.model_name", "there is one teacher, or several in `teachers`; leave one of the sections out"
        if self.teacher is not None and tasks:
            yield "distillation.task_to_teacher", "`teacher` teaches everything; leave it out, or name `teachers`"
        for task, name in tasks.items():
            if self.teachers and name not in self.teachers:
                near = nearest_key(name, self.teachers)
                fix = f"did you mean {near}?" if near else f"there are: {', '.join(self.teachers)}"
                yield f"distillation.task_to_teacher.{task}", f"no section teachers.{name}; {fix}"
        for name in self.teachers if tasks or len(self.teachers) > 1 else ():
            if name not in tasks.values():
                yield f"teachers.{name}.model_name", "teaches nothing; name its task in distillation.task_to_teacher"

    def _check_distributions(self) -> Iterator[tuple[str, str]]:
        generation, distillation = self.policy.generation, self.distillation
        if generation.top_p < 1 or generation.top_k is not None:
            yield (
                "policy.generation.top_p",
                "not supported yet: top_p or top_k, which leave no probability where the teacher may have some; set "
                "top_p=1 and top_k=null",
            )
        if distillation.topk_logits_k is not None:
            return
        if len(self.teachers) > 1:
            yield "distillation.topk_logits_k", "not supported yet: null with several teachers; use 64, for instance"
        if self.loss_fn.zero_outside_topk:
            yield (
                "loss_fn.zero_outside_topk",
                "has no meaning with distillation.topk_logits_k=null, as nothing is outside; set it to false",
            )

    def _check_teacher(self, model: FurtherModel) -> Iterator[tuple[str, str]]:
        longest, samples = self.policy.max_total_sequence_length, self.distillation.num_samples_per_step
        if model.config.max_total_sequence_length < longest:
            yield (
                f"{model.key}.max_total_sequence_length",
                f"{model.config.max_total_sequence_length} is less than policy.max_total_sequence_length={longest}, "
                "and the teacher reads the same samples; leave it out",
            )
        for problem, message in check_budgets(model.config, key=model.key, is_trained=False):
            yield f"{model.key}.{problem}", message
        num_ranks = data_parallel_size(model.config, model.cluster)
        if num_ranks is not None and samples % (num_ranks * model.config.backend_cfg.micro_batch_multiple):
            multiple = num_ranks * model.config.backend_cfg.micro_batch_multiple
            yield (
                "distillation.num_prompts_per_step",
                f"the {samples} samples of a step cannot be shared by the {num_ranks} data ranks of {model.key}; make "
                f"them a multiple of {multiple}",
            )

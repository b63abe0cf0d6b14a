"""Configuration of on-policy distillation: the algorithm, its teachers, and the whole run."""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.loop import Problems, data_parallel_size
from nemo_rl.algorithms.config.rollout import FurtherModel, RolloutConfig, RolloutMasterConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import StrictModel
from nemo_rl.models.policy.config import SecondModelConfig, check_budgets
from nemo_rl.utils.config import ClusterConfig, MachinesConfig


class DistillationLossConfig(StrictModel):
    """The loss of on-policy distillation."""

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    """`forward`: KL(teacher || student); `reverse`: KL(student || teacher); `mixed`: both, see `mixed_kl_weight`."""

    mixed_kl_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of the forward KL in `mixed`; the reverse KL has the rest."""

    zero_outside_topk: bool = False
    """false: teacher and student are compared as distributions over only the teacher's largest logits. true: the
    student is taken whole, and the teacher as having nothing elsewhere, so that the student's mass there costs."""


class TeacherMachinesConfig(MachinesConfig):
    """Machines of the teachers: how many nodes, and how many GPUs or CPU workers of each."""

    cpu_workers_per_node: int = Field(default=1, ge=1)
    """Workers on each node when `gpus_per_node` is 0."""


class DistillationConfig(RolloutConfig):
    """Distillation: batch shape, the teacher's distributions, validation."""

    num_prompts_per_step: int = Field(default=128, ge=1)
    """Prompts of one step."""

    num_generations_per_prompt: int = Field(default=1, ge=1)
    """Samples of each prompt."""

    max_num_epochs: int = Field(default=10, ge=1)
    """Passes over the training data. The run ends after them or after `max_num_steps` steps, whichever comes first."""

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

    teacher_resources: TeacherMachinesConfig | None = None
    """Machines only for the teachers; null: they take turns with the student on its machines."""


class TeacherConfig(SecondModelConfig):
    """A teacher: keys as in `policy`, with its own layout. It is not trained."""

    rules: ClassVar = {
        "reward_model_cfg.enabled": "a teacher has the head of a language model -> reward_model_cfg.enabled=false"
    }


class DistillationMasterConfig(RolloutMasterConfig):
    """A whole run of distillation."""

    section: ClassVar = "distillation"
    cpu_config: ClassVar[str] = "examples/configs/distillation_math_cpu.yaml"

    rules: ClassVar = {
        "teacher=null requires teachers": (
            "is required, e.g. teacher: {model_name: Qwen/Qwen3-4B}; or name several in `teachers`"
        ),
        "teacher.model_name: teacher != null excludes teachers": (
            "there is one teacher, or several in `teachers`; leave one of the sections out"
        ),
        "distillation.task_to_teacher: teacher != null excludes distillation.task_to_teacher": (
            "`teacher` teaches everything; leave it out, or name `teachers`"
        ),
        "policy.generation.top_p: policy.generation.is_filtered": (
            "not supported yet: top_p or top_k, which leave no probability where the teacher may have some -> "
            "policy.generation.top_p=1 and policy.generation.top_k=null"
        ),
        "distillation.topk_logits_k=null excludes has_several_teachers": (
            "not supported yet: null with several teachers -> distillation.topk_logits_k=64"
        ),
        "loss_fn.zero_outside_topk excludes distillation.topk_logits_k=null": (
            "has no meaning with distillation.topk_logits_k=null, as nothing is outside -> "
            "loss_fn.zero_outside_topk=false"
        ),
    }

    distillation: DistillationConfig = DistillationConfig()

    loss_fn: DistillationLossConfig = DistillationLossConfig()
    """The divergence between teacher and student."""

    teacher: TeacherConfig | None = None
    """The teacher of everything: keys as in `policy`. Or name several in `teachers`."""

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Several teachers by name, assigned to tasks by `distillation.task_to_teacher`."""

    @property
    def train_metrics(self) -> frozenset[str]:
        names = self.rollout_metrics | metric_names.DISTILLATION
        return names if self.distillation.topk_logits_k is None else names | metric_names.TOP_K

    @property
    def has_several_teachers(self) -> bool:
        return len(self.teachers) > 1

    @property
    def teacher_cluster(self) -> ClusterConfig:
        """The machines of the teachers."""
        own = self.distillation.teacher_resources
        return self.training_cluster if own is None else self.cluster.model_copy(update=dict(own))

    @property
    def further_models(self) -> list[FurtherModel]:
        apart = self.distillation.teacher_resources is not None
        found = {} if self.teacher is None else {"teacher": self.teacher}
        found |= {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return [
            FurtherModel(key=key, config=teacher, cluster=self.teacher_cluster, is_apart=apart, is_trained=False)
            for key, teacher in found.items()
        ]

    @property
    def gpus_beside_cluster(self) -> int:
        own = self.distillation.teacher_resources
        return super().gpus_beside_cluster + (0 if own is None else self.teacher_cluster.gpus_per_node)

    def cross_checks(self) -> Problems:
        yield from super().cross_checks()
        tasks = self.distillation.task_to_teacher
        for task, name in tasks.items():
            if self.teachers and name not in self.teachers:
                fix = did_you_mean(name, self.teachers)
                yield f"distillation.task_to_teacher.{task}", f"no section teachers.{name}; {fix}"
        for name in self.teachers if tasks or len(self.teachers) > 1 else ():
            if name not in tasks.values():
                yield f"teachers.{name}.model_name", "teaches nothing; name its task in distillation.task_to_teacher"

        samples = self.distillation.num_samples_per_step
        for model in self.further_models:
            yield from check_budgets(model.config, is_trained=False)
            num_ranks = data_parallel_size(model.config, model.cluster) or 1
            multiple = num_ranks * model.config.backend_cfg.micro_batch_multiple
            if samples % multiple:
                yield (
                    "distillation.num_prompts_per_step",
                    f"the {samples} samples of a step cannot be shared by the {num_ranks} data ranks of {model.key}; "
                    f"make them a multiple of {multiple}",
                )

"""On-policy distillation: the student samples, the teacher says what it would have said at each token, and the student
moves towards that (arXiv 2306.13649).

One step is `DistillationTrainer.step`; each of its statements is a phase, and each phase a method below it or in
`rollout_trainer.py`. Teachers are policies that are not trained, with plans of their own over the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig, TeacherConfig
from nemo_rl.algorithms.losses.distillation import DistillationLoss
from nemo_rl.algorithms.plan.batch import Batching, plan_batch, plan_samples
from nemo_rl.algorithms.plan.rewards import loss_mask
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.models.policy.batch.microbatches import RowKey
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.types import BatchPlan, GroupHandle, PlannedSample


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher with what it is asked."""

    policy: PolicyInterface
    config: TeacherConfig
    batching: Batching
    task: HeadTask  # its column is what the student's head or loss reads
    tasks: frozenset[str]  # names of the tasks that it teaches


class DistillationTrainer(RolloutTrainer):
    """See the module. `student_task` and `column` go with what the teachers are asked.

    Every task of the training data is taught by exactly one of the teachers.
    """

    def __init__(
        self,
        config: DistillationMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        teachers: Sequence[Teacher],
        *,
        student_task: HeadTask,
        column: str,
    ) -> None:
        super().__init__(config, tools, parts)
        self.config = config
        self.teachers = teachers
        self.student_task = student_task
        self.column = column
        self.loss_fn = DistillationLoss(config.loss_fn)

    def step(self) -> None:
        groups = self.rollout()
        plan = self.plan(groups)
        self.teach(groups)
        self.update()
        self.sync_weights(self.state.total_steps + 1)
        self.report(groups, plan)

    # -- the phases, in order

    def rollout(self) -> list[GroupHandle]:
        """Prompts -> finished groups. Their rewards are reported, and nothing more."""
        self.generated = []
        with self.phase("generation"):
            return self.next_groups()

    def plan(self, groups: Sequence[GroupHandle]) -> BatchPlan:
        """Which sample in which rank, optimizer step and micro-batch of the student."""
        plan = plan_batch(
            groups,
            [[0.0] * len(group.samples) for group in groups],
            [[loss_mask(sample, overlong_filtering=False) for sample in group.samples] for group in groups],
            num_ranks=self.policy.data_parallel_size,
            global_batch_size=self.config.policy.train_global_batch_size,
            batching=self.batching,
            micro_batch_multiple=self.config.policy.backend_cfg.micro_batch_multiple,
        )
        return self.load_plan(plan)

    def teach(self, groups: Sequence[GroupHandle]) -> None:
        """What each teacher says of the samples of its tasks, brought to the student's workers."""
        said: dict[RowKey, Any] = {}
        with self.phase("teacher_logprob_inference"):
            for teacher in self.teachers:
                said |= ask(teacher, groups, self.column)
            self.policy.attach(self.column, said)

    def update(self) -> None:
        """The optimizer steps."""
        with self.phase("policy_training"):
            result = self.take_steps(self.policy, self.loss_fn, self.student_task)
        self.state.total_valid_tokens += int(result.metrics["global_valid_toks"])

    # -- state

    def recover(self, error: WorkerDied) -> None:
        """After a worker died: a new group in its place. Teachers have no state but their weights."""
        dead = [teacher.policy for teacher in self.teachers if error.is_of(teacher.policy.name_prefix)]
        for teacher in dead:
            teacher.restart()
        if not dead:
            super().recover(error)


def ask(teacher: Teacher, groups: Sequence[GroupHandle], column: str) -> Mapping[RowKey, Any]:
    """References to what a teacher says of the samples that are its to teach, by their place in `groups`."""
    plan, taught = plan_teacher(teacher, groups)
    if plan is None:
        return {}
    teacher.policy.load(plan)
    teacher.policy.compute(teacher.task, column)
    said = teacher.policy.share(column)
    return {key: said[key] for key in taught}


def plan_teacher(teacher: Teacher, groups: Sequence[GroupHandle]) -> tuple[BatchPlan | None, set[RowKey]]:
    """The plan of a teacher, None when nothing is its to teach, and the samples that are.

    Where ranks and micro-batches cannot share these evenly, shortest samples of other tasks fill the plan: there are
    enough, since the number of all samples can be shared.
    """
    mine: list[PlannedSample] = []
    others: list[PlannedSample] = []
    for number, group in enumerate(groups):
        wanted = mine if group.task_name in teacher.tasks else others
        wanted += [
            PlannedSample(group=number, index=index, lengths=(meta.length,), advantage=0.0, mask=0.0)
            for index, meta in enumerate(group.samples)
        ]
    if not mine:
        return None, set()
    multiple = teacher.config.backend_cfg.micro_batch_multiple
    missing = -len(mine) % (teacher.policy.data_parallel_size * multiple)
    filling = sorted(others, key=lambda sample: sample.length)[:missing]
    plan = plan_samples(
        mine + filling,
        [group.ref for group in groups],
        num_ranks=teacher.policy.data_parallel_size,
        global_batch_size=len(mine) + missing,
        batching=teacher.batching,
        micro_batch_multiple=multiple,
    )
    return plan, {(sample.group, sample.index) for sample in mine}

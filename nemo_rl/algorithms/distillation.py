"""On-policy distillation: the student samples, teachers score its tokens, and the student moves towards them (arXiv
2306.13649).

Read `DistillationTrainer.step`: each statement is a phase, and each phase is a method below it or in
`trainers/rollout_trainer.py`. Teachers are untrained policies with plans of their own over the same samples.
"""

from collections.abc import Sequence
from typing import Any

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.losses.distillation import DistillationLoss
from nemo_rl.algorithms.parts.devices import RolloutDevices
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.rollouts import Rollouts
from nemo_rl.algorithms.parts.teachers import Teacher, Teachers
from nemo_rl.algorithms.plan.batch import plan_samples, rows_of_groups
from nemo_rl.algorithms.plan.rewards import loss_mask
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.types import BatchPlan, GroupHandle, RowKey, TrainResult


def run_distillation(config: DistillationMasterConfig) -> int:
    """Train; returns the exit status (see `Command`)."""
    with Run(config) as run:
        rollouts, teachers = prepare_distillation(config)
        run.start(rollouts.saves)
        devices = RolloutDevices.start(run)
        parts = rollouts.start(run, devices)
        running = teachers.start(run, devices.training)
        run.train(DistillationTrainer(run.config, run.tools, parts, running, teachers.student_task()))
    return run.status


def prepare_distillation(config: DistillationMasterConfig) -> tuple[Rollouts, Teachers]:
    """The checked parts of a run that samples, and teachers, which know the student's tokens.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with the key to change.
    """
    models = {further.key: Model.prepare(further.config, config.checkpointing) for further in config.further_models}
    rollouts = Rollouts.prepare(config, untrained=models.values())
    return rollouts, Teachers.prepare(config, rollouts, models)


class DistillationTrainer(RolloutTrainer):
    """Distillation from one or several teachers; every task of the training data has exactly one.

    `student_task` gives the student's outputs for each token. It reads one row column: the teachers' outputs.
    """

    def __init__(
        self,
        config: DistillationMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        teachers: Sequence[Teacher],
        student_task: HeadTask,
    ) -> None:
        super().__init__(config, tools, parts)
        self.config = config
        self.teachers = teachers
        self.student_task = student_task
        (self.column,) = student_task.columns
        self.loss_fn = DistillationLoss(config.loss_fn)
        # Teachers have no state but their weights, so a new worker group is all they need.
        self.recovery.replacements |= {teacher.policy.name_prefix: teacher.policy.restart for teacher in teachers}

    def step(self) -> None:
        groups = self.sample()  # rewards are reported and not used
        plan = self.plan(groups)
        self.score_with_teachers(groups)
        trained = self.update()
        self.sync_weights()
        self.report(groups, plan, trained)

    # -- the phases, in order

    def plan(self, groups: Sequence[GroupHandle]) -> BatchPlan:
        """Which sample goes to which rank, optimizer step and micro-batch of the student."""
        advantages = [[0.0] * len(group.samples) for group in groups]
        masks = [[loss_mask(sample, overlong_filtering=False) for sample in group.samples] for group in groups]
        return self.plan_and_load(groups, advantages, masks)

    def score_with_teachers(self, groups: Sequence[GroupHandle]) -> None:
        """Each teacher's outputs for the samples of its tasks, handed to the student's workers."""
        outputs: dict[RowKey, Any] = {}
        with self.phase("teacher_logprob_inference"):
            for teacher in self.teachers:
                plan, own_keys = plan_teacher(teacher, groups)
                if plan is not None:
                    teacher.policy.load(plan)
                    teacher.policy.compute(teacher.task, self.column)
                    shared = teacher.policy.share(self.column)
                    outputs |= {key: shared[key] for key in own_keys}
            self.policy.attach(self.column, outputs)

    def update(self) -> TrainResult:
        """The optimizer steps."""
        with self.phase("policy_training"):
            return self.take_steps(self.policy, self.loss_fn, self.student_task)


def plan_teacher(teacher: Teacher, groups: Sequence[GroupHandle]) -> tuple[BatchPlan | None, set[RowKey]]:
    """The plan of a teacher, None if no sample is of its tasks, and the keys of the samples that are.

    If the number of these samples is no multiple of ranks and micro-batches, the shortest samples of other tasks fill
    the plan. There are enough of them, because the number of all samples is a multiple of both.
    """
    zeros = [[0.0] * len(group.samples) for group in groups]  # neither advantages nor gradients
    samples = [sample for (sample,) in rows_of_groups(groups, advantages=zeros, masks=zeros)]
    own = [sample for sample in samples if groups[sample.group].task_name in teacher.tasks]
    if not own:
        return None, set()
    others = [sample for sample in samples if groups[sample.group].task_name not in teacher.tasks]
    missing = -len(own) % (teacher.policy.data_parallel_size * teacher.batching.micro_batch_multiple)
    filling = sorted(others, key=lambda sample: sample.length)[:missing]
    plan = plan_samples(
        [[sample] for sample in own + filling],
        [(group.ref, group.place) for group in groups],
        num_ranks=teacher.policy.data_parallel_size,
        global_batch_size=len(own) + missing,
        batching=teacher.batching,
    )
    return plan, {(sample.group, sample.index) for sample in own}

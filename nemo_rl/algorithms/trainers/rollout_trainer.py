"""What algorithms that sample share: rollouts, the sync of weights, validation by generation, the report of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.plan.batch import Batching, packing_metrics, token_imbalance
from nemo_rl.algorithms.trainers.metrics import (
    DraftMeter,
    PoolUse,
    flops_metrics,
    performance_metrics,
    rollout_metrics,
    task_step_metrics,
    task_validation_metrics,
    turn_metrics,
    turn_seconds,
    validation_metrics,
)
from nemo_rl.algorithms.trainers.policy_trainer import PolicyTrainer
from nemo_rl.algorithms.trainers.rollout_recorder import RolloutRecorder
from nemo_rl.algorithms.trainers.trainer import DataExhausted, RunTools, Schedule
from nemo_rl.data.rows.dataloader import PromptDataLoader
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.refit.sync import WeightSync
from nemo_rl.rollouts.collector import KEEPER, RolloutCollector
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import BatchPlan, GroupHandle, Prompt, SampleMeta, SampleStatus, SamplingParams
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.save import StateWrite

MAX_REASONS_SHOWN = 3
BUFFER_FOLDER = "replay_buffer"
OPEN_GROUPS = "open_groups.json"
VALIDATION_SEED_STEP = -1  # every validation draws with the same seeds, so that its curve moves only with the weights


class TooManyFailures(RuntimeError):
    """More episodes failed than `max_failed_sample_fraction` allows."""


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What a run that samples is made of."""

    policy: PolicyInterface
    generation: GenerationInterface | None  # None: the rollouts are recorded ones
    refit: WeightSync
    rollouts: RolloutCollector
    prompts: PromptDataLoader
    validation_prompts: Sequence[Prompt]
    train_sampling: SamplingParams
    val_sampling: SamplingParams
    flops: ModelFlops


class RolloutTrainer(PolicyTrainer):
    """A `PolicyTrainer` whose samples come from the policy itself. Subclasses bring `step`.

    `others` are further policies that are trained and saved with the first.
    """

    generation_phase: ClassVar[str] = "generation"
    """Name of the phase in which a step waits for its groups."""

    def __init__(
        self,
        config: RolloutMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        others: Sequence[PolicyInterface] = (),
    ) -> None:
        rollout = config.rollout
        num_steps = min(rollout.max_num_steps, rollout.max_num_epochs * len(parts.prompts))
        super().__init__(
            Schedule.of(rollout, num_steps=num_steps),
            tools,
            policies=[parts.policy, *others],
            data=parts.prompts,
            nonfinite_action=config.policy.nonfinite_action,
        )
        self.run = config
        # swappable parts
        self.policy = parts.policy
        self.generation = parts.generation
        self.refit = parts.refit
        self.rollouts = parts.rollouts
        self.prompts = parts.prompts
        self.batches = self.remaining_batches()
        self.validation_prompts = parts.validation_prompts
        # run-time
        self.train_sampling = parts.train_sampling
        self.val_sampling = parts.val_sampling
        self.flops = parts.flops
        self.batching = Batching.of(config.policy, quadratic_weight=parts.flops.quadratic_weight)
        self.version = 0  # of the policy's present weights
        self.token_bytes_before = 0
        self.generated: list[GroupHandle] = []  # of the step in progress, with what dynamic sampling discards
        self.rollouts.restart_generation = self.restart_generation
        self.rollouts.abandon_requests = self.abandon_requests
        self.drafts: DraftMeter | None = None
        if parts.generation is not None and config.policy.generation.speculates:
            self.drafts = DraftMeter(parts.generation)
        self.recorder = RolloutRecorder(config, tools, parts.rollouts) if rollout.rollout_record.enabled else None

    def start(self) -> None:
        """Resume, or give generation its first weights: engines are built empty, and filled from the policy."""
        if not self.resume():
            self.refit.sync(0)
        self.rollouts.generation_use()  # until now nothing was to be done
        if self.recorder is not None:
            self.recorder.start(self.state.total_steps)

    def train(self) -> None:
        super().train()
        if self.recorder is not None:
            self.recorder.end()

    # -- rollouts

    def remaining_batches(self) -> Iterator[list[Prompt]]:
        """Batches of prompts from where the data loader stands to the end of the last epoch."""
        while self.prompts.epoch < self.run.rollout.max_num_epochs:
            yield from self.prompts

    def next_prompts(self) -> list[Prompt]:
        """The next batch of prompts; raises DataExhausted after the last epoch."""
        batch = next(self.batches, None)
        if batch is None:
            raise DataExhausted
        return batch

    def next_groups(self) -> list[GroupHandle]:
        """The next batch of prompts, played. Raises when too many of its episodes have no outcome."""
        groups = self.rollouts.next_groups(
            self.state.total_steps + 1,
            lambda: self.requests_of(self.next_prompts()),
            is_first=not self.generated,
        )
        if not groups:
            raise DataExhausted
        return self.checked(groups)

    def requests_of(self, prompts: Sequence[Prompt]) -> list[GroupRequest]:
        """How the batch that the data loader gave last is to be played."""
        # One number per batch drawn: with dynamic sampling a prompt may come again within a step, and draws anew.
        batch = self.prompts.epoch * len(self.prompts) + self.prompts.batches_done
        return [
            self.request(prompt, f"{batch}/{position}/{prompt.prompt_id}", batch)
            for position, prompt in enumerate(prompts)
        ]

    def request(self, prompt: Prompt, group_id: str, seed_step: int) -> GroupRequest:
        """A group of training samples."""
        return GroupRequest(
            group_id=group_id,
            prompt=prompt,
            num_generations=self.run.rollout.num_generations_per_prompt,
            sampling=self.train_sampling,
            seed_step=seed_step,
        )

    def checked(self, groups: list[GroupHandle]) -> list[GroupHandle]:
        """Groups of this step, once it is seen that enough of their episodes have an outcome."""
        self.check_failures(groups)
        self.generated += groups
        return groups

    def check_failures(self, groups: Sequence[GroupHandle]) -> None:
        """Say which samples have no outcome; stop the run when they are too many to be chance."""
        samples = [sample for group in groups for sample in group.samples]
        too_long = sorted(
            {group.prompt_id for group in groups if group.samples[0].status is SampleStatus.PROMPT_TOO_LONG}
        )
        if too_long:
            limit = self.run.data.max_input_seq_length
            text = f"prompts longer than data.max_input_seq_length={limit}: {', '.join(too_long[:8])}"
            if len(too_long) == len(groups):
                raise ValueError(f"all {text}; raise it and policy.max_total_sequence_length, or shorten the prompts")
            self.tools.console.warn(f"{len(too_long)} {text}; they are left out")
        self._check_timed_out(samples)
        failed = [sample for sample in samples if sample.status is SampleStatus.FAILED]
        # Each reason once, with the first sample that it is of.
        by_reason = {str(sample.failure).replace(sample.sample_id, ""): str(sample.failure) for sample in failed[::-1]}
        reasons = "\n".join(sorted(by_reason.values())[:MAX_REASONS_SHOWN])
        if failed:
            self.tools.console.warn(f"{len(failed)} of {len(samples)} episodes failed:\n{reasons}")
        if len(failed) > self.run.rollout.max_failed_sample_fraction * len(samples):
            limit = f"{self.run.section}.max_failed_sample_fraction={self.run.rollout.max_failed_sample_fraction}"
            raise TooManyFailures(f"{len(failed)} of {len(samples)} episodes failed, more than {limit}:\n{reasons}")

    def _check_timed_out(self, samples: Sequence[SampleMeta]) -> None:
        late = [sample for sample in samples if sample.status is SampleStatus.TIMED_OUT]
        key = f"{self.run.section}.episode_timeout_s={self.run.rollout.episode_timeout_s}"
        if late and len(late) == len(samples):
            raise TooManyFailures(
                f"all {len(late)} episodes took longer than {key}: raise it, lower "
                f"{self.run.section}.max_rollout_turns or policy.generation.max_new_tokens, or sample on more devices"
            )
        if late:
            self.tools.console.warn(f"{len(late)} of {len(samples)} episodes took longer than {key}")

    # -- the end of a step

    def load_plan(self, plan: BatchPlan) -> BatchPlan:
        """The workers fetch the rows of their part of `plan`."""
        self.record("train", packing_metrics(plan, self.batching))
        with self.phase("data_processing"):
            try:
                self.policy.load(plan)
            except WorkerError as error:
                self.rollouts.check_keeper(error)
                raise
        return plan

    def sync_weights(self, version: int) -> None:
        """Policy weights -> generation weights, verified by fingerprints. Version n is that after n steps."""
        self.version = version
        with self.phase("weight_sync"):
            try:
                self.refit.sync(version)
            except WorkerError as error:
                prefix = self.generation.name_prefix if self.generation is not None else None
                if prefix is None or not (error.engine_died or error.worker.startswith(prefix)):
                    raise
                self.tools.console.warn(f"{first_line(error)}; the engine is started again")
                self.rollouts.use_generation(self.restart_generation())

    def report(self, trained_groups: Sequence[GroupHandle], plan: BatchPlan, *, num_passes: int = 1) -> None:
        """What is known of the step from metadata, and what the environments say of it.

        Rollouts are judged by everything that was generated, throughput of training by what was trained on, in
        `num_passes` over it.
        """
        generated = [sample for handle in self.generated for sample in handle.samples]
        trained = [sample for group in trained_groups for sample in group.samples]
        self.state.consumed_samples += len(generated)
        environment_metrics = self.rollouts.environment_metrics(self.generated)
        self.record("train", environment_metrics)
        version = self.state.total_steps
        self.record("train", rollout_metrics(self.generated, current_weight_version=version))
        tasks = self.prompts.dataset.task_names
        self.record("train", task_step_metrics(self.generated, tasks, current_weight_version=version))
        self.record("train", turn_metrics(generated, max_turns=self.run.rollout.max_rollout_turns))
        self.record("performance", turn_seconds(generated))
        if self.drafts is not None:
            self.record("train", self.drafts.metrics())
        num_failed = sum(sample.status is SampleStatus.FAILED for sample in generated)
        num_tokens = sum(sample.length for sample in trained)
        self.record("train", {"num_failed_samples": num_failed, "total_num_tokens": num_tokens})
        seconds = self.timer.get_timing_metrics("sum")
        workers, training = self.run.cluster.num_workers, self.run.training_cluster.num_workers
        seconds["total_step_time"] = sum(seconds.values())
        valid_tokens = self.metrics["train/global_valid_toks"]
        self.record(
            "timing/train", {"valid_tokens_per_sec_per_gpu": valid_tokens / seconds["total_step_time"] / workers}
        )
        use = self.rollouts.generation_use()
        throughput = performance_metrics(
            seconds,
            num_samples=len(trained),
            num_tokens=num_tokens,
            num_generated_tokens=use.num_tokens,
            generation_s=use.busy_s,
            num_training_devices=training,
            num_generation_devices=self.run.generation_cluster.num_workers,
            colocated=self.run.policy.generation.colocated.enabled,
        )
        pools = PoolUse.of(seconds, use)
        throughput |= pools.metrics()
        if self.could_overlap:
            self.tools.console.remark(pools.verdict())
        if self.recorder is not None:
            throughput |= self.recorder.record(
                version + 1, self.generated, trained_groups, plan, environment_metrics, weight_version=version
            )
        token_bytes = self.policy.controller_tensor_bytes + self.rollouts.controller_tensor_bytes
        throughput["average_token_imbalance"] = token_imbalance(plan)
        throughput["controller_token_bytes"] = token_bytes - self.token_bytes_before
        self.token_bytes_before = token_bytes
        if self.run.policy.router_replay.enabled:
            throughput["routed_experts_bytes"] = sum(sample.routed_experts_bytes for sample in generated)
        is_frozen = self.run.policy.adapters.enabled
        train_flops = num_passes * self.flops.train((sample.length for sample in trained), is_frozen=is_frozen)
        throughput |= flops_metrics(train_flops, seconds["policy_training"], training, self.policy.peak_flops)
        self.record("performance", throughput)

    @property
    def could_overlap(self) -> bool:
        """Whether training and generation have something of their own to work on, or with."""
        is_apart = self.generation_phase != "generation" or not self.run.policy.generation.colocated.enabled
        return is_apart and self.generation is not None

    # -- validation

    def validate(self) -> dict[str, float]:
        """Play the validation prompts with `val_*` sampling; the same prompts and seeds every time."""
        rollout = self.run.rollout
        num = rollout.val_num_generations_per_prompt
        requests = [
            GroupRequest(
                group_id=f"validation/{self.state.total_steps}/{position}/{prompt.prompt_id}",
                prompt=prompt,
                num_generations=num,
                sampling=self.val_sampling,
                seed_step=VALIDATION_SEED_STEP,
            )
            for position, prompt in enumerate(self.validation_prompts)
        ]
        groups: list[GroupHandle] = []
        for start in range(0, len(requests), rollout.val_batch_size):
            groups += self.rollouts.collect(requests[start : start + rollout.val_batch_size])
        self.check_failures(groups)
        num_shown = self.run.logger.num_val_samples_to_print
        if num_shown > 0:
            shown = groups[:num_shown]
            self.tools.console.show_samples(
                [self.rollouts.messages(group) for group in shown],
                [group.samples[0].reward for group in shown],
                num_samples=num_shown,
                title=f"validation after step {self.state.total_steps}",
            )
        self.rollouts.generation_use()  # is not that of the next step
        tasks = list(dict.fromkeys(prompt.task_name for prompt in self.validation_prompts))
        return (
            validation_metrics(groups, k_values=rollout.val_k_values)
            | self.rollouts.environment_metrics(groups)
            | task_validation_metrics(groups, tasks, k_values=rollout.val_k_values)
        )

    # -- state

    def write_state(self, directory: Path) -> StateWrite:
        if self.recorder is not None:
            self.recorder.finish()  # a run that resumes from a checkpoint finds all steps before it recorded
        return super().write_state(directory)

    def abandon_requests(self) -> None:
        """Have the engines forget what they were asked: nobody waits for it any more."""
        if self.generation is not None:
            self.generation.abandon_requests()

    def restart_generation(self) -> list[Any]:
        """After an engine died: start it again and give every engine the policy's weights. Returns the new workers."""
        assert self.generation is not None, "what is recorded needs no engines"
        for index in self.generation.dead_workers():
            self.generation.restart_worker(index)
        self.generation.abandon_requests()
        self.refit.sync(self.version)
        return self.generation.workers

    def recover(self, error: WorkerDied) -> None:
        """After a policy worker died: a new group in its place, attached to the engines again if it was the policy.

        After the keeper of finished groups was lost: a new one, without groups.
        """
        if error.is_of(KEEPER):
            self.rollouts.replace_keeper()
            return
        super().recover(error)
        if error.is_of(self.policy.name_prefix):
            self.rollouts.abandon()  # a policy whose workers generate dies while groups are played
            self.refit.prepare()

    def read_state(self, directory: Path) -> None:
        super().read_state(directory)
        self.batches = self.remaining_batches()
        self.version = self.state.total_steps
        self.refit.sync(self.version)
        self.read_buffer(directory / BUFFER_FOLDER)

    def read_buffer(self, folder: Path) -> None:
        """Groups that a run which samples beside training had open. A run that does not cannot take them over."""
        if folder.is_dir() and json.loads((folder / OPEN_GROUPS).read_text()):
            raise CheckpointError(
                f"{folder.parent} was written by an asynchronous run and holds groups that were not trained yet: "
                f"set {self.run.section}.async_grpo.enabled=true, or take another checkpointing.checkpoint_dir"
            )

"""What algorithms that sample share: rollouts, the sync of weights, validation by generation, the report of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.metrics import flops_metrics, performance_metrics, rollout_metrics, validation_metrics
from nemo_rl.algorithms.policy_trainer import PolicyTrainer
from nemo_rl.algorithms.rollout_batch import Batching, packing_metrics, token_imbalance
from nemo_rl.algorithms.rollout_config import RolloutMasterConfig
from nemo_rl.algorithms.trainer import DataExhausted, RunTools, Schedule
from nemo_rl.data.dataloader import PromptDataLoader
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.refit import Refit
from nemo_rl.rollouts.collector import GroupRequest, RolloutCollector
from nemo_rl.types import BatchPlan, GroupHandle, Prompt, SampleStatus, SamplingParams

MAX_REASONS_SHOWN = 3
VALIDATION_SEED_STEP = -1  # every validation draws with the same seeds, so that its curve moves only with the weights


class TooManyFailures(RuntimeError):
    """More episodes failed than `max_failed_sample_fraction` allows."""


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What a run that samples is made of."""

    policy: PolicyInterface
    generation: GenerationInterface
    refit: Refit
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
        self.token_bytes_before = 0
        self.generated: list[GroupHandle] = []  # of the step in progress, with what dynamic sampling discards
        self.rollouts.restart_generation = self.restart_generation

    def start(self) -> None:
        """Resume, or give generation its first weights: engines are built empty, and filled from the policy."""
        if not self.resume():
            self.refit.sync(0)

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

    def collect(self, prompts: Sequence[Prompt]) -> list[GroupHandle]:
        """Play one batch of prompts. Raises when too many of its episodes have no outcome."""
        # One number per batch drawn: with dynamic sampling a prompt may come again within a step, and draws anew.
        batch = self.prompts.epoch * len(self.prompts) + self.prompts.batches_done
        requests = [
            GroupRequest(
                group_id=f"{batch}/{position}/{prompt.prompt_id}",
                prompt=prompt,
                num_generations=self.run.rollout.num_generations_per_prompt,
                sampling=self.train_sampling,
                seed_step=batch,
            )
            for position, prompt in enumerate(prompts)
        ]
        groups = self.rollouts.collect(requests)
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
        failed = [sample for sample in samples if sample.status is SampleStatus.FAILED]
        reasons = "\n".join(sorted({str(sample.failure) for sample in failed})[:MAX_REASONS_SHOWN])
        if failed:
            self.tools.console.warn(f"{len(failed)} of {len(samples)} episodes failed:\n{reasons}")
        if len(failed) > self.run.rollout.max_failed_sample_fraction * len(samples):
            limit = f"{self.run.section}.max_failed_sample_fraction={self.run.rollout.max_failed_sample_fraction}"
            raise TooManyFailures(f"{len(failed)} of {len(samples)} episodes failed, more than {limit}:\n{reasons}")

    # -- the end of a step

    def load_plan(self, plan: BatchPlan) -> BatchPlan:
        """The workers fetch the rows of their part of `plan`."""
        self.record("train", packing_metrics(plan, self.batching))
        with self.phase("data_processing"):
            self.policy.load(plan)
        return plan

    def sync_weights(self, version: int) -> None:
        """Policy weights -> generation weights, verified by fingerprints. Version n is that after n steps."""
        with self.phase("weight_sync"):
            try:
                self.refit.sync(version)
            except WorkerError as error:
                if not (error.engine_died or error.worker.startswith(self.generation.name_prefix)):
                    raise
                self.tools.console.warn(f"{first_line(error)}; the engine is started again")
                self.rollouts.use_generation(self.restart_generation(version))

    def report(self, trained_groups: Sequence[GroupHandle], plan: BatchPlan, *, num_passes: int = 1) -> None:
        """What is known of the step from metadata, and what the environments say of it.

        Rollouts are judged by everything that was generated, throughput of training by what was trained on, in
        `num_passes` over it.
        """
        generated = [sample for handle in self.generated for sample in handle.samples]
        trained = [sample for group in trained_groups for sample in group.samples]
        self.state.consumed_samples += len(generated)
        self.record("train", self.rollouts.environment_metrics(self.generated))
        self.record("train", rollout_metrics(self.generated, current_weight_version=self.state.total_steps))
        num_failed = sum(sample.status is SampleStatus.FAILED for sample in generated)
        num_tokens = sum(sample.length for sample in trained)
        self.record("train", {"num_failed_samples": num_failed, "total_num_tokens": num_tokens})
        seconds = self.timer.get_timing_metrics("sum")
        workers = self.run.cluster.num_workers
        seconds["total_step_time"] = sum(seconds.values())
        valid_tokens = self.metrics["train/global_valid_toks"]
        self.record(
            "timing/train", {"valid_tokens_per_sec_per_gpu": valid_tokens / seconds["total_step_time"] / workers}
        )
        throughput = performance_metrics(
            seconds,
            num_samples=len(trained),
            num_tokens=num_tokens,
            num_generated_tokens=sum(sample.num_generated_tokens for sample in generated),
            num_training_devices=workers,
            num_generation_devices=workers,
            colocated=True,
        )
        token_bytes = self.policy.controller_tensor_bytes + self.rollouts.controller_tensor_bytes
        throughput["average_token_imbalance"] = token_imbalance(plan)
        throughput["controller_token_bytes"] = token_bytes - self.token_bytes_before
        self.token_bytes_before = token_bytes
        is_frozen = self.run.policy.dtensor_cfg.lora_cfg.enabled
        train_flops = num_passes * self.flops.train((sample.length for sample in trained), is_frozen=is_frozen)
        throughput |= flops_metrics(train_flops, seconds["policy_training"], workers, self.policy.peak_flops)
        self.record("performance", throughput)

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
        return validation_metrics(groups, k_values=rollout.val_k_values) | self.rollouts.environment_metrics(groups)

    # -- state

    def restart_generation(self, version: int | None = None) -> list[Any]:
        """After an engine died: start it again and give every engine the policy's weights. Returns the new workers.

        `version` of the weights defaults to that after the last finished step.
        """
        for index in self.generation.dead_workers():
            self.generation.restart_worker(index)
        self.generation.abandon_requests()
        self.refit.sync(self.state.total_steps if version is None else version)
        return self.generation.workers

    def recover(self, error: WorkerDied) -> None:
        """After a policy worker died: a new group in its place, attached to the engines again if it was the policy."""
        super().recover(error)
        if error.is_of(self.policy.name_prefix):
            self.refit.prepare()

    def read_state(self, directory: Path) -> None:
        super().read_state(directory)
        self.batches = self.remaining_batches()
        self.refit.sync(self.state.total_steps)

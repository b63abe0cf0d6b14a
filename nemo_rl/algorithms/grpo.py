"""GRPO: sample groups of answers, reward them, prefer what is better than the group (arXiv 2402.03300).

One step is `GRPOTrainer.step`; each of its statements is a phase, and each phase a method below it. `grpo_setup.py`
builds the parts. Nothing here knows which backend trains or generates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.advantages import AdvantageResult, KLInReward, compute_advantages
from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.metrics import flops_metrics, performance_metrics, rollout_metrics, validation_metrics
from nemo_rl.algorithms.rewards import DynamicSampler, ScoredGroup, score_groups
from nemo_rl.algorithms.rollout_batch import Batching, packing_metrics, plan_batch, token_imbalance
from nemo_rl.algorithms.trainer import DataExhausted, RunTools, Schedule, Trainer
from nemo_rl.data.dataloader import PromptDataLoader
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.head_tasks import Logprobs
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.refit import Refit
from nemo_rl.rollouts.collector import GroupRequest, RolloutCollector
from nemo_rl.types import BatchPlan, GroupHandle, Prompt, SampleStatus, SamplingParams
from nemo_rl.utils.checkpoint import require_optimizer
from nemo_rl.utils.checkpoint_save import StateWrite

DATALOADER_STATE = "train_dataloader.pt"
MAX_REASONS_SHOWN = 3
VALIDATION_SEED_STEP = -1  # every validation draws with the same seeds, so that its curve moves only with the weights


class TooManyFailures(RuntimeError):
    """More episodes failed than `grpo.max_failed_sample_fraction` allows."""


class NonFiniteLoss(RuntimeError):
    """A loss or gradient was not finite and `policy.nonfinite_action` is `stop`."""


class GRPOTrainer(Trainer):
    """See the module."""

    def __init__(
        self,
        config: GRPOMasterConfig,
        tools: RunTools,
        *,
        policy: PolicyInterface,
        generation: GenerationInterface,
        refit: Refit,
        rollouts: RolloutCollector,
        prompts: PromptDataLoader,
        validation_prompts: Sequence[Prompt],
        train_sampling: SamplingParams,
        val_sampling: SamplingParams,
        flops: ModelFlops,
    ) -> None:
        grpo = config.grpo
        num_steps = min(grpo.max_num_steps, grpo.max_num_epochs * len(prompts))
        super().__init__(
            Schedule(
                num_steps=num_steps,
                val_period=grpo.val_period,
                val_at_start=grpo.val_at_start,
                val_at_end=grpo.val_at_end,
            ),
            tools,
        )
        self.config = config
        # swappable parts
        self.policy = policy
        self.generation = generation
        self.refit = refit
        self.rollouts = rollouts
        self.prompts = prompts
        self.batches = self.remaining_batches()
        self.validation_prompts = validation_prompts
        self.loss_fn = ClippedPGLoss(config.loss_fn)
        # run-time
        self.train_sampling = train_sampling
        self.val_sampling = val_sampling
        self.sampler = DynamicSampler(grpo)
        self.uses_reference = not grpo.skip_reference_policy_logprobs_calculation
        # With one optimizer step, the forward pass of training gives the previous logprobs.
        self.needs_previous_logprobs = (
            grpo.num_samples_per_step > config.policy.train_global_batch_size
            or grpo.seq_logprob_error_threshold is not None
            or config.loss_fn.use_kl_in_reward
            # The forward pass of training drops out adapter inputs, the one that sampled did not.
            or config.policy.dtensor_cfg.lora_cfg.dropout > 0
        )
        self.flops = flops
        self.batching = Batching.of(config.policy, quadratic_weight=flops.quadratic_weight)
        self.token_bytes_before = 0
        self.generated: list[GroupHandle] = []  # of the step in progress, with what dynamic sampling discards
        self.rollouts.restart_generation = self.restart_generation

    def start(self) -> None:
        """Resume, or give generation its first weights: engines are built empty, and filled from the policy."""
        if not self.resume():
            self.refit.sync(0)

    def step(self) -> None:
        groups = self.rollout()
        advantages = self.estimate_advantages(groups)
        plan = self.plan(groups, advantages)
        self.score()
        self.update()
        self.sync_weights(self.state.total_steps + 1)
        self.report(groups, plan)

    # -- the phases, in order

    def rollout(self) -> list[ScoredGroup]:
        """Prompts -> finished, rewarded groups; with dynamic sampling, until enough of them have reward variance."""
        self.generated = []
        with self.phase("generation"):
            if not self.config.grpo.use_dynamic_sampling:
                return score_groups(self.collect(self.next_prompts()), self.config.grpo)
            while not self.sampler.is_complete:
                self.sampler.add(score_groups(self.collect(self.next_prompts()), self.config.grpo))
            groups, metrics = self.sampler.take()
        self.record("train", metrics)
        return groups

    def remaining_batches(self) -> Iterator[list[Prompt]]:
        """Batches of prompts from where the data loader stands to the end of the last epoch."""
        while self.prompts.epoch < self.config.grpo.max_num_epochs:
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
                num_generations=self.config.grpo.num_generations_per_prompt,
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
            limit = self.config.data.max_input_seq_length
            text = f"prompts longer than data.max_input_seq_length={limit}: {', '.join(too_long[:8])}"
            if len(too_long) == len(groups):
                raise ValueError(f"all {text}; raise it and policy.max_total_sequence_length, or shorten the prompts")
            self.tools.console.warn(f"{len(too_long)} {text}; they are left out")
        failed = [sample for sample in samples if sample.status is SampleStatus.FAILED]
        reasons = "\n".join(sorted({str(sample.failure) for sample in failed})[:MAX_REASONS_SHOWN])
        if failed:
            self.tools.console.warn(f"{len(failed)} of {len(samples)} episodes failed:\n{reasons}")
        if len(failed) > self.config.grpo.max_failed_sample_fraction * len(samples):
            raise TooManyFailures(
                f"{len(failed)} of {len(samples)} episodes failed, more than grpo.max_failed_sample_fraction="
                f"{self.config.grpo.max_failed_sample_fraction}:\n{reasons}"
            )

    def estimate_advantages(self, groups: Sequence[ScoredGroup]) -> AdvantageResult:
        """Rewards by group -> advantages."""
        with self.phase("advantage_calculation"):
            result = compute_advantages(
                [group.for_estimator() for group in groups],
                self.config.grpo.adv_estimator,
                kl_in_reward=self.config.loss_fn.use_kl_in_reward,
            )
        self.record("train", result.metrics)
        return result

    def plan(self, groups: Sequence[ScoredGroup], advantages: AdvantageResult) -> BatchPlan:
        """Which sample in which rank, optimizer step and micro-batch; the workers fetch their rows."""
        plan = plan_batch(
            [group.handle for group in groups],
            advantages.advantages,
            [group.masks for group in groups],
            num_ranks=self.policy.data_parallel_size,
            global_batch_size=self.config.policy.train_global_batch_size,
            batching=self.batching,
            micro_batch_multiple=self.config.policy.dtensor_cfg.micro_batch_multiple,
        )
        self.record("train", packing_metrics(plan, self.batching))
        with self.phase("data_processing"):
            self.policy.load(plan)
        return plan

    def score(self) -> None:
        """Previous and reference logprobs, kept with the samples on the workers, and what follows from them."""
        loss, grpo = self.config.loss_fn, self.config.grpo
        if self.needs_previous_logprobs or self.uses_reference:
            with self.phase("policy_and_reference_logprobs"):
                if self.needs_previous_logprobs:
                    self.policy.compute(Logprobs(), "prev_logprobs")
                if self.uses_reference:
                    self.policy.compute_reference_logprobs()
        if grpo.seq_logprob_error_threshold is not None:
            self.record("train", self.policy.mask_mismatched(grpo.seq_logprob_error_threshold))
        if loss.use_kl_in_reward:
            self.policy.set_token_advantages(KLInReward(loss, grpo.adv_estimator.eps))

    def update(self) -> None:
        """The optimizer steps. A loss or gradient that is not finite is written down, then skipped or raised."""
        step = self.state.total_steps + 1
        with self.phase("policy_training"):
            result = self.policy.train(self.loss_fn, Logprobs())
        if result.nonfinite_samples:
            records = [{"step": step, "sample_id": sample} for sample in result.nonfinite_samples]
            path = self.tools.logger.log_records(records, f"nonfinite_step_{step}.jsonl")
            text = f"step {step}: loss {result.losses[-1]}, gradient norm {result.grad_norms[-1]}; samples in {path}"
            if self.config.policy.nonfinite_action == "stop":
                raise NonFiniteLoss(f"{text}. policy.nonfinite_action=skip would go on without this update")
            self.tools.console.warn(text)
        self.state.total_valid_tokens += int(result.metrics["global_valid_toks"])
        self.record("train", result.metrics)
        self.record(
            "train",
            {
                "grad_norm": math.fsum(result.grad_norms) / len(result.grad_norms),
                "lr": result.learning_rates[-1],
                "num_skipped_steps": result.num_skipped_steps,
            },
        )

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

    def report(self, groups: Sequence[ScoredGroup], plan: BatchPlan) -> None:
        """What is known of the step from metadata, and what the environments say of it.

        Rollouts are judged by everything that was generated, throughput of training by what was trained on.
        """
        generated = [sample for handle in self.generated for sample in handle.samples]
        trained = [sample for group in groups for sample in group.handle.samples]
        self.state.consumed_samples += len(generated)
        self.record("train", self.rollouts.environment_metrics(self.generated))
        self.record("train", rollout_metrics(self.generated, current_weight_version=self.state.total_steps))
        num_failed = sum(sample.status is SampleStatus.FAILED for sample in generated)
        num_tokens = sum(sample.length for sample in trained)
        self.record("train", {"num_failed_samples": num_failed, "total_num_tokens": num_tokens})
        seconds = self.timer.get_timing_metrics("sum")
        workers = self.config.cluster.num_workers
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
        is_frozen = self.config.policy.dtensor_cfg.lora_cfg.enabled
        train_flops = self.flops.train((sample.length for sample in trained), is_frozen=is_frozen)
        throughput |= flops_metrics(train_flops, seconds["policy_training"], workers, self.policy.peak_flops)
        self.record("performance", throughput)

    # -- validation

    def validate(self) -> dict[str, float]:
        """Play the validation prompts with `val_*` sampling; the same prompts and seeds every time."""
        grpo = self.config.grpo
        num = grpo.val_num_generations_per_prompt
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
        for start in range(0, len(requests), grpo.val_batch_size):
            groups += self.rollouts.collect(requests[start : start + grpo.val_batch_size])
        self.check_failures(groups)
        num_shown = self.config.logger.num_val_samples_to_print
        if num_shown > 0:
            shown = groups[:num_shown]
            self.tools.console.show_samples(
                [self.rollouts.messages(group) for group in shown],
                [group.samples[0].reward for group in shown],
                num_samples=num_shown,
                title=f"validation after step {self.state.total_steps}",
            )
        return validation_metrics(groups, k_values=grpo.val_k_values) | self.rollouts.environment_metrics(groups)

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
        """After a policy worker died: a new group in its place, attached to the engines again."""
        if not error.worker.startswith(self.policy.name_prefix):
            raise error
        self.policy.restart()
        self.refit.prepare()

    def write_state(self, directory: Path) -> None:
        torch.save(self.prompts.state_dict(), directory / DATALOADER_STATE)
        self.policy.save_checkpoint(directory, **self.save_options())

    def start_write_state(self, directory: Path) -> StateWrite:
        torch.save(self.prompts.state_dict(), directory / DATALOADER_STATE)
        return self.policy.start_save_checkpoint(directory, **self.save_options())

    def save_options(self) -> dict[str, Any]:
        """How `checkpointing` wants the policy written."""
        checkpointing = self.tools.checkpointing
        return {
            "save_optimizer": checkpointing.save_optimizer,
            "save_consolidated": checkpointing.save_consolidated,
            "model_save_format": checkpointing.model_save_format or "torch_save",
        }

    def read_state(self, directory: Path) -> None:
        require_optimizer(directory)
        self.policy.load_checkpoint(directory, load_optimizer=True)
        self.prompts.load_state_dict(torch.load(directory / DATALOADER_STATE, weights_only=True))
        self.batches = self.remaining_batches()
        self.sampler = DynamicSampler(self.config.grpo)  # what it had collected is sampled again
        self.refit.sync(self.state.total_steps)

"""The shared part of algorithms that sample: rollouts, weight syncs, validation by generation, report of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.config.rollout import RolloutMasterConfig, ScoredRolloutConfig
from nemo_rl.algorithms.loop import RunTools, Trainer
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.algorithms.plan.rewards import ScoredGroup, sample_until_full, score_groups
from nemo_rl.algorithms.recovery import RolloutRecovery
from nemo_rl.algorithms.trainers.disagreement import Sides, look_into
from nemo_rl.algorithms.trainers.group_sources import (
    BUFFER_FOLDER,
    GroupSource,
    PromptRequests,
    TooManyFailures,
    check_failures,
)
from nemo_rl.algorithms.trainers.metrics import (
    DraftMeter,
    agent_metrics,
    by_task,
    flops_metrics,
    idle_verdict,
    measure_packing,
    performance_metrics,
    rollout_metrics,
    turn_metrics,
    turn_seconds,
    validation_metrics,
)
from nemo_rl.data.rows.dataloader import PromptDataLoader
from nemo_rl.distributed.errors import WorkerError
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.flops import EXPECTED, IDEAL, Layout, ModelFlops, Work, predict
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, LogprobsTwice
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.refit.sync import WeightSync
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import BatchPlan, GroupHandle, LossFunction, Prompt, SamplingParams, TrainResult
from nemo_rl.utils.checkpoint.save import StateWrite

if TYPE_CHECKING:
    from nemo_rl.algorithms.parts.server import EngineServer
    from nemo_rl.algorithms.trainers.rollout_recorder import RolloutRecorder

TOKEN_ERROR, SAMPLE_ERROR = "token_mult_prob_error", "sample_mult_prob_error_max"
VALIDATION_SEED_STEP = -1  # every validation draws with the same seeds, so that its curve moves only with the weights


def policy_gradient_task(policy: RolloutPolicyConfig, loss: LossFunction) -> HeadTask:
    """The head task of a policy gradient: with filters, our KL penalty needs logprobs without them, too."""
    has_kl = isinstance(loss, ClippedPGLoss) and loss.cfg.reference_policy_kl_penalty > 0
    return LogprobsTwice() if policy.generation.is_filtered and has_kl else Logprobs()


def good_rows(groups: Sequence[ScoredGroup], loss: ClippedPGLossConfig) -> list[list[bool]] | None:
    """The rows whose likelihood the loss raises; None if it does not."""
    return [group.good_rows for group in groups] if loss.positive_example_nll_weight > 0 else None


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """The components of a run that samples."""

    policy: Policy
    generation: GenerationInterface | None  # None: the rollouts are recorded ones
    refit: WeightSync
    rollouts: RolloutCollector
    prompts: PromptDataLoader
    validation_prompts: Sequence[Prompt]
    train_sampling: SamplingParams
    val_sampling: SamplingParams
    flops: ModelFlops
    server: EngineServer | None = None  # offers the engines to agents outside of the run


class RolloutTrainer(Trainer):
    """A `Trainer` whose samples come from the policy itself. Subclasses implement `step`.

    `others` are further policies that are trained and saved with the first.
    """

    def __init__(
        self,
        config: RolloutMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        others: Sequence[Policy] = (),
    ) -> None:
        requests = PromptRequests(parts.prompts, config.rollout, parts.train_sampling)
        recovery = RolloutRecovery(
            [parts.policy, *others],
            parts.generation,
            parts.refit,
            parts.rollouts,
            tools.console,
            on_new_engines=parts.server.use_engines if parts.server is not None else None,
        )
        super().__init__(
            config.rollout,
            tools,
            num_steps=requests.num_steps,
            policies=[parts.policy, *others],
            data=parts.prompts,
            nonfinite_action=config.policy.nonfinite_action,
            recovery=recovery,
        )
        self.config = config
        self.recovery: RolloutRecovery = recovery
        self.policy = parts.policy
        self.generation = parts.generation
        self.refit = parts.refit
        self.rollouts = parts.rollouts
        self.server = parts.server
        self.requests = requests
        self.source = GroupSource(requests, parts.rollouts)
        self.validation_prompts = parts.validation_prompts
        self.val_sampling = parts.val_sampling
        self.flops = parts.flops
        self.batching = Batching.of(config.policy, **parts.flops.cost_weights)
        self.token_bytes_before = 0
        self.disagrees = False  # training and generation, in the last step
        self.generated: list[GroupHandle] = []  # of the step in progress, discarded ones included
        self.environment_metrics: Callable[[], dict[str, float]] = dict  # of `generated`; waits for them
        self.rollout_recorder: RolloutRecorder | None = None
        if config.rollout.rollout_record.enabled:
            from nemo_rl.algorithms.trainers.rollout_recorder import RolloutRecorder

            self.rollout_recorder = RolloutRecorder(config, tools, parts.rollouts)
        self.drafts: DraftMeter | None = None
        if parts.generation is not None and config.policy.generation.speculation:
            self.drafts = DraftMeter(parts.generation)

    def start(self) -> None:
        """Resume, or give generation its first weights: engines start empty and are filled from the policy."""
        if self.source.overlaps_training:
            self.policy.while_waiting(self.rollouts.poll)
        if not self.resume():
            self.recovery.sync(0)
        if self.server is not None:
            self.server.open()
        self.rollouts.generation_use()  # resets the meter: the time until now does not count
        self.source.after_sync(self.state.total_steps)

    def train(self) -> None:
        super().train()
        if self.rollout_recorder is not None:
            self.rollout_recorder.end()

    # -- phases that algorithms share

    def sample(self) -> list[GroupHandle]:
        """Prompts -> finished groups: the first batch of this step."""
        self.generated = []
        with self.phase(self.source.phase):
            return self.next_groups()

    def scored_groups(self, cfg: ScoredRolloutConfig) -> list[ScoredGroup]:
        """Prompts -> finished groups with rewards; with dynamic sampling, until enough groups have unequal rewards."""
        if not cfg.use_dynamic_sampling:
            return score_groups(self.sample(), cfg)
        self.generated = []
        with self.phase(self.source.phase):
            groups, metrics = sample_until_full(lambda: score_groups(self.next_groups(), cfg), cfg)
        self.record("train", metrics)
        return groups

    def next_groups(self) -> list[GroupHandle]:
        """The next batch of groups of this step. Raises when too many of its episodes have no outcome."""
        groups = self.source.next_groups(self.state.total_steps + 1, is_first=not self.generated)
        self.check_failures(groups)
        self.generated += groups
        return groups

    def plan_and_load(
        self,
        groups: Sequence[GroupHandle],
        advantages: Sequence[Sequence[float]],
        masks: Sequence[Sequence[float]],
        *,
        rewards: Sequence[Sequence[float]] | None = None,
        good: Sequence[Sequence[bool]] | None = None,
        only_advantages_teach: bool = False,
        will_sync: bool = True,
    ) -> BatchPlan:
        """Plan which sample goes to which rank, optimizer step and micro-batch; the policy's workers fetch their rows.

        The arguments are as in `plan_batch`: mask 0 keeps a row out of the loss.
        `will_sync`: new weights follow before generation samples again, so engines that make room need not keep theirs.
        """
        self.environment_metrics = self.rollouts.environment_metrics(self.generated)  # environments now have time
        if will_sync:
            self.refit.announce()
        plan = plan_batch(
            groups,
            advantages,
            masks,
            rewards=rewards,
            good=good,
            only_advantages_teach=only_advantages_teach,
            num_ranks=self.policy.data_parallel_size,
            global_batch_size=self.config.policy.train_global_batch_size,
            batching=self.batching,
        )
        self.packing = measure_packing(plan, self.batching)
        self.record("train", self.packing.metrics())
        if self.tools.recorder is not None:
            self.tools.recorder.choose_samples(plan, groups)
        with self.phase("data_processing"):
            try:
                self.policy.load(plan)
            except WorkerError as error:
                self.rollouts.raise_if_keeper_lost(error)
                raise
        return plan

    def sync_weights(self) -> None:
        """Policy weights -> generation weights, verified by fingerprints. Version n is after n steps."""
        version = self.state.total_steps + 1
        if self.source.pauses_for_sync:
            with self.phase("wait_for_rollouts"):
                self.rollouts.wait_all()
        self.record("train", self.source.before_sync())
        with self.phase("weight_sync"):
            self.recovery.sync(version)
        self.source.after_sync(version)

    def report(
        self, trained_groups: Sequence[GroupHandle], plan: BatchPlan, trained: TrainResult, *, num_passes: int = 1
    ) -> None:
        """Metrics of the step from metadata and from the environments.

        Rollout metrics cover all generated samples, and the throughput of training the trained ones. `trained`: of
        the optimizer steps. `num_passes`: passes of training over the plan; 0 if the step did not train the policy.
        """
        generated = [sample for handle in self.generated for sample in handle.samples]
        rows = [row for group in trained_groups for row in group.rows]
        self.state.consumed_samples += len(generated)
        environment_metrics, self.environment_metrics = self.environment_metrics(), dict  # it held the groups
        self.record("train", environment_metrics)
        version, run = self.state.total_steps, self.config
        of_rollouts = partial(rollout_metrics, current_weight_version=version)
        sampled = of_rollouts(self.generated)
        self.record("train", sampled)
        tasks = self.requests.prompts.dataset.task_names
        self.record("train", by_task(of_rollouts, self.generated, tasks, metric_names.TASK))
        self.record("train", turn_metrics(generated, max_turns=run.rollout.max_rollout_turns))
        if run.has_agents:
            self.record("train", agent_metrics(generated))
        self.record("performance", turn_seconds([row for sample in generated for row in sample.rows]))
        if self.drafts is not None:
            self.record("train", self.drafts.metrics())
        num_failed = sum(sample.status.is_failure for sample in generated)
        num_tokens = sum(row.length for row in rows)
        self.record("train", {"num_failed_samples": num_failed, "total_num_tokens": num_tokens})

        seconds = self.timer.get_timing_metrics("sum")
        seconds["total_step_time"] = step_s = sum(seconds.values())
        num_training = run.training_cluster.num_workers
        valid_tokens_per_s = trained.num_valid_tokens / step_s
        self.record("timing/train", {"valid_tokens_per_sec_per_gpu": valid_tokens_per_s / run.cluster.num_workers})
        throughput = performance_metrics(
            seconds,
            self.rollouts.generation_use(),
            num_samples=sum(len(group.samples) for group in trained_groups),
            num_tokens=num_tokens,
            num_devices=run.cluster.num_workers,
            num_training_devices=num_training,
            num_generation_devices=run.generation_cluster.num_workers,
        )
        can_overlap = self.source.overlaps_training or not run.policy.generation.colocated.enabled
        if can_overlap and self.generation is not None:
            self.tools.console.remark(idle_verdict(throughput))
        if self.rollout_recorder is not None:
            throughput |= self.rollout_recorder.record(
                version + 1, self.generated, trained_groups, plan, environment_metrics, weight_version=version
            )
        if self.tools.recorder is not None:
            self.tools.recorder.groups(version + 1, self.generated, trained_groups, plan)
        token_bytes = self.policy.controller_tensor_bytes + self.rollouts.controller_tensor_bytes
        throughput["average_token_imbalance"] = self.packing.token_imbalance
        throughput["controller_token_bytes"] = token_bytes - self.token_bytes_before
        self.token_bytes_before = token_bytes
        if run.policy.router_replay.enabled:
            throughput["routed_experts_bytes"] = sum(
                row.routed_experts_bytes for sample in generated for row in sample.rows
            )
        if num_passes:
            # Once for each group: the tower repeats an image only where the group is in several micro-batches.
            seen = ({k: n for row in group.rows for k, n in row.images.items()} for group in trained_groups)
            train_flops = num_passes * self.flops.train(
                [row.length for row in rows],
                [num_pixels for images in seen for num_pixels in images.values()],
                has_adapters=run.policy.adapters.enabled,
                shared_tokens=self.packing.shared_prompt_tokens,
                forward_only_share=self.packing.forward_only_share,
            )
            throughput |= flops_metrics(train_flops, seconds["policy_training"], num_training, self.policy.gpu)
        self.record("performance", throughput)

        self.look_into_disagreement(trained_groups, trained, oldest_lag=sampled["weight_version_lag/max"])

    def compare_with_prediction(
        self, groups: Sequence[GroupHandle], has_logprob_pass: bool, has_reference_pass: bool
    ) -> None:
        """Predicted and ideal seconds of the phases that this step timed, for GPUs whose rates are known.

        The policy and the reference policy have forward passes besides training if the step computed their logprobs.
        """
        if self.policy.gpu is None:
            return
        rows = [row for group in groups for row in group.rows]
        lengths = [row.length for row in rows]
        work = Work(
            lengths=lengths,
            generated=[row.num_generated_tokens for row in rows],
            prompts=len(groups),
            logprob_passes=has_logprob_pass + has_reference_pass,
            reference_passes=int(has_reference_pass),
            forward_only_share=self.packing.forward_only_share,
        )
        training, generation = self.config.training_cluster.num_workers, self.config.generation_cluster.num_workers
        layout = Layout.of(self.config.policy, self.flops, training, generation, sum(lengths))
        timed = self.timer.get_timing_metrics("sum")
        for name, assumed in (("predicted_s", EXPECTED), ("ideal_s", IDEAL)):
            phases = predict(self.flops, self.policy.gpu, layout, work, assumed)
            self.record("performance", {f"{name}/{phase}": s for phase, s in phases.items() if phase in timed})

    def look_into_disagreement(self, groups: Sequence[GroupHandle], trained: TrainResult, *, oldest_lag: float) -> None:
        """Name the cause when training and generation begin to disagree by more than `logger.alarms` allows.

        `oldest_lag`: weight updates since the oldest sample of the step.
        """
        alarms = self.config.logger.alarms
        limits = {TOKEN_ERROR: alarms.disagreement, SAMPLE_ERROR: alarms.sample_disagreement}
        errors = {name: trained.metrics.get(name, 1.0) for name in limits}  # absent if the policy was not trained
        is_high = any(limit is not None and not errors[name] <= limit for name, limit in limits.items())
        # Samples of older weights than those trained have other probabilities by design.
        is_by_design = oldest_lag > 0 and max(errors.values()) < math.inf
        is_high = is_high and not is_by_design
        is_new, self.disagrees = is_high and not self.disagrees, is_high
        if not alarms.enabled or not is_new or self.generation is None:
            return
        self._write_samples()  # an investigation loads other rows
        with self.phase("investigation"):
            look_into(
                self.sides(),
                groups,
                step=self.state.total_steps + 1,
                console=self.tools.console,
                run_logger=self.tools.logger,
            )

    def sides(self) -> Sides:
        """Training and generation with their present weights."""
        assert self.generation is not None, "recorded rollouts need no engines"
        return Sides(
            policy=self.policy,
            generation=self.generation,
            refit=self.refit,
            rollouts=self.rollouts,
            version=self.recovery.version,
            sampling=self.requests.sampling,
            val_sampling=self.val_sampling,
        )

    def check_failures(self, groups: Sequence[GroupHandle]) -> None:
        """See `group_sources.check_failures`. Raises for weights that are not finite instead, if they are the cause."""
        try:
            check_failures(groups, self.config, self.tools.console)
        except TooManyFailures:
            self.policy.inspect_weights()
            raise

    # -- validation

    def validate(self) -> dict[str, float]:
        """Play the validation prompts with `val_*` sampling; the same prompts and seeds every time."""
        rollout = self.config.rollout
        requests = [
            GroupRequest(
                group_id=f"validation/{self.state.total_steps}/{position}/{prompt.prompt_id}",
                prompt=prompt,
                num_generations=rollout.val_num_generations_per_prompt,
                sampling=self.val_sampling,
                seed_step=VALIDATION_SEED_STEP,
            )
            for position, prompt in enumerate(self.validation_prompts)
        ]
        groups: list[GroupHandle] = []
        for start in range(0, len(requests), rollout.val_batch_size):
            groups += self.rollouts.collect(requests[start : start + rollout.val_batch_size])
        self.check_failures(groups)
        num_shown = self.config.logger.num_val_samples_to_print
        if num_shown > 0:
            self.show_validation(groups[:num_shown])
        self.rollouts.generation_use()  # resets the meter: validation does not count for the next step
        tasks = list(dict.fromkeys(prompt.task_name for prompt in self.validation_prompts))
        of_validation = partial(validation_metrics, k_values=rollout.val_k_values)
        metrics = of_validation(groups) | self.rollouts.environment_metrics(groups)()
        return metrics | by_task(of_validation, groups, tasks)

    def show_validation(self, groups: Sequence[GroupHandle]) -> None:
        """Show and log the first sample of each group."""
        conversations = [samples[0] for samples in self.rollouts.conversations(groups)]
        rewards = [group.samples[0].reward for group in groups]
        step = self.state.total_steps
        self.tools.console.show_samples(conversations, rewards, title=f"validation after step {step}")
        rows = [
            {
                "prompt_id": group.prompt_id,
                "reward": reward,
                "conversation": "\n".join(f"{message['role']}: {message['content']}" for message in conversation),
            }
            for group, reward, conversation in zip(groups, rewards, conversations, strict=True)
        ]
        self.tools.logger.log_samples(rows, step)

    # -- state

    def write_state(self, directory: Path) -> StateWrite:
        if self.rollout_recorder is not None:
            self.rollout_recorder.finish()  # a run that resumes from a checkpoint finds all steps before it recorded
        self.source.write_state(directory / BUFFER_FOLDER)
        return super().write_state(directory)

    def resume(self) -> bool:
        is_resumed = super().resume()
        if self.rollout_recorder is not None:
            self.rollout_recorder.start(self.state.total_steps)
        return is_resumed

    def read_state(self, directory: Path) -> None:
        super().read_state(directory)
        self.requests.rewind()
        self.recovery.sync(self.state.total_steps)
        self.source.read_state(directory / BUFFER_FOLDER, self.state.total_steps)

"""GRPO: sample groups of answers, reward them, prefer what is better than the group (arXiv 2402.03300).

One step is `GRPOTrainer.step`; each of its statements is a phase, and each phase a method below it or, where other
algorithms have it too, in `rollout_trainer.py`. `grpo_setup.py` builds the parts. Nothing here knows which backend
trains or generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.advantages import AdvantageResult, KLInReward, compute_advantages
from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.rewards import DynamicSampler, ScoredGroup, score_groups
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import BatchPlan


class GRPOTrainer(RolloutTrainer):
    """See the module."""

    def __init__(self, config: GRPOMasterConfig, tools: RunTools, parts: RolloutParts) -> None:
        super().__init__(config, tools, parts)
        grpo = config.grpo
        self.config = config
        self.loss_fn = ClippedPGLoss(config.loss_fn)
        self.sampler = DynamicSampler(grpo)
        self.uses_reference = not grpo.skip_reference_policy_logprobs_calculation
        # With one optimizer step, the forward pass of training gives the previous logprobs.
        self.needs_previous_logprobs = (
            grpo.num_samples_per_step > config.policy.train_global_batch_size
            or grpo.seq_logprob_error_threshold is not None
            or config.loss_fn.use_kl_in_reward
            # The forward pass of training drops out adapter inputs, the one that sampled did not.
            or config.policy.adapters.dropout > 0
        )

    def step(self) -> None:
        groups = self.rollout()
        advantages = self.estimate_advantages(groups)
        plan = self.plan(groups, advantages)
        self.score()
        self.update()
        self.sync_weights(self.state.total_steps + 1)
        self.report([group.handle for group in groups], plan)

    # -- the phases, in order

    def rollout(self) -> list[ScoredGroup]:
        """Prompts -> finished, rewarded groups; with dynamic sampling, until enough of them have reward variance."""
        self.generated = []
        with self.phase(self.generation_phase):
            if not self.config.grpo.use_dynamic_sampling:
                return score_groups(self.next_groups(), self.config.grpo)
            while not self.sampler.is_complete:
                self.sampler.add(score_groups(self.next_groups(), self.config.grpo))
            groups, metrics = self.sampler.take()
        self.record("train", metrics)
        return groups

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
            micro_batch_multiple=self.config.policy.backend_cfg.micro_batch_multiple,
        )
        return self.load_plan(plan)

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
            self.record("train", self.policy.mask_sequences_by_importance(grpo.seq_logprob_error_threshold))
        if loss.use_kl_in_reward:
            self.policy.set_token_advantages(KLInReward(loss, grpo.adv_estimator.eps))

    def update(self) -> None:
        """The optimizer steps."""
        with self.phase("policy_training"):
            result = self.take_steps(self.policy, self.loss_fn, Logprobs())
        self.state.total_valid_tokens += int(result.metrics["global_valid_toks"])

    def read_state(self, directory: Path) -> None:
        super().read_state(directory)
        self.sampler = DynamicSampler(self.config.grpo)  # what it had collected is sampled again

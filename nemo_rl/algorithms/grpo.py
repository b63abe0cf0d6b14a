"""GRPO: sample groups of answers, and prefer answers that are better than their group (arXiv 2402.03300).

Read `GRPOTrainer.step`: each statement is a phase, and each phase is a method below it or, if other algorithms share
it, in `trainers/rollout_trainer.py`. The loop around the step is `trainers/trainer.py`. `setup/grpo.py` builds the
parts; nothing here knows which backend trains or generates. `async_grpo.py` has the groups of asynchronous runs.
"""

from collections.abc import Sequence

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.advantages import AdvantageResult, compute_advantages
from nemo_rl.algorithms.plan.rewards import DynamicSampler, ScoredGroup, score_groups
from nemo_rl.algorithms.plan.token_advantages import KLInReward
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.models.policy.flops import EXPECTED, IDEAL, Layout, Work, predict
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import BatchPlan
from nemo_rl.utils.registry import import_object

ASYNC_GROUPS = "nemo_rl.algorithms.async_grpo:AsyncGroups"  # imported when it is needed


class GRPOTrainer(RolloutTrainer):
    """Group relative policy optimisation and its relatives (DAPO, Dr.GRPO, GSPO, CISPO, REINFORCE++)."""

    def __init__(self, config: GRPOMasterConfig, tools: RunTools, parts: RolloutParts) -> None:
        super().__init__(config, tools, parts)
        grpo = config.grpo
        self.config = config
        self.loss_fn = ClippedPGLoss(config.loss_fn)
        if grpo.async_grpo.enabled and grpo.replay_from is None:  # a record has the groups of each step in order
            self.source = import_object(ASYNC_GROUPS, "grpo.async_grpo")(self.requests, self.rollouts, grpo)
        self.uses_reference = grpo.uses_reference
        # With a single optimizer step the policy does not change before its loss: the forward pass of training gives
        # the previous logprobs too. The other conditions need them before that pass, or computed without dropout.
        self.needs_previous_logprobs = (
            grpo.num_samples_per_step > config.policy.train_global_batch_size
            or grpo.seq_logprob_error_threshold is not None
            or config.loss_fn.use_kl_in_reward
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
        self.compare_with_prediction(groups)

    # -- the phases, in order

    def rollout(self) -> list[ScoredGroup]:
        """Prompts -> finished groups with rewards; with dynamic sampling, until enough of them have reward variance."""
        grpo = self.config.grpo
        if not grpo.use_dynamic_sampling:
            return score_groups(self.sample(), grpo)
        sampler, self.generated = DynamicSampler(grpo), []
        with self.phase(self.source.phase):
            while not sampler.is_complete:
                sampler.add(score_groups(self.next_groups(), grpo))
            groups, metrics = sampler.take()
        self.record("train", metrics)
        return groups

    def estimate_advantages(self, groups: Sequence[ScoredGroup]) -> AdvantageResult:
        """Rewards by group -> one advantage per sample."""
        with self.phase("advantage_calculation"):
            result = compute_advantages(
                [compared for group in groups for compared in group.for_estimator()],
                self.config.grpo.adv_estimator,
                kl_in_reward=self.config.loss_fn.use_kl_in_reward,
                bounds=self.config.grpo.advantage_bounds,
            )
        self.record("train", result.metrics)
        return result

    def plan(self, groups: Sequence[ScoredGroup], advantages: AdvantageResult) -> BatchPlan:
        """Which sample goes to which rank, optimizer step and micro-batch; the workers fetch their rows."""
        found = iter(advantages.advantages)
        of_rows = [group.of_rows([next(found) for _ in group.roles]) for group in groups]
        return self.plan_and_load([group.handle for group in groups], of_rows, [group.row_masks for group in groups])

    def score(self) -> None:
        """Previous and reference logprobs, kept with the samples on the workers; then masks and token advantages."""
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
            self.policy.set_token_advantages(KLInReward(loss, grpo.adv_estimator.eps, grpo.advantage_bounds))

    def update(self) -> None:
        """The optimizer steps."""
        with self.phase("policy_training"):
            self.take_steps(self.policy, self.loss_fn, Logprobs())

    # -- the report

    def compare_with_prediction(self, groups: Sequence[ScoredGroup]) -> None:
        """Predicted and ideal seconds of the phases that this step timed, for GPUs whose rates are known."""
        if self.policy.gpu is None:
            return
        samples = [row for group in groups for row in group.handle.rows]
        lengths = [sample.length for sample in samples]
        work = Work(
            lengths=lengths,
            generated=[sample.num_generated_tokens for sample in samples],
            prompts=len(groups),
            logprob_passes=self.needs_previous_logprobs + self.uses_reference,
            reference_passes=int(self.uses_reference),
        )
        training, generation = self.run.training_cluster.num_workers, self.run.generation_cluster.num_workers
        layout = Layout.of(self.run.policy, training, generation, sum(lengths))
        timed = self.timer.get_timing_metrics("sum")
        for name, assumed in (("predicted_s", EXPECTED), ("ideal_s", IDEAL)):
            phases = predict(self.flops, self.policy.gpu, layout, work, assumed)
            self.record("performance", {f"{name}/{phase}": s for phase, s in phases.items() if phase in timed})

"""GRPO: sample a group of answers to each prompt, and prefer those that are better than the group (arXiv 2402.03300).

Read `GRPOTrainer.step`: each statement is a phase of one training step. A phase is a method below it, or a method of
`trainers/rollout_trainer.py` if other algorithms share it. Three words recur:

- A *group* is a prompt with its samples. The tokens of a sample are one *row*, or several if an agent branches off.
- Tokens stay with the workers. This file has *handles* of groups: rewards, lengths and a reference to the tokens.
- A *plan* says which row goes to which worker, optimizer step and micro-batch.

The formulas are in `plan/advantages.py` and `losses/clipped_pg.py`, and the loop around the step in
`loop.py`. `run_grpo` starts the parts; nothing here knows which backend trains or generates. `async_grpo.py` has the
groups of asynchronous runs.
"""

from collections.abc import Sequence

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.losses.own import chosen_loss
from nemo_rl.algorithms.parts.devices import RolloutDevices
from nemo_rl.algorithms.parts.rollouts import Rollouts
from nemo_rl.algorithms.plan.advantages import compute_advantages
from nemo_rl.algorithms.plan.rewards import ScoredGroup
from nemo_rl.algorithms.plan.token_advantages import KLInReward
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.trainers.rollout_trainer import (
    RolloutParts,
    RolloutTrainer,
    good_rows,
    policy_gradient_task,
)
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import LossFunction, TrainResult


def run_grpo(config: GRPOMasterConfig, loss_fn: LossFunction | None = None) -> int:
    """Train; returns the exit status (see `Command`). `loss_fn`: a loss of your own (docs/adding-a-loss.md)."""
    with Run(config) as run:
        loss_fn = chosen_loss(loss_fn, config.loss_fn)
        rollouts = Rollouts.prepare(config)  # model, prompts, environments: checked, and nothing has started
        run.start(rollouts.saves)  # log folder, checkpoints, report, Ray
        parts = rollouts.start(run, RolloutDevices.start(run))  # policy, engines, environments
        run.train(GRPOTrainer(run.config, run.tools, parts, loss_fn))
    return run.status


class GRPOTrainer(RolloutTrainer):
    """Group relative policy optimisation and its relatives (DAPO, Dr.GRPO, GSPO, CISPO, REINFORCE++)."""

    def __init__(
        self, config: GRPOMasterConfig, tools: RunTools, parts: RolloutParts, loss_fn: LossFunction | None = None
    ) -> None:
        """`loss_fn`: None is the loss of `losses/clipped_pg.py`."""
        super().__init__(config, tools, parts)
        grpo = config.grpo
        self.config: GRPOMasterConfig = config
        self.loss_fn = loss_fn if loss_fn is not None else ClippedPGLoss(config.loss_fn)
        self.task = policy_gradient_task(config.policy, self.loss_fn)
        if grpo.async_grpo.enabled and grpo.replay_from is None:  # a record has the groups of each step in order
            from nemo_rl.algorithms.async_grpo import AsyncGroups

            self.source = AsyncGroups(self.requests, self.rollouts, grpo)
        # The loss compares the policy with itself before the step. With a single optimizer step the forward pass of
        # training gives these previous logprobs too. They need a pass of their own if a second optimizer step follows,
        # if masks or rewards need them before training, or if dropout changes the logprobs of training.
        self.needs_previous_logprobs = (
            grpo.num_samples_per_step > config.policy.train_global_batch_size
            or grpo.seq_logprob_error_threshold is not None
            or config.loss_fn.use_kl_in_reward
            or config.policy.adapters.dropout > 0
        )
        # Groups without variance then need no backward pass. Routers of experts and a draft learn from them too, and a
        # subclass of the loss may have further terms.
        self.only_advantages_teach = (
            type(self.loss_fn) is ClippedPGLoss
            and self.loss_fn.only_advantages_teach
            and not self.flops.has_experts
            and not config.policy.draft.enabled
        )

    def step(self) -> None:
        groups = self.rollout()
        handles = [group.handle for group in groups]
        advantages = self.estimate_advantages(groups)
        masks = [group.row_masks for group in groups]
        plan = self.plan_and_load(
            handles,
            advantages,
            masks,
            good=good_rows(groups, self.config.loss_fn),
            only_advantages_teach=self.only_advantages_teach,
        )
        self.compute_logprobs()
        trained = self.update()
        self.sync_weights()
        self.report(handles, plan, trained)
        self.compare_with_prediction(handles, self.needs_previous_logprobs, self.config.grpo.uses_reference)

    # -- the phases, in order

    def rollout(self) -> list[ScoredGroup]:
        """Prompts -> finished groups with rewards; with dynamic sampling, until enough groups have unequal rewards."""
        return self.scored_groups(self.config.grpo)

    def estimate_advantages(self, groups: Sequence[ScoredGroup]) -> list[list[float]]:
        """Rewards of each group -> how much better than the group each of its rows is."""
        with self.phase("advantage_calculation"):
            result = compute_advantages(
                [rewards for group in groups for rewards in group.compared_rewards()],
                self.config.grpo.adv_estimator,
                kl_in_reward=self.config.loss_fn.use_kl_in_reward,
                bounds=self.config.grpo.advantage_bounds,
            )
        self.record("train", result.metrics)
        estimates = iter(result.advantages)
        return [group.row_advantages([next(estimates) for _ in group.roles]) for group in groups]

    def compute_logprobs(self) -> None:
        """Previous and reference logprobs, kept with the samples on the workers; then masks and token advantages."""
        loss, grpo = self.config.loss_fn, self.config.grpo
        if self.needs_previous_logprobs or grpo.uses_reference:
            with self.phase("policy_and_reference_logprobs"):
                if self.needs_previous_logprobs:
                    self.policy.compute(Logprobs(), "prev_logprobs")
                if grpo.uses_reference:
                    self.policy.compute_reference_logprobs()
        if grpo.seq_logprob_error_threshold is not None:
            self.record("train", self.policy.mask_sequences_by_importance(grpo.seq_logprob_error_threshold))
        if loss.use_kl_in_reward:
            self.policy.set_token_advantages(KLInReward(loss, grpo.adv_estimator.eps, grpo.advantage_bounds))

    def update(self) -> TrainResult:
        """The optimizer steps of the policy."""
        with self.phase("policy_training"):
            return self.take_steps(self.policy, self.loss_fn, self.task)

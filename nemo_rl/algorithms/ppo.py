"""PPO: a value model predicts the reward at every token, and the policy learns from tokens that did better (arXiv
1707.06347, with the advantages of arXiv 1506.02438).

Read `PPOTrainer.step`: each statement is a phase, and each phase is a method below it or in
`trainers/rollout_trainer.py`. The value model is a second policy with a plan of its own over the same samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.config.ppo import GAEConfig, PPOMasterConfig
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.losses.divergence import reference_kl
from nemo_rl.algorithms.losses.own import chosen_loss
from nemo_rl.algorithms.losses.value import ValueLoss, explained_variance
from nemo_rl.algorithms.parts.devices import RolloutDevices
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.rollouts import Rollouts
from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.algorithms.plan.rewards import ScoredGroup
from nemo_rl.algorithms.plan.token_advantages import whiten, whitening_sums
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.trainers.rollout_trainer import (
    RolloutParts,
    RolloutTrainer,
    good_rows,
    policy_gradient_task,
)
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.head.tasks import Logprobs, Scalars
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.types import BatchPlan, LossFunction, TrainResult


def run_ppo(config: PPOMasterConfig, loss_fn: LossFunction | None = None) -> int:
    """Train; returns the exit status (see `Command`). `loss_fn`: a loss of your own for the policy."""
    with Run(config) as run:
        loss_fn = chosen_loss(loss_fn, config.loss_fn)
        rollouts, value_model = prepare_ppo(config)
        run.start(rollouts.saves)
        devices = RolloutDevices.start(run)
        parts = rollouts.start(run, devices)
        value = value_model.start(run, run.config.value, devices.training, name="value")
        run.train(PPOTrainer(run.config, run.tools, parts, value, value_model.flops, loss_fn))
    return run.status


def prepare_ppo(config: PPOMasterConfig) -> tuple[Rollouts, Model]:
    """The checked parts of a run that samples, and the value model, which knows the policy's tokens.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with the key to change.
    """
    value = Model.prepare(config.value, config.checkpointing)
    rollouts = Rollouts.prepare(config, trained={"value": (config.value, value)})
    if value.tokenizer.get_vocab() != rollouts.model.tokenizer.get_vocab():
        raise ValueError(
            f"value.model_name: {config.value.model_name!r} has another vocabulary than the policy "
            f"{config.policy.model_name!r}, whose tokens it has to read; leave value.model_name out, or name a model "
            "of the same family"
        )
    return rollouts, value


class PPOTrainer(RolloutTrainer):
    """Proximal policy optimisation with a value model."""

    def __init__(
        self,
        config: PPOMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        value: Policy,
        value_flops: ModelFlops,
        loss_fn: LossFunction | None = None,
    ) -> None:
        """`loss_fn`: of the policy; None is the loss of `losses/clipped_pg.py`."""
        super().__init__(config, tools, parts, others=[value])
        self.config: PPOMasterConfig = config
        self.value = value
        self.value_batching = Batching.of(config.value, **value_flops.cost_weights)
        self.loss_fn = loss_fn if loss_fn is not None else ClippedPGLoss(config.loss_fn)
        self.task = policy_gradient_task(config.policy, self.loss_fn)
        self.value_loss_fn = ValueLoss(config.value_loss_fn)

    def step(self) -> None:
        groups = self.scored_groups(self.config.ppo)
        plan = self.plan(groups)
        self.compute_logprobs_and_values()
        self.estimate_advantages()
        trained = self.update()
        self.sync_weights()
        num_passes = self.config.ppo.ppo_epochs if self.trains_policy else 0
        self.report([group.handle for group in groups], plan, trained, num_passes=num_passes)

    @property
    def trains_policy(self) -> bool:
        """Whether this step does; the first `policy_training_start_step` train only the value model."""
        return self.state.total_steps >= self.config.ppo.policy_training_start_step

    # -- the phases, in order

    def plan(self, groups: Sequence[ScoredGroup]) -> BatchPlan:
        """Which sample goes to which rank, optimizer step and micro-batch, of the policy and of the value model.

        The plans have rewards: there are no advantages until there are values.
        """
        handles = [group.handle for group in groups]
        rewards, masks = [group.rewards for group in groups], [group.masks for group in groups]
        zeros = [[0.0] * len(of_group) for of_group in rewards]
        value_plan = plan_batch(
            handles,
            zeros,
            masks,
            rewards=rewards,
            num_ranks=self.value.data_parallel_size,
            global_batch_size=self.config.value.train_global_batch_size,
            batching=self.value_batching,
        )
        with self.phase("data_processing"):
            self.value.load(value_plan)
        good = good_rows(groups, self.config.loss_fn)
        return self.plan_and_load(handles, zeros, masks, rewards=rewards, good=good)

    def compute_logprobs_and_values(self) -> None:
        """Previous and reference logprobs, and values, kept with the samples on the workers; then masks."""
        with self.phase("policy_and_reference_logprobs"):
            self.policy.compute(Logprobs(), "prev_logprobs")
            if self.config.ppo.uses_reference:
                self.policy.compute_reference_logprobs()
        threshold = self.config.ppo.seq_logprob_error_threshold
        if threshold is not None:
            self.value.attach("prev_logprobs", self.policy.share("prev_logprobs"))
            self.value.mask_sequences_by_importance(threshold)  # its own copies of the same samples
            self.record("train", self.policy.mask_sequences_by_importance(threshold))
        with self.phase("values"):
            self.value.compute(Scalars(), "values")
            self.policy.attach("values", self.value.share("values"))

    def estimate_advantages(self) -> None:
        """Rewards and values -> advantages and returns of every token, on the workers."""
        with self.phase("advantage_calculation"):
            self.policy.set_token_advantages(GAEAdvantages(self.config.loss_fn, self.config.ppo.adv_estimator))
            self.value.attach("returns", self.policy.share("returns"))

    def update(self) -> TrainResult:
        """All optimizer steps of the value model, then all of the policy, so that each is on the devices once.

        Returns the policy's result; the value model's if the step trains nothing else.
        """
        num_passes = self.config.ppo.ppo_epochs
        with self.phase("value_training"):
            result = self.take_steps(self.value, self.value_loss_fn, Scalars(), num_passes=num_passes)
        self.record("train/value", {"explained_variance": explained_variance(result.metrics)})
        if not self.trains_policy:
            self.record("train", {"global_valid_toks": result.num_valid_tokens})
            return result
        with self.phase("policy_training"):
            return self.take_steps(self.policy, self.loss_fn, self.task, num_passes=num_passes)


# -- generalised advantage estimation: rewards of samples and values of tokens -> advantages of tokens


@dataclass(frozen=True)
class GAEAdvantages:
    """A `nemo_rl.types.TokenAdvantages`: generalised advantages, and the returns that train the value model.

    The steps of an episode are its loss tokens. What an environment says between them is part of the state: the value
    after the last token of a turn is the value before the first token of the next. The sample's reward arrives with the
    last step; with `loss_cfg.use_kl_in_reward`, every step also pays the KL to the reference policy.

    `normalize_advantages` whitens the advantages over all tokens of the batch. Returns are not whitened: the value
    model predicts rewards in their own scale.
    """

    loss_cfg: ClippedPGLossConfig
    gae: GAEConfig
    sums = staticmethod(whitening_sums)

    def adjust(self, columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Columns `advantages` and `returns` (advantage + value), 0 where masked.

        Takes `final_reward` (the sample's, a scalar) and `values`; with the KL in the reward also
        `prev_logprobs` and `reference_policy_logprobs`.
        """
        steps = mask.nonzero()[:, 0]
        advantages, returns = torch.zeros_like(columns["values"]), torch.zeros_like(columns["values"])
        if len(steps) == 0:
            return {"advantages": advantages, "returns": returns}
        rewards = torch.zeros(len(steps), dtype=torch.float64)
        rewards[-1] = columns["final_reward"]
        cfg = self.loss_cfg
        if cfg.use_kl_in_reward:
            prev, reference = (columns[name][steps].double() for name in ("prev_logprobs", "reference_policy_logprobs"))
            rewards -= cfg.reference_policy_kl_penalty * reference_kl(prev, reference, cfg)
        values = columns["values"][steps].double()
        estimate = partial(generalized_advantages, rewards, values, gamma=self.gae.gae_gamma)
        # Both lambdas may differ (VAPO, arXiv 2504.05118, section 4.1): the return without bias, the advantage with
        # little variance, and with the longer memory the longer the sample is.
        advantages[steps] = estimate(gae_lambda=self.gae.lambda_of_policy(len(steps))).to(advantages.dtype)
        # A_t + V_t is the lambda-return, the target of the value model (arXiv 1506.02438, section 5).
        returns[steps] = (estimate(gae_lambda=self.gae.lambda_of_value) + values).to(returns.dtype)
        return {"advantages": advantages, "returns": returns}

    def finish(self, advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
        return whiten(advantages, mask, sums, self.gae.eps) if self.gae.normalize_advantages else advantages


def generalized_advantages(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages of the steps of one episode (arXiv 1506.02438, eq. 16), float64 [N].

        A_t = delta_t + gamma * lambda * A_{t+1}        delta_t = r_t + gamma * V_{t+1} - V_t

    `rewards` [N] of each step, `values` [N] of the state before it. Nothing follows the last step, so its V_{t+1} is 0.
    This holds for truncated answers too: no reward says how they would have continued.
    """
    assert rewards.shape == values.shape and rewards.dim() == 1, (rewards.shape, values.shape)
    # A_t depends on A_{t+1}, so this is a loop from the end; plain floats are faster than tensors of one number.
    advantages: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
        next_value = value
        advantages.append(advantage)
    return torch.tensor(advantages[::-1], dtype=torch.float64)

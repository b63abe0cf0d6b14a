"""PPO: a value model says what to expect of every token, the policy learns from what turned out better (arXiv
1707.06347, with the advantages of arXiv 1506.02438).

One step is `PPOTrainer.step`; each of its statements is a phase, and each phase a method below it or in
`rollout_trainer.py`. The value model is a second policy with a plan of its own over the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.algorithms.gae import GAEAdvantages
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.losses.value import ValueLoss, explained_variance
from nemo_rl.algorithms.ppo_config import PPOMasterConfig
from nemo_rl.algorithms.rewards import ScoredGroup, score_groups
from nemo_rl.algorithms.rollout_batch import Batching, plan_batch
from nemo_rl.algorithms.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.algorithms.trainer import RunTools
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.head_tasks import Logprobs, Scalars
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.types import BatchPlan


class PPOTrainer(RolloutTrainer):
    """See the module."""

    def __init__(
        self,
        config: PPOMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        value: PolicyInterface,
        value_flops: ModelFlops,
    ) -> None:
        super().__init__(config, tools, parts, others=[value])
        self.config = config
        self.value = value
        self.value_batching = Batching.of(config.value, quadratic_weight=value_flops.quadratic_weight, key="value")
        self.loss_fn = ClippedPGLoss(config.loss_fn)
        self.value_loss_fn = ValueLoss(config.value_loss_fn)

    def step(self) -> None:
        groups = self.rollout()
        plan = self.plan(groups)
        self.score()
        self.estimate_advantages()
        self.update()
        self.sync_weights(self.state.total_steps + 1)
        self.report([group.handle for group in groups], plan, num_passes=self.config.ppo.ppo_epochs)

    # -- the phases, in order

    def rollout(self) -> list[ScoredGroup]:
        """Prompts -> finished, rewarded groups."""
        self.generated = []
        with self.phase("generation"):
            return score_groups(self.next_groups(), self.config.ppo)

    def plan(self, groups: Sequence[ScoredGroup]) -> BatchPlan:
        """Which sample in which rank, optimizer step and micro-batch, of the policy and of the value model."""
        value_plan = _planned(groups, self.value, self.config.value, self.value_batching)
        with self.phase("data_processing"):
            self.value.load(value_plan)
        return self.load_plan(_planned(groups, self.policy, self.config.policy, self.batching))

    def score(self) -> None:
        """Previous and reference logprobs, and values, kept with the samples on the workers."""
        with self.phase("policy_and_reference_logprobs"):
            self.policy.compute(Logprobs(), "prev_logprobs")
            if not self.config.ppo.skip_reference_policy_logprobs_calculation:
                self.policy.compute_reference_logprobs()
        with self.phase("values"):
            self.value.compute(Scalars(), "values")
            self.policy.attach("values", self.value.share("values"))

    def estimate_advantages(self) -> None:
        """Rewards and values -> advantages and returns of every token."""
        gae = self.config.ppo.adv_estimator
        estimator = GAEAdvantages(
            self.config.loss_fn,
            gamma=gae.gae_gamma,
            gae_lambda=gae.gae_lambda,
            normalize=gae.normalize_advantages,
            eps=gae.eps,
        )
        with self.phase("advantage_calculation"):
            self.policy.set_token_advantages(estimator)
            self.value.attach("returns", self.policy.share("returns"))

    def update(self) -> None:
        """The optimizer steps: all of the value model, then all of the policy, so that each is on the devices once."""
        num_passes = self.config.ppo.ppo_epochs
        with self.phase("value_training"):
            result = self.take_steps(self.value, self.value_loss_fn, Scalars(), num_passes=num_passes)
        self.record("train/value", {"explained_variance": explained_variance(result.metrics)})
        with self.phase("policy_training"):
            result = self.take_steps(self.policy, self.loss_fn, Logprobs(), num_passes=num_passes)
        self.state.total_valid_tokens += int(result.metrics["global_valid_toks"])


def _planned(
    groups: Sequence[ScoredGroup], policy: PolicyInterface, config: PolicyConfig, batching: Batching
) -> BatchPlan:
    """A sample's reward stands in for its advantages until there are values."""
    return plan_batch(
        [group.handle for group in groups],
        [group.rewards for group in groups],
        [group.masks for group in groups],
        num_ranks=policy.data_parallel_size,
        global_batch_size=config.train_global_batch_size,
        batching=batching,
        micro_batch_multiple=config.backend_cfg.micro_batch_multiple,
    )

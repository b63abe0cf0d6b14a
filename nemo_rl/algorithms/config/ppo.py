"""Configuration of PPO: the algorithm, its value model, and the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.checks import check_reference_kl, check_rollout_batches, check_rollout_run, check_saving
from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.config.loss import ValueLossConfig
from nemo_rl.algorithms.config.rollout import FurtherModel, RolloutMasterConfig, ScoredRolloutConfig
from nemo_rl.config.base import Derived, StrictModel
from nemo_rl.config.rules import NotYet, anything, one_of, switched_off
from nemo_rl.models.policy.config import PolicyConfig, RewardModelConfig


class GAEConfig(StrictModel):
    """Generalised advantage estimation: how rewards and values become advantages and returns."""

    name: Literal["gae"] = "gae"
    """The estimator; PPO has this one."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """0: one step ahead, all trust in the value model; 1: the whole return, no bias and more variance."""

    gae_gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of what comes later."""

    normalize_advantages: bool = True
    """Subtract the mean of the batch's advantages and divide by their standard deviation. Returns are left alone."""

    eps: float = Field(default=1.0e-6, gt=0)
    """Added to the standard deviation."""


class PPOConfig(ScoredRolloutConfig):
    """PPO: batch shape, passes over it, advantages, validation."""

    ppo_epochs: int = Field(default=4, ge=1)
    """Passes over the samples of a step, of the value model and then of the policy."""

    adv_estimator: GAEConfig = GAEConfig()
    """How rewards and values become advantages."""

    skip_reference_policy_logprobs_calculation: bool = False
    """Do without the reference policy; needs `loss_fn.reference_policy_kl_penalty: 0`."""

    not_yet: ClassVar = (
        NotYet("async_ppo", switched_off),
        NotYet("async_grpo", switched_off),
        # GRPO's own, which exemplars repeat.
        NotYet("normalize_rewards", anything),
        NotYet("use_leave_one_out_baseline", anything),
        NotYet("use_dynamic_sampling", one_of(False, None)),
        NotYet("dynamic_sampling_max_gen_batches", anything),
        NotYet("batch_multiplier", one_of(1, 1.0, None)),
        NotYet("seq_logprob_error_threshold", one_of(None)),
        NotYet("calculate_advantages_on_gpu", anything),
        NotYet("val_start_at", one_of(-1, None)),
        NotYet("stop_at_validation_metric", one_of(None)),
        NotYet("stop_at_validation_threshold", one_of(None)),
    )


class ValueConfig(PolicyConfig):
    """The value model: keys as in `policy`, with its own layout, batch sizes and optimizer."""

    model_name: Annotated[str, Derived("${policy.model_name}"), Field(min_length=1)]
    """Model that it starts from. The head of a language model is replaced by one number per token."""

    train_global_batch_size: Annotated[int, Derived("${policy.train_global_batch_size}"), Field(ge=1)] = 512
    """Samples of one optimizer step, over all ranks."""

    train_micro_batch_size: Annotated[int, Derived("${policy.train_micro_batch_size}"), Field(ge=1)] = 4
    """Samples of one forward and backward pass of a rank."""

    max_total_sequence_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)] = 512
    """Tokens of the longest sample: prompt, completions and environment turns."""

    precision: Annotated[Literal["float32", "bfloat16", "float16"], Derived("${policy.precision}")] = "bfloat16"
    """Data type of the forward and backward pass."""

    nonfinite_action: Annotated[Literal["stop", "skip"], Derived("${policy.nonfinite_action}")] = "stop"
    """When a loss or a gradient is not finite: end the run or skip the optimizer step, as `policy.nonfinite_action`."""

    reward_model_cfg: RewardModelConfig = RewardModelConfig(enabled=True, reward_model_type="regression")
    """The head with one number per token."""

    not_yet: ClassVar = (*PolicyConfig.not_yet, NotYet("generation", anything))


class PPOMasterConfig(RolloutMasterConfig):
    """A whole PPO run."""

    section: ClassVar = "ppo"

    ppo: PPOConfig
    """PPO: batch shape, passes over it, advantages, validation."""

    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The clipped policy-gradient loss with its variants."""

    value_loss_fn: ValueLossConfig = ValueLossConfig()
    """The loss of the value model."""

    value: ValueConfig
    """The value model: keys as in `policy`, with its own layout, batch sizes and optimizer."""

    @property
    def rollout(self) -> PPOConfig:
        return self.ppo

    @property
    def train_metrics(self) -> frozenset[str]:
        return metric_names.ppo(self.ppo) | self.task_metrics | self.generation_metrics

    @property
    def further_models(self) -> list[FurtherModel]:
        return [FurtherModel(key="value", config=self.value, cluster=self.training_cluster)]

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from check_rollout_run(self)
        yield from check_rollout_batches(self, self.value, "value")
        yield from check_saving(self.checkpointing, self.value, "value")
        skips_reference = self.ppo.skip_reference_policy_logprobs_calculation
        yield from check_reference_kl(self, self.loss_fn, skips_reference=skips_reference)
        yield from self._check_updates()
        yield from self._check_value()

    def _check_updates(self) -> Iterator[tuple[str, str]]:
        num_updates = self.ppo.ppo_epochs * self.ppo.num_samples_per_step / self.policy.train_global_batch_size
        if self.loss_fn.force_on_policy_ratio and num_updates != 1:
            yield (
                "loss_fn.force_on_policy_ratio",
                f"needs exactly one optimizer step per RL step and there are {num_updates:g}; set it to false, or "
                f"ppo.ppo_epochs=1 and policy.train_global_batch_size={self.ppo.num_samples_per_step}",
            )

    def _check_value(self) -> Iterator[tuple[str, str]]:
        head, longest = self.value.reward_model_cfg, self.policy.max_total_sequence_length
        if not head.enabled or head.reward_model_type != "regression":
            yield (
                "value.reward_model_cfg",
                "a value model has {enabled: true, reward_model_type: regression}: a number for each token",
            )
        if self.value.max_total_sequence_length < longest:
            yield (
                "value.max_total_sequence_length",
                f"{self.value.max_total_sequence_length} is less than policy.max_total_sequence_length={longest}, and "
                "the value model reads the same samples; leave it out",
            )
        if self.value.nonfinite_action != self.policy.nonfinite_action:
            yield (
                "value.nonfinite_action",
                f"must be that of the policy, {self.policy.nonfinite_action}; leave it out",
            )

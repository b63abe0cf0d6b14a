"""Configuration of PPO: the algorithm, its value model, and the whole run."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.config.loop import Problems, saving_rules
from nemo_rl.algorithms.config.rollout import FurtherModel, RolloutMasterConfig, ScoredRolloutConfig, reference_kl_rules
from nemo_rl.config.rules import Derived, StrictModel, remedy
from nemo_rl.models.policy.config import RewardModelConfig, SecondModelConfig


class GAEConfig(StrictModel):
    """Generalised advantage estimation: how rewards and values become advantages and returns."""

    name: Literal["gae"] = "gae"
    """The estimator; PPO has this one."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """0: one step ahead, all trust in the value model; 1: the whole return, no bias and more variance."""

    gae_lambda_policy: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the advantages, which train the policy; null: `gae_lambda`."""

    gae_lambda_value: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the returns, which train the value model; null: `gae_lambda`."""

    length_adaptive_alpha: float | None = Field(default=None, gt=0)
    """The policy's lambda is 1 - 1 / (alpha x trained tokens of the sample), at least 0 (VAPO), in place of
    `gae_lambda_policy`; null: off."""

    gae_gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of later rewards."""

    normalize_advantages: bool = True
    """Subtract the mean of the batch's advantages and divide by their standard deviation. Returns stay as they are."""

    eps: float = Field(default=1.0e-6, gt=0)
    """Added to the standard deviation."""

    def lambda_of_policy(self, num_tokens: int) -> float:
        """Lambda of the advantages of a sample with `num_tokens` trained tokens."""
        if self.length_adaptive_alpha is not None:
            return max(0.0, 1.0 - 1.0 / (self.length_adaptive_alpha * num_tokens))
        return self.gae_lambda if self.gae_lambda_policy is None else self.gae_lambda_policy

    @property
    def lambda_of_value(self) -> float:
        """Lambda of the returns."""
        return self.gae_lambda if self.gae_lambda_value is None else self.gae_lambda_value


class PPOConfig(ScoredRolloutConfig):
    """PPO: batch shape, passes over it, advantages, validation."""

    ppo_epochs: int = Field(default=4, ge=1)
    """Passes over the samples of a step, of the value model and then of the policy."""

    policy_training_start_step: int = Field(default=0, ge=0)
    """So many first steps train only the value model."""

    adv_estimator: GAEConfig = GAEConfig()
    """How rewards and values become advantages."""


class ValueLossConfig(StrictModel):
    """The loss of PPO's value model."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Bound on how far a value moves from the one its sample was scored with before its error is taken; null: none."""

    scale: float = Field(default=0.5, gt=0)
    """Factor on the mean squared error."""


class ValueConfig(SecondModelConfig):
    """The value model: keys as in `policy`, with its own layout, batch sizes and optimizer."""

    model_name: Annotated[str, Derived("${policy.model_name}"), Field(min_length=1)]
    """Model that it starts from. The head of a language model is replaced by one number per token."""

    train_global_batch_size: Annotated[int, Derived("${policy.train_global_batch_size}"), Field(ge=1)] = 512
    """Samples of one optimizer step, over all ranks."""

    nonfinite_action: Annotated[Literal["stop", "skip"], Derived("${policy.nonfinite_action}")] = "stop"
    """When a loss or a gradient is not finite: end the run or skip the optimizer step, as `policy.nonfinite_action`."""

    reward_model_cfg: RewardModelConfig = RewardModelConfig(enabled=True, reward_model_type="regression")
    """The head with one number per token."""


class PPOMasterConfig(RolloutMasterConfig):
    """A whole PPO run."""

    section: ClassVar = "ppo"
    trained: ClassVar[tuple[str, ...]] = ("policy", "value")
    cpu_config: ClassVar[str] = "examples/configs/ppo_math_cpu.yaml"

    rules: ClassVar = {
        **reference_kl_rules("ppo"),
        **saving_rules("value"),
        "value.reward_model_cfg requires value.reward_model_cfg.enabled and "
        "value.reward_model_cfg.reward_model_type=regression": (
            "a value model has {enabled: true, reward_model_type: regression}: a number for each token -> "
            "value.reward_model_cfg.enabled=true and value.reward_model_cfg.reward_model_type=regression"
        ),
        "value.nonfinite_action != {policy.nonfinite_action}": (
            "must equal policy.nonfinite_action -> value.nonfinite_action={policy.nonfinite_action}"
        ),
    }

    ppo: PPOConfig
    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()

    value_loss_fn: ValueLossConfig = ValueLossConfig()
    """The loss of the value model."""

    value: ValueConfig

    @property
    def train_metrics(self) -> frozenset[str]:
        value = metric_names.UPDATE | metric_names.MOE | metric_names.VALUE
        names = self.rollout_metrics | {f"value/{name}" for name in value}
        if not self.has_own_loss:
            names |= metric_names.POLICY_GRADIENT
        if self.ppo.use_dynamic_sampling:
            names |= metric_names.DYNAMIC_SAMPLING
        if self.ppo.seq_logprob_error_threshold is not None:
            names |= metric_names.LOGPROB_ERROR
        return names | metric_names.LIKELIHOOD if self.loss_fn.positive_example_nll_weight > 0 else names

    @property
    def further_models(self) -> list[FurtherModel]:
        return [FurtherModel(key="value", config=self.value, cluster=self.training_cluster)]

    def cross_checks(self) -> Problems:
        yield from super().cross_checks()
        yield from self.check_batches(self.value)
        num_updates = self.ppo.ppo_epochs * self.ppo.num_samples_per_step / self.policy.train_global_batch_size
        if self.loss_fn.force_on_policy_ratio and num_updates != 1:
            yield (
                "loss_fn.force_on_policy_ratio",
                f"needs exactly one optimizer step per RL step and there are {num_updates:g}; "
                + remedy(
                    "loss_fn.force_on_policy_ratio=false",
                    f"ppo.ppo_epochs=1 and policy.train_global_batch_size={self.ppo.num_samples_per_step}",
                ),
            )

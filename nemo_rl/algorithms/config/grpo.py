"""Configuration of GRPO: the algorithm, its loss, and the whole run."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.loop import LossConfig, Problems
from nemo_rl.algorithms.config.rollout import RolloutMasterConfig, ScoredRolloutConfig, reference_kl_rules
from nemo_rl.config.rules import Derived, StrictModel, remedy
from nemo_rl.environments.config import AgentEnvironmentConfig
from nemo_rl.models.generation.config import DEFAULT_ENGINE
from nemo_rl.types import PolicyGradientInputs


class AdvEstimatorConfig(StrictModel):
    """How rewards become advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus"] = "grpo"
    """`grpo`: relative to the group; `gdpo`: that for each of several rewards, then whitened over the batch;
    `reinforce_plus_plus`: whitened over the batch."""

    normalize_rewards: Annotated[bool, Derived("${grpo.normalize_rewards}")]
    """Divide by the standard deviation of the group."""

    use_leave_one_out_baseline: Annotated[bool, Derived("${grpo.use_leave_one_out_baseline}")]
    """The baseline of a sample is the mean of the others of its group."""

    std: Literal["group", "leave_one_out"] = "group"
    """The standard deviation of `normalize_rewards`: of the group, or of the other samples of the group."""

    minus_baseline: bool = True
    """Subtract the mean of the group (`reinforce_plus_plus` only)."""

    eps: float = Field(default=1.0e-6, gt=0)
    """Added to the standard deviation."""

    reward_weights: list[float] | None = None
    """Factors of the advantages of several rewards (`gdpo` only), in the order of the rewards; null: 1 each."""

    rules: ClassVar = {
        "reward_weights != null requires name=gdpo": (
            "weighs several rewards, which only gdpo tells apart -> name=gdpo | reward_weights=null"
        ),
        "std=leave_one_out excludes name=reinforce_plus_plus": "is whitened over the batch -> std=group",
    }


class AsyncGRPOConfig(StrictModel):
    """Sampling while the policy trains."""

    enabled: bool = False
    """Sample the groups of later steps while this one trains; needs `policy.generation.colocated.enabled: false`."""

    max_trajectory_age_steps: int = Field(default=1, ge=1)
    """Weight updates by which a sample may be behind the weights that are trained on it, at most."""

    in_flight_weight_updates: bool = False
    """Engines take new weights in the middle of their samples; false: a sync waits for the groups that play."""

    recompute_kv_cache_after_weight_updates: bool = False
    """Recompute the KV cache of unfinished samples with the new weights; false: keep the cache of the old weights."""

    group_order: Literal["in_order", "arrival"] = "in_order"
    """Train groups as they were dispatched, or those that finish first as long as none grows too old."""

    max_open_steps: int | None = Field(default=None, ge=1)
    """Bound of the buffer: steps' worth of groups that play or wait to be trained. null: `max_trajectory_age_steps` +
    1, as many as never grow too old in order; for `arrival` one less, so that a slow group can wait for a later step.
    """

    @property
    def open_steps(self) -> int:
        """`max_open_steps`, or what null means."""
        if self.max_open_steps is not None:
            return self.max_open_steps
        return self.max_trajectory_age_steps + (self.group_order == "in_order")

    rules: ClassVar = {
        "recompute_kv_cache_after_weight_updates requires in_flight_weight_updates": (
            "no sample is under way at a sync -> in_flight_weight_updates=true | "
            "recompute_kv_cache_after_weight_updates=false"
        ),
    }

    def cross_checks(self) -> Problems:
        if self.open_steps > self.max_trajectory_age_steps + 1:
            yield (
                "max_open_steps",
                f"groups would grow older than max_trajectory_age_steps={self.max_trajectory_age_steps} before their "
                f"turn; {remedy(f'max_open_steps={self.max_trajectory_age_steps + 1}', section='{section}')}",
            )
        if self.enabled and self.open_steps < 2:
            fix = "max_trajectory_age_steps=2" if self.max_open_steps is None else "max_open_steps=2"
            text = "with one step of groups nothing is sampled while the policy trains"
            yield "max_open_steps", f"{text}; {remedy(fix, section='{section}')}"


class GRPOConfig(ScoredRolloutConfig):
    """GRPO: batch shape, advantages, sampling strategy, validation."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of the group."""

    use_leave_one_out_baseline: bool = True
    """The baseline of a sample is the mean of the others of its group."""

    adv_estimator: AdvEstimatorConfig

    advantage_clip_low: float | None = Field(default=None, le=0)
    """Advantages below it are raised to it; null: none are."""

    advantage_clip_high: float | None = Field(default=None, ge=0)
    """Advantages above it are lowered to it; null: none are."""

    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()

    @property
    def advantage_bounds(self) -> tuple[float, float]:
        """The smallest and the largest advantage."""
        low, high = self.advantage_clip_low, self.advantage_clip_high
        return -math.inf if low is None else low, math.inf if high is None else high

    rules: ClassVar = {
        "adv_estimator.name=gdpo excludes num_generations_per_prompt < 2": (
            "a group of 1 has no advantage -> num_generations_per_prompt=2"
        ),
        "reward_shaping.enabled excludes adv_estimator.name=gdpo": (
            "gdpo takes each of several rewards, and shaping changes their sum -> reward_shaping.enabled=false"
        ),
        "num_generations_per_prompt < 2 and adv_estimator.name=grpo": (
            "a group of 1 has no advantage -> num_generations_per_prompt=2 | "
            "adv_estimator.name=reinforce_plus_plus and adv_estimator.minus_baseline=false"
        ),
        "num_generations_per_prompt < 2 and adv_estimator.name=reinforce_plus_plus excludes "
        "adv_estimator.minus_baseline": (
            "a reward minus the mean of a group of 1 is 0 -> num_generations_per_prompt=2 | "
            "adv_estimator.minus_baseline=false"
        ),
    }


class ClippedPGLossConfig(LossConfig):
    """The clipped policy-gradient loss with its variants."""

    inputs_type: ClassVar = PolicyGradientInputs

    reference_policy_kl_penalty: float = Field(default=0.01, ge=0)
    """Weight of the KL divergence to the reference policy."""

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (http://joschu.net/blog/kl-approx.html)."""

    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)
    """Bound on the absolute log-ratio that enters the estimator; null: none."""

    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)
    """Bound on the absolute estimate of a token; null: none."""

    use_on_policy_kl_approximation: bool = False
    """Weight the divergence by exp(current - generation logprob)."""

    use_kl_in_reward: bool = False
    """Put the divergence into the reward instead of the loss (Reinforce++)."""

    ratio_clip_min: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - this."""

    ratio_clip_max: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + this; larger than `ratio_clip_min` is DAPO's clip-higher."""

    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: bound on the ratio for negative advantages (3 is usual); null: off."""

    use_importance_sampling_correction: bool = False
    """Weight the loss by exp(previous - generation logprob)."""

    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = "tis"
    """How a bound acts on that weight: it is truncated, or tokens outside, or sequences outside, are dropped."""

    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)
    """Upper bound of the weight; null: unbounded."""

    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)
    """Lower bound of the weight; null: 0. `tis` raises smaller weights to it, the others drop them."""

    sequence_level_importance_ratios: bool = False
    """One ratio for a whole sequence (GSPO); needs `token_level_loss: false`."""

    token_level_loss: bool = True
    """Mean over all tokens; false: mean over sequences of their token means."""

    length_normalizer: int | None = Field(default=None, ge=1)
    """Dr. GRPO: token sums divided by this number times the sequences, in place of token counts; null: off."""

    force_on_policy_ratio: bool = False
    """Take the ratio as exactly 1; needs one optimizer step per RL step."""

    disable_ppo_ratio: bool = False
    """REINFORCE: the logprob itself in place of the ratio, without clipping."""

    use_cispo: bool = False
    """CISPO: the clipped ratio, without gradient, weights the logprob."""

    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """VAPO: adds this times the mean of -logprob over all tokens of samples with a reward above 0; 0: off."""

    rules: ClassVar = {
        "length_normalizer requires token_level_loss": "replaces the count of tokens",
        "sequence_level_importance_ratios requires not token_level_loss": "GSPO averages over sequences",
        "use_on_policy_kl_approximation excludes use_kl_in_reward": (
            "weights the KL of the loss -> use_on_policy_kl_approximation=false"
        ),
        "use_cispo excludes disable_ppo_ratio": "CISPO is made of the ratio",
        "use_cispo excludes sequence_level_importance_ratios": "CISPO weights tokens",
        "disable_ppo_ratio excludes sequence_level_importance_ratios": "leaves no ratio to take per sequence",
        "ratio_clip_c excludes use_cispo": "dual clip has no meaning with use_cispo=true -> ratio_clip_c=null",
        "ratio_clip_c excludes disable_ppo_ratio": (
            "dual clip has no meaning with disable_ppo_ratio=true -> ratio_clip_c=null"
        ),
        "truncated_importance_sampling_ratio: bounds_correction requires use_importance_sampling_correction": (
            "bounds the correction, which is off -> use_importance_sampling_correction=true | "
            "truncated_importance_sampling_ratio=null and truncated_importance_sampling_ratio_min=null"
        ),
        "truncated_importance_sampling_type: bounds_correction excludes truncated_importance_sampling_type=null": (
            "a bound needs a type -> truncated_importance_sampling_type=tis | truncated_importance_sampling_type=icepop"
        ),
        "truncated_importance_sampling_type=seq-mask-tis and bounds_correction excludes "
        "sequence_level_importance_ratios": (
            "seq-mask-tis does not go with GSPO -> truncated_importance_sampling_type=tis | "
            "truncated_importance_sampling_type=icepop"
        ),
        "truncated_importance_sampling_ratio_min >= {truncated_importance_sampling_ratio}": (
            "{truncated_importance_sampling_ratio_min} is not below truncated_importance_sampling_ratio="
            "{truncated_importance_sampling_ratio}; lower it"
        ),
    }

    @property
    def bounds_correction(self) -> bool:
        """Whether the weight of the importance-sampling correction has a bound."""
        bounds = (self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio)
        return bounds != (None, None)

    def cross_checks(self) -> Problems:
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1 + self.ratio_clip_max:
            yield "ratio_clip_c", f"must be above 1 + ratio_clip_max = {1 + self.ratio_clip_max:g} (3 is usual)"


class GRPOMasterConfig(RolloutMasterConfig):
    """A whole GRPO run."""

    section: ClassVar = "grpo"

    rules: ClassVar = {
        **reference_kl_rules("grpo"),
        "loss_fn.use_kl_in_reward requires grpo.adv_estimator.name=reinforce_plus_plus": (
            "only reinforce_plus_plus has the KL in the reward -> grpo.adv_estimator.name=reinforce_plus_plus | "
            "loss_fn.use_kl_in_reward=false"
        ),
        "grpo.async_grpo.enabled excludes policy.generation.is_by_policy": (
            "nothing samples while the policy trains if its own workers generate -> grpo.async_grpo.enabled=false | "
            f"policy.generation.backend={DEFAULT_ENGINE} and {{devices_apart}}"
        ),
        "grpo.async_grpo.enabled and policy.generation.is_by_policy=false excludes "
        "policy.generation.colocated.enabled": (
            "samples while the policy trains, so generation needs devices of its own -> {devices_apart} | "
            "grpo.async_grpo.enabled=false"
        ),
        "loss_fn.use_importance_sampling_correction: grpo.async_grpo.enabled requires "
        "loss_fn.use_importance_sampling_correction": (
            "samples come from older weights than the ones that train -> "
            "loss_fn.use_importance_sampling_correction=true | grpo.async_grpo.enabled=false"
        ),
    }

    grpo: GRPOConfig
    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()

    @property
    def train_metrics(self) -> frozenset[str]:
        names = self.rollout_metrics | metric_names.GROUP_ADVANTAGES
        if not self.has_own_loss:
            names |= metric_names.POLICY_GRADIENT
        if self.loss_fn.positive_example_nll_weight > 0:
            names |= metric_names.LIKELIHOOD
        if self.grpo.use_dynamic_sampling:
            names |= metric_names.DYNAMIC_SAMPLING
        if self.grpo.seq_logprob_error_threshold is not None:
            names |= metric_names.LOGPROB_ERROR
        return names | {"buffer_size"} if self.grpo.async_grpo.enabled else names

    @property
    def recomputes_kv_cache(self) -> bool:
        settings = self.grpo.async_grpo
        return not settings.in_flight_weight_updates or settings.recompute_kv_cache_after_weight_updates

    def cross_checks(self) -> Problems:
        yield from super().cross_checks()
        samples = self.grpo.num_samples_per_step
        if self.loss_fn.force_on_policy_ratio and samples != self.policy.train_global_batch_size:
            yield (
                "loss_fn.force_on_policy_ratio",
                f"needs exactly one optimizer step per RL step, of {samples} samples (num_prompts_per_step x "
                "num_generations_per_prompt); "
                + remedy(f"policy.train_global_batch_size={samples}", "loss_fn.force_on_policy_ratio=false"),
            )
        for name in dict.fromkeys(dataset.env_name for dataset in self.data.train):
            agent = self.env.get(name)
            if self.grpo.reward_shaping.enabled and isinstance(agent, AgentEnvironmentConfig) and agent.rewards_rows:
                yield (
                    "grpo.reward_shaping.enabled",
                    f"shapes the reward of a whole episode, and each row of env.{name} has its own (credit: branch, or "
                    f"roles); {remedy('grpo.reward_shaping.enabled=false')}",
                )

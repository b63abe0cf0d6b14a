"""Configuration of GRPO: the algorithm, its loss, and the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.algorithms.config_checks import check_run
from nemo_rl.config.base import Derived, NotYet, StrictModel, anything, one_of, switched_off
from nemo_rl.data.config import DataConfig
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.environments.config import EnvSection
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.utils.config import CheckpointingConfig, LoggerConfig


class RewardShapingConfig(StrictModel):
    """Penalties for long answers (DAPO, ProRL)."""

    enabled: bool = False
    """Shape rewards."""

    overlong_buffer_length: int = Field(default=128, ge=1)
    """Tokens before `max_response_length` over which the penalty grows (DAPO)."""

    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Penalty at `max_response_length` (DAPO)."""

    max_response_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)]
    """Response tokens at which the whole penalty applies (DAPO)."""

    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)
    """Factor on the rewards of truncated samples (ProRL), in place of the DAPO penalty; null: off."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.enabled and self.overlong_buffer_length > self.max_response_length:
            yield (
                "overlong_buffer_length",
                f"{self.overlong_buffer_length} is more than max_response_length={self.max_response_length}",
            )


class RewardScalingConfig(StrictModel):
    """Linear map of rewards: clamped to the source range, then mapped to the target range."""

    enabled: bool = False
    """Scale rewards."""

    source_min: float = 0.0
    """Smallest reward expected; smaller ones count as this."""

    source_max: float = 1.0
    """Largest reward expected; larger ones count as this."""

    target_min: float = 0.0
    """What `source_min` becomes."""

    target_max: float = 1.0
    """What `source_max` becomes."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for side in ("source", "target"):
            low, high = (self.source_min, self.source_max) if side == "source" else (self.target_min, self.target_max)
            if low >= high:
                yield f"{side}_max", f"must be above {side}_min={low} (got {high})"


class AdvEstimatorConfig(StrictModel):
    """How rewards become advantages."""

    name: Literal["grpo", "reinforce_plus_plus"] = "grpo"
    """`grpo`: relative to the group; `reinforce_plus_plus`: whitened over the batch."""

    normalize_rewards: Annotated[bool, Derived("${grpo.normalize_rewards}")]
    """Divide by the standard deviation of the group."""

    use_leave_one_out_baseline: Annotated[bool, Derived("${grpo.use_leave_one_out_baseline}")]
    """The baseline of a sample is the mean of the others of its group."""

    minus_baseline: bool = True
    """Subtract the mean of the group (`reinforce_plus_plus` only)."""

    eps: float = Field(default=1.0e-6, gt=0)
    """Added to the standard deviation."""

    not_yet: ClassVar = (NotYet("name", lambda value: value not in ("gdpo", "raw_reward", "gae", "opd")),)


class GRPOConfig(StrictModel):
    """GRPO: batch shape, advantages, sampling strategy, validation."""

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of one step."""

    num_generations_per_prompt: int = Field(default=16, ge=1)
    """Samples of each prompt."""

    max_rollout_turns: int = Field(default=1, ge=1)
    """Turns of a sample with its environment."""

    max_num_epochs: int = Field(default=1, ge=1)
    """The run ends after so many passes over the training data or after `max_num_steps`, whichever comes first."""

    max_num_steps: int = Field(default=1_000_000, ge=1)
    """Steps of the run at most."""

    seed: int = Field(default=42, ge=0)
    """Seed of everything random."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of the group."""

    use_leave_one_out_baseline: bool = True
    """The baseline of a sample is the mean of the others of its group."""

    adv_estimator: AdvEstimatorConfig
    """How rewards become advantages."""

    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample until the step is full (DAPO)."""

    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """The run stops when so many generation batches did not fill a step."""

    batch_multiplier: float = Field(default=1.0, ge=1)
    """Prompts of a generation batch, in units of `num_prompts_per_step`; for dynamic sampling only."""

    overlong_filtering: bool = False
    """Truncated samples get no gradient; their rewards still enter the baseline."""

    reward_shaping: RewardShapingConfig
    """Penalties for long answers."""

    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """Linear map of rewards."""

    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)
    """Samples whose mean of exp(|training - generation logprob|) exceeds this get no gradient; null: off."""

    skip_reference_policy_logprobs_calculation: bool = False
    """Do without the reference policy; needs `loss_fn.reference_policy_kl_penalty: 0`."""

    max_failed_sample_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run stops when more than this fraction of a step's samples failed in the environment or the engine."""

    env_step_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for one step of an environment; past it the sample counts as failed."""

    val_period: int = Field(default=10, ge=0)
    """Steps from one validation to the next; 0: none in between."""

    val_at_start: bool = False
    """Validate before the first step."""

    val_at_end: bool = False
    """Validate after the last step."""

    max_val_samples: int = Field(default=256, ge=1)
    """Prompts of a validation at most."""

    val_batch_size: int = Field(default=256, ge=1)
    """Prompts of a validation batch."""

    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Samples of each validation prompt; with more than one, pass@k and best-of are reported."""

    not_yet: ClassVar = (
        NotYet("async_grpo", switched_off),
        NotYet("calculate_advantages_on_gpu", anything),
        NotYet("advantage_clip_low", one_of(None)),
        NotYet("advantage_clip_high", one_of(None)),
        NotYet("invalid_tool_call_advantage", one_of(None)),
        NotYet("malformed_thinking_advantage", one_of(None)),
        NotYet("val_start_at", one_of(-1, None)),
        NotYet("stop_at_validation_metric", one_of(None)),
        NotYet("stop_at_validation_threshold", one_of(None)),
    )

    @property
    def num_samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def num_prompts_per_batch(self) -> int:
        """Prompts of a generation batch: those of a step, or more with dynamic sampling."""
        return round(self.num_prompts_per_step * self.batch_multiplier)

    @property
    def validates(self) -> bool:
        """Whether the run ever validates."""
        return self.val_period > 0 or self.val_at_start or self.val_at_end

    @property
    def val_k_values(self) -> list[int]:
        """The k of pass@k and best-of-k in validation: powers of two, and all samples; none with one sample."""
        num_samples = self.val_num_generations_per_prompt
        if num_samples == 1:
            return []
        return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        estimator, group_size = self.adv_estimator, self.num_generations_per_prompt
        if estimator.name == "grpo" and estimator.use_leave_one_out_baseline and group_size < 2:
            yield (
                "num_generations_per_prompt",
                "a leave-one-out baseline needs at least 2 samples per prompt; set 2 or more, "
                "or grpo.use_leave_one_out_baseline=false",
            )
        elif estimator.name == "grpo" and group_size < 2:
            yield (
                "num_generations_per_prompt",
                "a group of 1 has no advantage; set 2 or more, or grpo.adv_estimator.name=reinforce_plus_plus",
            )
        if self.use_dynamic_sampling and group_size < 2:
            yield "use_dynamic_sampling", "every group of 1 would be dropped; set num_generations_per_prompt=2 or more"
        if self.batch_multiplier != 1 and not self.use_dynamic_sampling:
            yield "batch_multiplier", "only for dynamic sampling; set grpo.use_dynamic_sampling=true or leave it at 1"
        if (self.num_prompts_per_step * self.batch_multiplier) % 1:
            yield (
                "batch_multiplier",
                f"{self.batch_multiplier} x num_prompts_per_step={self.num_prompts_per_step} is not a whole number",
            )


class ClippedPGLossConfig(StrictModel):
    """The clipped policy-gradient loss with its variants."""

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
    """Lower bound of the weight, for `icepop` and `seq-mask-tis`."""

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

    not_yet: ClassVar = (NotYet("positive_example_nll_weight", one_of(0, 0.0, None)),)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from self._check_ratio()
        yield from self._check_importance_sampling()
        if self.length_normalizer is not None and not self.token_level_loss:
            yield "length_normalizer", "replaces the count of tokens, so it needs token_level_loss=true"

    def _check_ratio(self) -> Iterator[tuple[str, str]]:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            yield "sequence_level_importance_ratios", "GSPO averages over sequences: set loss_fn.token_level_loss=false"
        if self.use_cispo and self.disable_ppo_ratio:
            yield "use_cispo", "CISPO is made of the ratio; set disable_ppo_ratio=false"
        if self.use_cispo and self.sequence_level_importance_ratios:
            yield "use_cispo", "CISPO weights tokens; set sequence_level_importance_ratios=false"
        if self.ratio_clip_c is not None:
            if self.use_cispo or self.disable_ppo_ratio:
                switch = "use_cispo" if self.use_cispo else "disable_ppo_ratio"
                yield "ratio_clip_c", f"dual clip has no meaning with {switch}=true; set ratio_clip_c=null"
            if self.ratio_clip_c <= 1 + self.ratio_clip_max:
                yield "ratio_clip_c", f"must be above 1 + ratio_clip_max = {1 + self.ratio_clip_max:g} (3 is usual)"
        if self.disable_ppo_ratio and self.sequence_level_importance_ratios:
            yield "disable_ppo_ratio", "leaves no ratio to take per sequence; switch one of the two off"

    def _check_importance_sampling(self) -> Iterator[tuple[str, str]]:
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        key = "truncated_importance_sampling_ratio" if high is not None else "truncated_importance_sampling_ratio_min"
        if low is None and high is None:
            return
        if not self.use_importance_sampling_correction:
            yield key, "bounds the correction, which is off; set loss_fn.use_importance_sampling_correction=true"
        if kind is None:
            yield key, "needs truncated_importance_sampling_type: tis, icepop or seq-mask-tis"
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            yield "truncated_importance_sampling_type", "seq-mask-tis does not go with GSPO; use tis or icepop"
        if low is not None and high is not None and low >= high:
            yield (
                "truncated_importance_sampling_ratio_min",
                f"{low} is not below truncated_importance_sampling_ratio={high}",
            )


class GRPOMasterConfig(StrictModel):
    """A whole GRPO run."""

    grpo: GRPOConfig
    """GRPO: batch shape, advantages, sampling strategy, validation."""

    loss_fn: ClippedPGLossConfig = ClippedPGLossConfig()
    """The clipped policy-gradient loss with its variants."""

    policy: RolloutPolicyConfig
    """Policy: model, tokenizer, batch sizes, optimizer, sharding, generation."""

    data: DataConfig
    """Prompts: training and validation datasets, and how a row becomes a prompt."""

    env: EnvSection
    """Environments that answer and reward samples, by name."""

    logger: LoggerConfig = LoggerConfig()
    """Logs: console, metrics.jsonl, TensorBoard, Weights & Biases."""

    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """Checkpoints: where, when, which are kept."""

    cluster: ClusterConfig = ClusterConfig()
    """Machines: how many nodes, and how many GPUs or CPU workers of each."""

    not_yet: ClassVar = (
        NotYet("data_plane", switched_off),
        NotYet("on_policy_distillation", switched_off),
        NotYet("reward_penalties", one_of({}, None)),
        NotYet("async_rl", one_of({}, None)),
        NotYet("env.should_use_nemo_gym", one_of(False, None)),
        NotYet("env.should_log_nemo_gym_responses", anything),
    )

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from check_run(self)

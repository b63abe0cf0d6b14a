"""Configuration of runs that learn from the rows of a dataset: SFT, DPO and reward models."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.loop import (
    NO_LIMIT,
    LoopConfig,
    LossConfig,
    Problems,
    RunConfig,
    check_layout,
    data_parallel_size,
    saving_rules,
)
from nemo_rl.config.rules import Derived, StrictModel, remedy, value_of
from nemo_rl.data.config import DEFAULT_VALIDATION_SET, AnyExampleDataConfig, ExampleDataConfig, PreferenceDataConfig
from nemo_rl.models.policy.config import PolicyConfig, check_batching


class SupervisedConfig(LoopConfig):
    """The loop of a run that learns from rows."""

    val_batches: int = 8
    """Rows of each validation set at most, in units of `val_global_batch_size`; 0 or less: all of them."""

    val_global_batch_size: int = Field(default=32, ge=1)
    """See `val_batches`."""

    val_micro_batch_size: int = Field(default=1, ge=1)
    """Rows of one forward pass of a rank in validation, unless micro-batches are made by tokens."""

    @property
    def max_val_rows(self) -> int | None:
        """Rows of each validation set at most; None: all."""
        return self.val_batches * self.val_global_batch_size if self.val_batches > 0 else None


class SupervisedMasterConfig(RunConfig):
    """A whole run that learns from rows."""

    policy: PolicyConfig

    loss_fn: LossConfig = LossConfig()
    """A loss of your own in place of the algorithm's."""

    sequences_per_row: ClassVar[int] = 1

    loss_metrics: ClassVar[frozenset[str]]  # names that the loss reports

    @property
    def loop(self) -> SupervisedConfig:
        return value_of(self, self.section)

    @property
    def examples(self) -> AnyExampleDataConfig:
        """The section `data`."""
        return value_of(self, "data")

    @property
    def train_metrics(self) -> frozenset[str]:
        return metric_names.TRAINING | metric_names.ROWS | self.reported_by_loss

    @property
    def loss_section(self) -> StrictModel:
        """The settings of the loss: the algorithm's section, where that has settings of it."""
        return self.loop if isinstance(self.loop, DPOLossConfig | RewardModelLossConfig) else self.loss_fn

    @property
    def reported_by_loss(self) -> frozenset[str]:
        """Names that the loss reports, as far as they are known."""
        return frozenset() if self.has_own_loss else self.loss_metrics

    @property
    def val_metrics(self) -> frozenset[str]:
        sets = {name for name, _ in self.examples.validation_sets}
        if not sets or any(dataset.split_validation_size > 0 for dataset in self.examples.train):
            sets.add(DEFAULT_VALIDATION_SET)
        per_set = {f"validation-{name}_{metric}" for name in sets for metric in self.reported_by_loss | {"loss"}}
        return frozenset(per_set | {"val_loss"})

    rules: ClassVar = {
        "data.max_input_seq_length > {policy.max_total_sequence_length}": (
            "{data.max_input_seq_length} is more than policy.max_total_sequence_length="
            "{policy.max_total_sequence_length} -> data.max_input_seq_length={policy.max_total_sequence_length}"
        ),
        "policy.router_replay.enabled": (
            "nothing is generated that experts could be taken from -> policy.router_replay.enabled=false"
        ),
        **saving_rules("policy"),
    }

    def cross_checks(self) -> Problems:
        num_ranks = data_parallel_size(self.policy, self.cluster)
        fix = f"make it a multiple of {num_ranks}"
        yield from check_batching(self.policy, num_ranks, fix=fix, sequences_per_sample=self.sequences_per_row)
        yield from check_layout(self.policy, self.cluster)
        yield from self.check_validation(has_data=self.examples.has_validation)
        yield from self.check_metric_names()


_NEEDS_LANGUAGE_MODEL = {
    "policy.reward_model_cfg.enabled": "is for reward models (run_rm.py) -> policy.reward_model_cfg.enabled=false"
}


class SFTConfig(SupervisedConfig):
    """SFT: what carries loss, validation."""

    roles_to_train_on: list[str] | Literal["all"] = Field(default_factory=lambda: ["assistant"])
    """Roles whose messages carry loss; `all`: every token carries loss."""

    only_unmask_final: bool = False
    """Only the last message carries loss."""


class SFTMasterConfig(SupervisedMasterConfig):
    """A whole SFT run."""

    section: ClassVar = "sft"
    cpu_config: ClassVar[str] = "examples/configs/sft_cpu.yaml"
    loss_metrics: ClassVar = metric_names.NLL

    rules: ClassVar = _NEEDS_LANGUAGE_MODEL

    sft: SFTConfig = SFTConfig()

    data: ExampleDataConfig
    """Conversations: training and validation datasets, and how a row becomes tokens."""


class DPOLossConfig(StrictModel):
    """The loss of DPO. The section `dpo` inherits it."""

    reference_policy_kl_penalty: float = Field(default=0.05, ge=0)
    """Beta: how strongly the policy is held to the reference policy (IPO calls it tau). With 0 the preference loss is
    constant, and only the SFT term trains."""

    preference_loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """`sigmoid`: DPO (with `label_smoothing`: cDPO); `ipo`: squared distance to a fixed margin, always with average
    log-probabilities; `hinge`: SLiC; `robust`: unbiased under labels that are flipped with probability
    `label_smoothing`."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that the labels of a pair are the wrong way round, for `sigmoid` and `robust`."""

    preference_average_log_probs: bool = False
    """Compare log-probabilities per token in place of their sums (length-normalised DPO). Log-ratios are then smaller
    by the length of the answers, so that a larger beta is usual. `ipo` does so in any case."""

    sft_average_log_probs: Annotated[bool, Derived("${.preference_average_log_probs}")]
    """The same for the SFT term."""

    preference_loss_weight: float = Field(default=1.0, ge=0)
    """Weight of the preference loss."""

    sft_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of the chosen sequences; 0: none."""

    rules: ClassVar = {
        "label_smoothing: preference_loss=robust requires label_smoothing > 0": (
            "robust needs the probability of a flipped label -> label_smoothing=0.1"
        ),
        "label_smoothing > 0 excludes preference_loss=[ipo, hinge]": (
            "has no meaning with preference_loss={preference_loss} -> label_smoothing=0 | preference_loss=sigmoid"
        ),
        "reference_policy_kl_penalty=0 excludes sft_loss_weight=0": (
            "makes the preference loss constant, and sft_loss_weight is 0, so nothing would be learned -> "
            "reference_policy_kl_penalty=0.05 | sft_loss_weight=1"
        ),
        "reference_policy_kl_penalty=0 excludes preference_loss=ipo": (
            "is the tau that ipo divides by -> reference_policy_kl_penalty=0.05"
        ),
        "preference_loss_weight=0 excludes sft_loss_weight=0": (
            "and sft_loss_weight are both 0, so nothing would be learned -> preference_loss_weight=1 | "
            "sft_loss_weight=1"
        ),
    }


class RewardModelLossConfig(StrictModel):
    """The Bradley-Terry loss. The section `rm` inherits it."""

    use_margin: bool = False
    """Ask the chosen sequence to score higher than the rejected one by the margin that the row states."""


class DPOConfig(SupervisedConfig, DPOLossConfig):
    """DPO: the loss and its variants, reference logprobs, validation."""

    precompute_reference_logprobs: bool = False
    """Compute the reference policy's logprobs of all rows once, before the first step, in place of a pass of every
    step: no second copy of the weights is kept then, and further epochs cost less."""


class PreferenceMasterConfig(SupervisedMasterConfig):
    """A whole run that learns from pairs. All batch sizes count pairs."""

    sequences_per_row: ClassVar[int] = 2

    data: PreferenceDataConfig
    """Pairs: training and validation datasets, and how a row becomes tokens."""


class DPOMasterConfig(PreferenceMasterConfig):
    """A whole DPO run. All batch sizes count pairs."""

    section: ClassVar = "dpo"
    cpu_config: ClassVar[str] = "examples/configs/dpo_cpu.yaml"
    loss_metrics: ClassVar = metric_names.DPO

    rules: ClassVar = _NEEDS_LANGUAGE_MODEL

    dpo: DPOConfig

    def cross_checks(self) -> Problems:
        yield from super().cross_checks()
        if self.dpo.precompute_reference_logprobs and any(dataset.streaming for dataset in self.data.train):
            yield (
                "dpo.precompute_reference_logprobs",
                f"needs all rows before the first step; {remedy('dpo.precompute_reference_logprobs=false')}",
            )


class RMConfig(SupervisedConfig, RewardModelLossConfig):
    """Reward model: the loss, validation."""

    max_num_steps: Annotated[int, BeforeValidator(lambda value: NO_LIMIT if value == -1 else value)] = Field(
        default=NO_LIMIT, ge=1
    )
    """Steps of the run at most; -1: as many as the epochs have."""


class RMMasterConfig(PreferenceMasterConfig):
    """A whole reward-model run. All batch sizes count pairs."""

    section: ClassVar = "rm"
    cpu_config: ClassVar[str] = "examples/configs/rm_cpu.yaml"
    loss_metrics: ClassVar = metric_names.REWARD_MODEL

    rules: ClassVar = {
        "policy.reward_model_cfg requires policy.reward_model_cfg.enabled and "
        "policy.reward_model_cfg.reward_model_type=bradley_terry": (
            "a reward model is trained with {enabled: true, reward_model_type: bradley_terry} -> "
            "policy.reward_model_cfg.enabled=true and policy.reward_model_cfg.reward_model_type=bradley_terry"
        ),
    }

    rm: RMConfig = RMConfig()

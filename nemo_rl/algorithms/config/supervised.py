"""Configuration of runs that learn from the rows of a dataset: SFT, DPO and reward models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.checks import (
    check_batch_size,
    check_layout,
    check_saving,
    check_validation,
    data_parallel_size,
)
from nemo_rl.algorithms.config.loop import LoopConfig, RunConfig
from nemo_rl.algorithms.config.loss import DPOLossConfig, RewardModelLossConfig
from nemo_rl.data.config import DEFAULT_VALIDATION_SET, AnyExampleDataConfig, ExampleDataConfig, PreferenceDataConfig
from nemo_rl.models.policy.config import PolicyConfig


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
    """Policy: model, tokenizer, batch sizes, optimizer, sharding."""

    sequences_per_row: ClassVar[int] = 1

    @property
    @abstractmethod
    def loop(self) -> SupervisedConfig:
        """The algorithm's own section."""

    @property
    @abstractmethod
    def examples(self) -> AnyExampleDataConfig:
        """The section `data`."""

    @property
    @abstractmethod
    def loss_metrics(self) -> frozenset[str]:
        """What the loss reports."""

    @property
    def train_metrics(self) -> frozenset[str]:
        """What its steps report under `train/`."""
        return metric_names.TRAINING | metric_names.ROWS | self.loss_metrics

    @property
    def val_metrics(self) -> frozenset[str]:
        """What its validations report under `validation/`."""
        sets = {name for name, _ in self.examples.validation_sets}
        if not sets or any(dataset.split_validation_size > 0 for dataset in self.examples.train):
            sets.add(DEFAULT_VALIDATION_SET)
        per_set = {f"validation-{name}_{metric}" for name in sets for metric in self.loss_metrics | {"loss"}}
        return frozenset(per_set | {"val_loss"})

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        num_ranks = data_parallel_size(self.policy, self.cluster)
        fix = f"make it a multiple of {num_ranks}"
        yield from check_batch_size(self.policy, self.cluster, fix=fix, sequences_per_sample=self.sequences_per_row)
        yield from check_layout(self.policy, self.cluster)
        yield from check_saving(self.checkpointing, self.policy)
        longest = self.policy.max_total_sequence_length
        if self.examples.max_input_seq_length > longest:
            yield (
                "data.max_input_seq_length",
                f"{self.examples.max_input_seq_length} is more than policy.max_total_sequence_length={longest}; use at "
                "most that",
            )
        if self.policy.router_replay.enabled:
            yield "policy.router_replay.enabled", "nothing is generated whose experts could be taken; set it to false"
        yield from check_validation(self, self.loop, self.examples.has_validation)
        yield from metric_names.check_metric_names(self, self.loop)


# -- SFT


class SFTConfig(SupervisedConfig):
    """SFT: what carries loss, validation."""

    roles_to_train_on: list[str] | Literal["all"] = Field(default_factory=lambda: ["assistant"])
    """Roles whose messages are learned; `all`: every token."""

    only_unmask_final: bool = False
    """Learn the last message alone."""


class SFTMasterConfig(SupervisedMasterConfig):
    """A whole SFT run."""

    section: ClassVar = "sft"

    sft: SFTConfig = SFTConfig()
    """SFT: what carries loss, validation."""

    data: ExampleDataConfig
    """Conversations: training and validation datasets, and how a row becomes tokens."""

    @property
    def loop(self) -> SFTConfig:
        return self.sft

    @property
    def examples(self) -> ExampleDataConfig:
        return self.data

    @property
    def loss_metrics(self) -> frozenset[str]:
        return metric_names.NLL

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        yield from _needs_language_model(self.policy)


def _needs_language_model(policy: PolicyConfig) -> Iterator[tuple[str, str]]:
    if policy.reward_model_cfg.enabled:
        yield "policy.reward_model_cfg.enabled", "is for reward models (run_rm.py); set it to false"


# -- DPO


class DPOConfig(SupervisedConfig, DPOLossConfig):
    """DPO: the loss and its variants, reference logprobs, validation."""

    precompute_reference_logprobs: bool = False
    """Compute the reference policy's logprobs of all rows once, before the first step, in place of a pass of every
    step: no second copy of the weights is kept then, and further epochs cost less."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from SupervisedConfig.cross_checks(self)
        yield from DPOLossConfig.cross_checks(self)


class PreferenceMasterConfig(SupervisedMasterConfig):
    """A whole run that learns from pairs. All batch sizes count pairs."""

    sequences_per_row: ClassVar[int] = 2

    data: PreferenceDataConfig
    """Pairs: training and validation datasets, and how a row becomes tokens."""

    @property
    def examples(self) -> PreferenceDataConfig:
        return self.data


class DPOMasterConfig(PreferenceMasterConfig):
    """A whole DPO run. All batch sizes count pairs."""

    section: ClassVar = "dpo"

    dpo: DPOConfig
    """DPO: the loss and its variants, reference logprobs, validation."""

    @property
    def loop(self) -> DPOConfig:
        return self.dpo

    @property
    def loss_metrics(self) -> frozenset[str]:
        return metric_names.DPO

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        yield from _needs_language_model(self.policy)
        if self.dpo.precompute_reference_logprobs and any(dataset.streaming for dataset in self.data.train):
            yield (
                "dpo.precompute_reference_logprobs",
                "needs all rows before the first step; set it to false, or streaming=false of data.train",
            )


# -- reward models


class RMConfig(SupervisedConfig, RewardModelLossConfig):
    """Reward model: the loss, validation."""

    max_num_steps: Annotated[int, BeforeValidator(lambda value: 1_000_000 if value == -1 else value)] = Field(
        default=1_000_000, ge=1
    )
    """Steps of the run at most; -1: as many as the epochs have."""


class RMMasterConfig(PreferenceMasterConfig):
    """A whole reward-model run. All batch sizes count pairs."""

    section: ClassVar = "rm"

    rm: RMConfig = RMConfig()
    """Reward model: the loss, validation."""

    @property
    def loop(self) -> RMConfig:
        return self.rm

    @property
    def loss_metrics(self) -> frozenset[str]:
        return metric_names.REWARD_MODEL

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        reward_model = self.policy.reward_model_cfg
        if not reward_model.enabled or reward_model.reward_model_type != "bradley_terry":
            yield (
                "policy.reward_model_cfg",
                "a reward model is trained with {enabled: true, reward_model_type: bradley_terry}",
            )

"""Configuration of the loop that all algorithms share: how long a run is, when it validates, when it stops early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.utils.config import CheckpointingConfig, LoggerConfig


class EarlyStoppingConfig(StrictModel):
    """The run ends when a metric of the validations is good enough, or gets no better."""

    metric_name: str | None = None
    """Metric to watch, `val:<metric>`; null: the run is never stopped early."""

    higher_is_better: bool = False
    """Whether a larger value is the better one."""

    patience: int | None = Field(default=3, ge=1)
    """The run ends after so many validations in a row without a new best value; null: it does not."""

    min_delta: float = Field(default=0.0, ge=0)
    """A value counts as a new best one when it is better by more than this."""

    threshold: float | None = None
    """The run ends when the metric is at least as good as this; null: it does not."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.metric_name is not None and not self.metric_name.startswith("val:"):
            yield "metric_name", f'must be "val:<metric>" or null, e.g. "val:val_loss" (got {self.metric_name!r})'
        if self.metric_name is not None and self.patience is None and self.threshold is None:
            yield "patience", "and threshold are both null, so nothing would stop the run; set one of them"


class LoopConfig(StrictModel):
    """The length of a run, its seed and its validations."""

    max_num_epochs: int = Field(default=1, ge=1)
    """The run ends after so many passes over the training data or after `max_num_steps`, whichever comes first."""

    max_num_steps: int = Field(default=1_000_000, ge=1)
    """Steps of the run at most."""

    seed: int = Field(default=42, ge=0)
    """Seed of everything random."""

    val_period: int = Field(default=10, ge=0)
    """Steps from one validation to the next; 0: none in between."""

    val_at_start: bool = False
    """Validate before the first step."""

    val_at_end: bool = False
    """Validate after the last step."""

    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    """End the run when a metric of the validations is good enough, or gets no better."""

    @property
    def validates(self) -> bool:
        """Whether the run ever validates."""
        return self.val_period > 0 or self.val_at_start or self.val_at_end


class RunConfig(StrictModel):
    """The sections that every run has. `section` is the name of the algorithm's own."""

    section: ClassVar[str]

    logger: LoggerConfig = LoggerConfig()
    """Logs: console, metrics.jsonl, TensorBoard, Weights & Biases."""

    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """Checkpoints: where, when, which are kept."""

    cluster: ClusterConfig = ClusterConfig()
    """Machines: how many nodes, and how many GPUs or CPU workers of each."""

    @property
    def training_cluster(self) -> ClusterConfig:
        """The machines that train."""
        return self.cluster

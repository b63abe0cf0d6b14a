"""Configuration of what a run writes: logs and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.config.rules import NotYet, anything, one_of

_DURATION = re.compile(r"\d+:\d{2}:\d{2}:\d{2}")


class WandbConfig(StrictModel):
    """Weights & Biases."""

    project: str = "nemo-rl"
    """Project of the run."""

    name: str | None = None
    """Name of the run; null: chosen by wandb."""

    entity: str | None = None
    """Team or user; null: the default of the account."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes under the run's log folder, for `wandb sync` later."""


class LoggerConfig(StrictModel):
    """Logs: console, metrics.jsonl, TensorBoard, Weights & Biases."""

    log_dir: str = "logs"
    """Folder of all runs; each run writes into its own `exp_NNN` below it."""

    num_val_samples_to_print: int = Field(default=0, ge=0)
    """Rollouts of each validation shown on the console."""

    tensorboard_enabled: bool = False
    """Write TensorBoard event files into the run's folder."""

    wandb_enabled: bool = False
    """Report to Weights & Biases."""

    wandb: WandbConfig = WandbConfig()
    """Used when `wandb_enabled`."""

    not_yet: ClassVar = (
        NotYet("mlflow_enabled", one_of(False, None)),
        NotYet("swanlab_enabled", one_of(False, None)),
        NotYet("mlflow", anything),
        NotYet("swanlab", anything),
        NotYet("tensorboard", one_of({}, None), harmless=True),
        NotYet("monitor_gpus", one_of(False, None), harmless=True),
        NotYet("gpu_monitoring", anything),
    )


class CheckpointingConfig(StrictModel):
    """Checkpoints: where, when, which are kept."""

    enabled: bool = True
    """Save checkpoints, and resume from the newest sound one."""

    checkpoint_dir: str = "results/grpo"
    """Folder of `step_N`."""

    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints: `val:<metric>`, `train:<metric>`, or null to rank by age."""

    higher_is_better: bool = True
    """Whether a larger `metric_name` is the better one."""

    keep_top_k: int | None = Field(default=3, ge=1)
    """Checkpoints kept besides the latest; null keeps all."""

    save_period: int = Field(default=10, ge=1)
    """Steps from one checkpoint to the next. The last step is always saved."""

    checkpoint_must_save_by: str | None = None
    """Time after the start, as DD:HH:MM:SS, by which the run saves and ends; null: no limit."""

    save_optimizer: bool = True
    """Save the optimizer and the scheduler; without them a run cannot be resumed."""

    model_save_format: Literal["torch_save", "safetensors"] | None = "torch_save"
    """Format of the sharded policy weights: torch.distributed.checkpoint with its own files or with safetensors;
    null: `torch_save`."""

    save_consolidated: bool = False
    """Also write the weights as one Hugging Face model directory."""

    async_save: bool = False
    """Train on while a checkpoint is written. Takes host memory for one more copy of what is saved."""

    not_yet: ClassVar = (
        NotYet("model_cache_dir", one_of(None)),
        NotYet("model_repo_id", one_of(None)),
        NotYet("is_peft", one_of(False, None)),
        NotYet("peft_config", one_of(None)),
        NotYet("is_async", one_of(False, None)),
    )

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        limit = self.checkpoint_must_save_by
        if limit is not None and not _DURATION.fullmatch(limit):
            yield "checkpoint_must_save_by", f'must be days:hours:minutes:seconds such as "00:03:45:00" (got {limit!r})'
        if self.metric_name is not None and not re.fullmatch(r"(val|train):.+", self.metric_name):
            yield (
                "metric_name",
                f'must be "val:<metric>", "train:<metric>" or null, e.g. "val:accuracy" (got {self.metric_name!r})',
            )

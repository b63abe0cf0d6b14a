"""Configuration that all algorithms share: the length of a run, validation, early stopping, and their checks."""

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field

from nemo_rl.algorithms.config.workers import ChoosesWorkers
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import StrictModel, accepted_by, remedy, round_up, value_of, written
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.layout import training_problems, training_sizes
from nemo_rl.models.policy.megatron.config import device_problems
from nemo_rl.types import LossInputs
from nemo_rl.utils.config import CheckpointingConfig, ClusterConfig, LoggerConfig, PerformanceConfig
from nemo_rl.utils.files import flatten_dict

NO_LIMIT = 1_000_000
"""`max_num_steps` of a run that ends with its epochs."""

Problems = Iterator[tuple[str, str]]
"""(dotted key, message); the message says which values would work."""


def _validation_metric(name: str) -> None:
    if not name.startswith("val:"):
        raise ValueError(f'must be "val:<metric>" or null, e.g. "val:val_loss" (got {name!r})')


class EarlyStoppingConfig(StrictModel):
    """The run ends when a metric of the validations reaches a threshold, or no longer improves."""

    metric_name: Annotated[str, accepted_by(_validation_metric)] | None = None
    """Metric to watch, `val:<metric>`; null: the run is never stopped early."""

    higher_is_better: bool = False
    """Whether a larger value is the better one."""

    patience: int | None = Field(default=3, ge=1)
    """Number of validations in a row without a new best value after which the run ends; null: it goes on."""

    min_delta: float = Field(default=0.0, ge=0)
    """A value counts as a new best one when it is better by more than this."""

    threshold: float | None = None
    """Value of the metric at which the run ends; null: none."""

    rules: ClassVar = {
        "patience: metric_name and patience=null excludes threshold=null": (
            "patience and threshold are both null, so nothing would stop the run; set one of them"
        ),
    }


class LoopConfig(StrictModel):
    """The length of a run, its seed and its validations."""

    max_num_epochs: int = Field(default=1, ge=1)
    """Passes over the training data. The run ends after them or after `max_num_steps` steps, whichever comes first."""

    max_num_steps: int = Field(default=NO_LIMIT, ge=1)
    """Steps of the run at most."""

    seed: int = Field(default=42, ge=0)
    """Seed of everything random."""

    val_period: int = Field(default=10, ge=0)
    """Steps from one validation to the next; 0: none in between."""

    val_start_at: int = Field(default=-1, ge=-1)
    """First step after which a periodic validation may come; -1: any. At the start and at the end nothing changes."""

    val_at_start: bool = False
    """Validate before the first step."""

    val_at_end: bool = False
    """Validate after the last step."""

    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    """End the run when a metric of the validations reaches a threshold, or no longer improves."""

    def validates_after(self, step: int) -> bool:
        """Whether the period asks for a validation after this step."""
        return self.val_period > 0 and step % self.val_period == 0 and step >= self.val_start_at

    @property
    def validates(self) -> bool:
        """Whether the run ever validates."""
        return self.val_period > 0 or self.val_at_start or self.val_at_end


class LossConfig(StrictModel):
    """The loss."""

    inputs_type: ClassVar[type[LossInputs]] = LossInputs
    """The inputs of the user's loss if it names none itself."""

    type: str | None = None
    """Import path of the class of a loss of your own (`my_module:MyLoss`); null: the loss of the algorithm."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that class."""

    rules: ClassVar = {
        "kwargs requires type": "is for a loss of your own; name its class in {section}.type, or leave kwargs out",
    }


class RunConfig(ChoosesWorkers):
    """The sections that every run has. `section` is the name of the algorithm's own."""

    # --help prints the docstrings of sections. Pydantic finds them by parsing source code, which is slow.
    model_config = ConfigDict(use_attribute_docstrings=True)

    section: ClassVar[str]
    trained: ClassVar[tuple[str, ...]] = ("policy",)  # the sections of the models that have an optimizer
    cpu_config: ClassVar[str] = "examples/configs/grpo_math_cpu.yaml"  # for machines without a GPU

    logger: LoggerConfig = LoggerConfig()
    """Logs: console, metrics.jsonl, trackers."""

    checkpointing: CheckpointingConfig = CheckpointingConfig()

    cluster: ClusterConfig = ClusterConfig()
    """Machines: how many nodes, and how many GPUs or CPU workers of each."""

    performance: PerformanceConfig = PerformanceConfig()
    """Profiles."""

    @property
    def algorithm(self) -> str:
        """The name of the algorithm's own section."""
        return self.section

    @property
    def loop(self) -> LoopConfig:
        """The algorithm's own section."""
        return value_of(self, self.section)

    @property
    @abstractmethod
    def train_metrics(self) -> frozenset[str]:
        """Names that steps report under `train/`, as far as the configuration decides them."""

    @property
    @abstractmethod
    def val_metrics(self) -> frozenset[str]:
        """Names that validations report under `validation/`."""

    @property
    def known_metrics(self) -> frozenset[str]:
        """The names of both as they are logged."""
        return frozenset(
            {f"train/{name}" for name in self.train_metrics} | {f"validation/{name}" for name in self.val_metrics}
        )

    @property
    def has_own_loss(self) -> bool:
        """Whether the configuration names a loss of the user's, with metrics that only the run knows."""
        loss = dict(self).get("loss_fn")  # not every algorithm lets one replace its loss
        return isinstance(loss, LossConfig) and loss.type is not None

    def continuing(self, saved: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """The configuration of a run that continues one of the configuration `saved`, and a line for each difference.

        The hyperparameters of an optimizer and its schedule are those of the checkpoint, unless the model's
        `override_opt_param_scheduler` is true. So is a number of CPU workers that this run chose itself. A loss, and
        everything else that a step computes, is this run's.
        """
        machines = self.with_workers_of(saved).cluster
        own, lines = {**self.model_dump(), "cluster": machines.model_dump()}, []
        before, after = flatten_dict(saved), flatten_dict(own)
        for name in self.trained:
            prefixes = _hyperparameters(name, is_megatron=own[name]["megatron_cfg"]["enabled"])
            key = f"{name}.override_opt_param_scheduler"
            for changed, was, now in _changes(before, after, prefixes):
                if own[name]["override_opt_param_scheduler"]:
                    lines.append(f"{changed}: {now} applies and not the checkpoint's {was}, as {key}=true says")
                    continue
                lines.append(f"{changed}: the checkpoint's {was} applies and not {now}, unless {key}=true")
                section, _, last = changed.rpartition(".")
                if changed in before:
                    value_of(own, section)[last] = before[changed]
                else:
                    del value_of(own, section)[last]
        of_step = [f"{self.section}.{key}" for key in own[self.section] if key not in LoopConfig.model_fields]
        for changed, was, now in _changes(before, after, [*of_step, "loss_fn", "value_loss_fn"]):
            lines.append(f"{changed}: {now} applies; it was {was} before")
        config = type(self).model_validate(own)
        return config.with_workers(machines.workers_per_node, machines.reason) if machines.reason else config, lines

    @property
    def training_cluster(self) -> ClusterConfig:
        """The machines that train."""
        return self.cluster

    @property
    def gpus_beside_cluster(self) -> int:
        """GPUs of a node that environments and teachers need in addition to `cluster`."""
        return 0

    @property
    def processes_per_worker(self) -> int:
        """Processes and threads of one worker of each group, as measured."""
        return 45

    @property
    def no_validation(self) -> str:
        """The way to a run that does not validate, for a remedy."""
        loop = self.loop
        on = {"val_period=0": True, "val_at_start=false": loop.val_at_start, "val_at_end=false": loop.val_at_end}
        off = [f"{self.section}.{setting}" for setting, is_on in on.items() if is_on]
        return " and ".join(
            [*off, *(f"{key}=null" for key, name in self._chosen_metrics().items() if name.startswith("val:"))]
        )

    def check_validation(self, *, has_data: bool) -> Problems:
        """Check that there is validation data if the run validates."""
        loop, section = self.loop, self.section
        if loop.validates and not has_data:
            yield (
                "data.validation",
                f"nothing to validate on ({section}.val_period={loop.val_period}, "
                f"val_at_start={written(loop.val_at_start)}, val_at_end={written(loop.val_at_end)}); name a dataset, "
                f"hold rows out with split_validation_size of a training dataset, or {remedy(self.no_validation)}",
            )

    def _chosen_metrics(self) -> dict[str, str]:
        """Key -> metric that it names: those that rank checkpoints and stop the run."""
        saves = self.checkpointing
        used = {f"{self.section}.early_stopping.metric_name": self.loop.early_stopping.metric_name}
        used |= {"checkpointing.metric_name": saves.metric_name if saves.enabled else None}
        return {key: name for key, name in used.items() if name is not None}

    def check_metric_names(self, free_prefixes: Collection[str] = ()) -> Problems:
        """Check that the metrics that rank checkpoints and stop the run are reported when they are needed.

        Names that begin with one of `free_prefixes` and a slash are not checked: they are not known before the run.
        """
        saves, val_period = self.checkpointing, self.loop.val_period
        for key, name in self._chosen_metrics().items():
            prefix, _, metric = name.partition(":")
            ranks_saves = key == "checkpointing.metric_name" and saves.keep_top_k is not None
            available = self.val_metrics if prefix == "val" else self.train_metrics
            if prefix == "val" and val_period == 0:
                fix = remedy(f"{self.section}.val_period={saves.save_period}", f"{key}=null")
                yield key, f"{name} needs validation; {fix}"
            elif not (metric in available or self.has_own_loss or metric.partition("/")[0] in free_prefixes):
                more = ""
                if prefix == "val" and re.fullmatch(r"(pass_at|best_of)_\d+|pass_k|pass@\w+", metric):
                    more = f" ({self.section}.val_num_generations_per_prompt decides on pass_at_k and pass_k)"
                fix = did_you_mean(metric, sorted(available)).replace("you mean ", f"you mean {prefix}:")
                yield key, f"no run with this configuration produces {name}{more}; {fix}"
            elif prefix == "val" and ranks_saves and saves.save_period % val_period:
                yield (
                    "checkpointing.save_period",
                    f"{saves.save_period} is no multiple of {self.section}.val_period={val_period}: checkpoints "
                    f"between validations have no {metric} that could rank them; "
                    + remedy(
                        f"checkpointing.save_period={round_up(saves.save_period, val_period)}",
                        f"{self.section}.val_period={math.gcd(saves.save_period, val_period)}",
                    ),
                )


def _hyperparameters(name: str, *, is_megatron: bool) -> list[str]:
    """Beginnings of the keys of the optimizer and the schedule of model `name`."""
    parts = ("megatron_cfg.optimizer", "megatron_cfg.scheduler") if is_megatron else ("optimizer.kwargs", "scheduler")
    return [f"{name}.{part}" for part in (*parts, "scheduler_step_per", "draft.lr")]


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefixes: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """(key, value before, value after) of the keys, equal to one of `prefixes` or below it, whose values differ.

    Of the keys that only one has, those of arguments count: others belong to another version of this library.
    """
    for key in {**before, **after}:
        is_meant = any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
        is_comparable = ".kwargs." in key or (key in before and key in after)
        was, now = (written(tree[key]) if key in tree else "default" for tree in (before, after))
        if is_meant and is_comparable and was != now:
            yield key, was, now


# Checks of one model of a run. `key` is the name of its section: `policy`, `value`, `teacher`.


def saving_rules(key: str) -> dict[str, str]:
    """Rules of a run about checkpoints of the model `key`."""
    return {
        f"checkpointing.model_save_format=safetensors and checkpointing.enabled excludes {key}.megatron_cfg.enabled": (
            f"safetensors hold one part of a tensor per rank, and {key}.megatron_cfg has several (save_consolidated "
            "writes safetensors besides) -> checkpointing.model_save_format=torch_save"
        ),
        f"{key}.megatron_cfg.optimizer.optimizer_cpu_offload and {key}.megatron_cfg.enabled and checkpointing.enabled "
        f"excludes {key}.precision=float32": (
            f"not supported yet: checkpoints of it with {key}.precision=float32 -> {key}.precision=bfloat16 | "
            f"{key}.megatron_cfg.optimizer.optimizer_cpu_offload=false"
        ),
    }


def data_parallel_size(policy: PolicyConfig, cluster: ClusterConfig) -> int | None:
    """Ranks that hold different samples; None if the layout does not fit the cluster (`check_layout` says why)."""
    if list(training_problems(policy, cluster.num_workers)):
        return None
    return training_sizes(policy, cluster.num_workers).data_parallel


def check_layout(policy: PolicyConfig, cluster: ClusterConfig) -> Problems:
    """Check that the layout of a policy fits its ranks, and that its devices support it."""
    yield from training_problems(policy, cluster.num_workers)
    if policy.megatron_cfg.enabled:
        yield from device_problems(policy.megatron_cfg, use_gpus=cluster.use_gpus)

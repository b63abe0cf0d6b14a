"""What is reported of each task of a run that has several: `<task>/<metric>`.

A task is a dataset with its environment, processor and prompt files, and has the dataset's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_rl.algorithms import metric_names
from nemo_rl.algorithms.metrics import rollout_metrics, validation_metrics
from nemo_rl.types import GroupHandle


def task_step_metrics(
    handles: Sequence[GroupHandle], tasks: Sequence[str], *, current_weight_version: int
) -> dict[str, float]:
    """Of each task: the number of its samples in this step and, where it has some, part of `rollout_metrics`."""

    def of_task(groups: Sequence[GroupHandle]) -> dict[str, float]:
        metrics = rollout_metrics(groups, current_weight_version=current_weight_version)
        return {name: metrics[name] for name in sorted(metric_names.TASK)}

    return _by_task(handles, tasks, of_task)


def task_validation_metrics(
    handles: Sequence[GroupHandle], tasks: Sequence[str], *, k_values: Sequence[int] = ()
) -> dict[str, float]:
    """Of each task: the number of its samples and, where it has some, its `validation_metrics`."""
    return _by_task(handles, tasks, lambda groups: validation_metrics(groups, k_values=k_values))


def _by_task(
    handles: Sequence[GroupHandle],
    tasks: Sequence[str],
    metrics_of: Callable[[Sequence[GroupHandle]], dict[str, float]],
) -> dict[str, float]:
    if len(tasks) < 2:  # what is known of the run is known of its only task
        return {}
    metrics: dict[str, float] = {}
    for task in tasks:
        groups = [handle for handle in handles if handle.task_name == task]
        metrics[f"{task}/num_samples"] = float(sum(len(handle.samples) for handle in groups))
        if groups:
            metrics |= {f"{task}/{name}": value for name, value in metrics_of(groups).items()}
    return metrics

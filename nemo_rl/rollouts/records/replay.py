"""Recorded rollouts in place of new ones: no engine, no environment, the groups of each step as they once came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.records.record import StepIndex, read_index, recorded_steps, step_folder
from nemo_rl.rollouts.rollout_worker import RolloutWorkerSettings
from nemo_rl.types import GroupHandle


class RecordedRollouts(RolloutCollector):
    """A collector of groups that were played before, from the record below `root`; its worker plays nothing."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        settings: RolloutWorkerSettings,
        accelerator: Accelerator,
        *,
        root: Path,
        timeout_s: float,
    ) -> None:
        super().__init__(cluster, replace(settings, connect_environments=dict), [], accelerator, timeout_s=timeout_s)
        self.root = root.absolute()  # the worker may run in another folder
        self.steps = recorded_steps(root)
        self._index: StepIndex | None = None
        self._batches: list[list[GroupHandle]] = []  # of the step of `_index`, that were not asked for yet

    def next_batch(self, step: int, *, is_first: bool) -> list[GroupHandle]:
        """The next batch of groups that step `step` once got; with `is_first`, from the beginning of the step.

        Raises:
            FileNotFoundError, ValueError: the step cannot be read, or it once got fewer batches than now are asked for.
        """
        if is_first:
            self._open(step)
        if not self._batches:
            raise ValueError(
                f"step {step} wants more groups than it got when {self.root} was recorded: other settings decide now "
                "which groups are dropped (use_dynamic_sampling, reward_scaling, reward_shaping)"
            )
        return self._batches.pop(0)

    def _open(self, step: int) -> None:
        self._index = read_index(self.root, step)
        handles = {handle.group_id: handle for handle in self.load(step_folder(self.root, step))}
        groups = [handles[group_id] for group_id in self._index.group_ids]
        size = self._index.groups_per_batch
        self._batches = [groups[start : start + size] for start in range(0, len(groups), size)]

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> dict[str, float]:
        """What the environments said when the step was recorded."""
        assert self._index is not None
        return self._index.environment_metrics


class NoWeightSync:
    """In place of a refit where nothing samples."""

    def prepare(self) -> None:
        """Nothing to agree on."""

    def sync(self, version: int) -> dict[str, float]:
        """Nothing to send."""
        return {}

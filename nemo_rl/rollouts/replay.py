"""The groups of an earlier run in place of new ones, for a run with `replay_from`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.refit.layout import WeightComparison
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.records import StepIndex, read_index, recorded_steps, step_folder
from nemo_rl.rollouts.rollout_worker import GroupRequest, RolloutWorkerSettings
from nemo_rl.types import GroupHandle

logger = logging.getLogger(__name__)


class RecordedRollouts(RolloutCollector):
    """Returns the groups of an earlier run from the record below `root`. Needs no engine and no environment."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        settings: RolloutWorkerSettings,
        accelerator: Accelerator,
        *,
        root: Path,
        timeout_s: float,
    ) -> None:
        settings = replace(settings, connect_environments=dict, connect_agents=dict)
        super().__init__(cluster, settings, [], accelerator, timeout_s=timeout_s)
        self.root = root.absolute()  # the worker may have another working directory
        self.steps = recorded_steps(root)
        self._index: StepIndex | None = None
        self._batches: list[list[GroupHandle]] = []  # of the step of `_index`, not returned yet

    def next_groups(
        self, step: int, next_requests: Callable[[], Sequence[GroupRequest]], *, is_first: bool
    ) -> list[GroupHandle]:
        """The next batch that step `step` received when it was recorded; empty after the last recorded step.

        FileNotFoundError or ValueError if the step cannot be read, or received fewer batches than are requested now.
        """
        if step > self.steps[-1]:
            logger.info("the record in %s ends with step %d", self.root, self.steps[-1])
            return []
        if is_first:
            self._index = read_index(self.root, step)
            handles = {handle.group_id: handle for handle in self.load(step_folder(self.root, step))}
            ids, size = self._index.group_ids, self._index.groups_per_batch
            self._batches = [[handles[i] for i in ids[at : at + size]] for at in range(0, len(ids), size)]
        if not self._batches:
            raise ValueError(
                f"step {step} wants more groups than it got when {self.root} was recorded: other settings decide now "
                "which groups are dropped (use_dynamic_sampling, reward_scaling, reward_shaping)"
            )
        return self._batches.pop(0)

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> Callable[[], dict[str, float]]:
        """The metrics that the environments reported when the step was recorded."""
        assert self._index is not None
        recorded = self._index.environment_metrics
        return lambda: recorded


class NoWeightSync:
    """Replaces a refit if nothing generates."""

    def prepare(self) -> None: ...
    def announce(self) -> None: ...
    def sync(self, version: int) -> dict[str, float]:
        return {}

    def compare(self) -> WeightComparison:
        return WeightComparison(not_compared="nothing generates")

"""Asynchronous GRPO: groups are sampled while the policy trains on earlier ones.

The step is `GRPOTrainer.step`. This file has where its groups come from instead, and what waits for what:

    dispatch up to max_open_steps steps of groups -> train on the next step's -> sync -> dispatch more

Without `in_flight_weight_updates` a weight sync waits for the groups that are being played. Every group is then sampled
from one version of the weights, and with `group_order: in_order` a run does not depend on timing. With it, engines take
new weights in the middle of a sequence and go on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl.algorithms.config.grpo import GRPOConfig
from nemo_rl.algorithms.loop import DataExhausted
from nemo_rl.algorithms.trainers.group_sources import OPEN_GROUPS, GroupSource, PromptRequests
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle
from nemo_rl.utils.checkpoint.manager import CheckpointError


class AsyncGroups(GroupSource):
    """Keeps a bounded number of groups open: dispatched, and not yet trained."""

    phase = "exposed_generation"  # the rest of generation goes on beside training
    overlaps_training = True

    def __init__(self, requests: PromptRequests, rollouts: RolloutCollector, grpo: GRPOConfig) -> None:
        super().__init__(requests, rollouts)
        settings = grpo.async_grpo
        self.pauses_for_sync = not settings.in_flight_weight_updates
        self.buffer = ReplayBuffer(
            groups_per_step=grpo.num_prompts_per_batch,
            max_age=settings.max_trajectory_age_steps,
            open_steps=settings.open_steps,
            order=settings.group_order,
        )

    def next_groups(self, step: int, *, is_first: bool) -> list[GroupHandle]:
        """Waits for groups of the buffer that are still being played."""
        version = step - 1
        self.after_sync(version)  # there is room when dynamic sampling takes a second batch in a step
        if len(self.buffer.groups) < self.buffer.groups_per_step:
            self._dispatch(version)  # beyond the number that the remaining steps were planned to need
        self.buffer.finish(self.rollouts.finished(wait=False))
        while (groups := self.buffer.take(self.buffer.groups_per_step, version)) is None:
            self.buffer.finish(self.rollouts.finished(wait=True))
        return groups

    def before_sync(self) -> dict[str, float]:
        self.buffer.finish(self.rollouts.finished(wait=False))
        return {"buffer_size": float(sum(group.handle is not None for group in self.buffer.groups))}

    def after_sync(self, version: int) -> None:
        """Dispatch as many batches as the window of versions and the remaining steps have room for."""
        per_batch = self.buffer.groups_per_step
        room = min(self.buffer.capacity, (self.requests.num_steps - version) * per_batch)
        while len(self.buffer.groups) + per_batch <= room:
            try:
                self._dispatch(version)
            except DataExhausted:  # raised again by `next_groups` when the open groups are used up
                return

    def _dispatch(self, version: int) -> None:
        """Begin to play one more batch; raises DataExhausted when there is none."""
        requests = self.requests.next_batch()
        self.buffer.dispatch(requests, version)
        self.rollouts.submit(requests)

    # -- checkpoints

    def write_state(self, folder: Path) -> None:
        """Finished groups are saved whole, of the others only their requests."""
        self.buffer.finish(self.rollouts.finished(wait=False))
        folder.mkdir()
        records = [
            {
                "group_id": group.request.group_id,
                "prompt_index": group.request.prompt.idx,
                "seed_step": group.request.seed_step,
                "version": group.version,
                "arrival": group.arrival,
            }
            for group in self.buffer.groups
        ]
        (folder / OPEN_GROUPS).write_text(json.dumps(records, indent=1))
        self.rollouts.save([group.handle for group in self.buffer.groups if group.handle is not None], folder)

    def read_state(self, folder: Path, version: int) -> None:
        if not folder.is_dir():  # the run was synchronous until now
            self.buffer.restore([])
            return
        handles = {handle.group_id: handle for handle in self.rollouts.load(folder)}
        groups = []
        for record in json.loads((folder / OPEN_GROUPS).read_text()):
            prompt = self.requests.prompts.dataset[record["prompt_index"]]
            request = self.requests.request(prompt, record["group_id"], record["seed_step"])
            handle = handles.get(request.group_id)
            groups.append(
                OpenGroup(request=request, version=record["version"], handle=handle, arrival=record["arrival"])
            )
        # The largest age, in updates, that the groups reach if they are trained in order.
        per_step = self.buffer.groups_per_step
        age = max((version + i // per_step - group.version for i, group in enumerate(groups)), default=0)
        if age > self.buffer.max_age:
            raise CheckpointError(
                f"{folder.parent} holds groups that will be {age} weight updates old when it is their turn: set "
                f"grpo.async_grpo.max_trajectory_age_steps={age} or more (it is {self.buffer.max_age})"
            )
        self.buffer.restore(groups)
        self.rollouts.submit([group.request for group in groups if group.handle is None])


# -- groups between sampling and training: a bounded window of weight versions
#
# A group is open from its dispatch until it is trained. At most `open_steps * groups_per_step` groups are open. The
# deadline of a group is the version of its dispatch + `max_age`. Groups are chosen so that none is trained after its
# deadline, so none has to be discarded for its age.

GroupOrder = Literal["in_order", "arrival"]


@dataclass(kw_only=True)
class OpenGroup:
    """A dispatched group that is not trained yet. `version` is the weight version at dispatch."""

    request: GroupRequest
    version: int
    handle: GroupHandle | None = None  # None until it is finished
    arrival: int = -1  # its rank in the order of finishing


class ReplayBuffer:
    """Open groups in order of dispatch. Holds handles, no tokens.

    With `order="in_order"` groups are trained in order of dispatch, so that the content of a step does not depend on
    timing. With "arrival" a step trains the groups that are due and then the groups that finished first, so that a slow
    group delays no step before it is due. A group is due if leaving it out would make some group miss its deadline;
    with `open_steps = max_age + 1` the oldest groups are always due.
    """

    def __init__(self, *, groups_per_step: int, max_age: int, open_steps: int, order: GroupOrder) -> None:
        assert 1 <= open_steps <= max_age + 1, "a group would exceed max_age while it waits"
        self.groups_per_step = groups_per_step
        self.max_age = max_age
        self.order: GroupOrder = order
        self.capacity = open_steps * groups_per_step
        self.groups: list[OpenGroup] = []
        self._num_arrived = 0

    def dispatch(self, requests: Sequence[GroupRequest], version: int) -> None:
        """Add groups that start under weights `version`."""
        assert len(self.groups) + len(requests) <= self.capacity, "more groups than the window of versions allows"
        self.groups += [OpenGroup(request=request, version=version) for request in requests]

    def finish(self, handles: Sequence[GroupHandle]) -> None:
        """Add the handles of finished groups."""
        unfinished = {group.request.group_id: group for group in self.groups if group.handle is None}
        for handle in handles:
            group = unfinished.pop(handle.group_id)
            group.handle, group.arrival = handle, self._num_arrived
            self._num_arrived += 1

    def restore(self, groups: Sequence[OpenGroup]) -> None:
        """Replace the content by these groups, in order of dispatch."""
        self.groups = list(groups)
        self._num_arrived = 1 + max((group.arrival for group in groups), default=-1)

    def take(self, num: int, version: int) -> list[GroupHandle] | None:
        """Remove and return the next `num` groups, or all if fewer are open, to train under weights `version`.

        They are in order of dispatch. Returns None if not all of them are finished.
        """
        num = min(num, len(self.groups))
        if self.order == "in_order":
            chosen = self.groups[:num]
        else:
            num_due = self._num_due(version)
            early = [group for group in self.groups[num_due:] if group.handle is not None]
            early.sort(key=lambda group: group.arrival)
            chosen = [*self.groups[:num_due], *early][:num]
        if len(chosen) < num or any(group.handle is None for group in chosen):
            return None
        assert all(version - group.version <= self.max_age for group in chosen), "a group outside of the window"
        ids = {id(group) for group in chosen}
        handles = [group.handle for group in self.groups if id(group) in ids and group.handle is not None]
        self.groups = [group for group in self.groups if id(group) not in ids]
        return handles

    def _num_due(self, version: int) -> int:
        """The number of oldest groups that a step under weights `version` cannot leave to later steps.

        From the newest group back, assign each group to the latest step that its deadline allows and that later groups
        have not filled. Deadlines never increase towards older groups, so this greedy assignment is optimal.
        """
        step, room = version + len(self.groups) + self.max_age, self.groups_per_step
        for index in range(len(self.groups) - 1, -1, -1):
            deadline = self.groups[index].version + self.max_age
            if deadline < step or room == 0:
                step, room = min(deadline, step - (room == 0)), self.groups_per_step
            if step <= version:
                return index + 1
            room -= 1
        return 0

"""Groups between sampling and training, if both run at the same time: a bounded window of weight versions.

A group is open from its dispatch until it is trained. At most `open_steps * groups_per_step` groups are open. The
deadline of a group is the version of its dispatch + `max_age`. Groups are chosen so that none is trained after its
deadline, so none has to be discarded for its age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle

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

    @property
    def num_finished(self) -> int:
        return sum(group.handle is not None for group in self.groups)

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

    def age_needed(self, groups: Sequence[OpenGroup], version: int) -> int:
        """The largest age, in updates, that groups reach if they are trained in order from weights `version` on."""
        return max((version + i // self.groups_per_step - group.version for i, group in enumerate(groups)), default=0)

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

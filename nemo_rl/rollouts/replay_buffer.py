"""Groups between their sampling and their training, where the two run side by side: a bounded window of versions.

A group is open from its dispatch to its training. At most `open_steps` * `groups_per_step` are open, and each has a
deadline, the version of its dispatch + `max_age`: none is trained later, so none has to be thrown away for its age.
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
    """A group on its way. `version` is that of the weights at dispatch."""

    request: GroupRequest
    version: int
    handle: GroupHandle | None = None  # once it is finished
    arrival: int = -1  # the how-manieth to finish


class ReplayBuffer:
    """Open groups in order of dispatch. Holds handles, no tokens.

    `order`: "in_order" trains groups as they were dispatched, so that what a step trains on does not depend on time;
    "arrival" those that are due and then whichever finished first, so that a slow group holds nobody up before it is
    due. A group is due when leaving it out would mean that one could not be trained by its deadline; with `open_steps`
    = `max_age` + 1 that is always so of the oldest.
    """

    def __init__(self, *, groups_per_step: int, max_age: int, open_steps: int, order: GroupOrder) -> None:
        assert 1 <= open_steps <= max_age + 1, "a group would grow too old while it waits for its turn"
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
        """Note groups that begin to play under weights `version`."""
        assert len(self.groups) + len(requests) <= self.capacity, "more groups than the window of versions allows"
        self.groups += [OpenGroup(request=request, version=version) for request in requests]

    def finish(self, handles: Sequence[GroupHandle]) -> None:
        """Note groups that have finished."""
        unfinished = {group.request.group_id: group for group in self.groups if group.handle is None}
        for handle in handles:
            group = unfinished.pop(handle.group_id)
            group.handle, group.arrival = handle, self._num_arrived
            self._num_arrived += 1

    def age_needed(self, groups: Sequence[OpenGroup], version: int) -> int:
        """How old groups get, in updates, that are trained in order from weights `version` on."""
        return max((version + i // self.groups_per_step - group.version for i, group in enumerate(groups)), default=0)

    def restore(self, groups: Sequence[OpenGroup]) -> None:
        """Hold these groups, in order of dispatch, and no others."""
        self.groups = list(groups)
        self._num_arrived = 1 + max((group.arrival for group in groups), default=-1)

    def take(self, num: int, version: int) -> list[GroupHandle] | None:
        """The next `num` groups to train on under weights `version`, in order of dispatch; None until they are there.

        Fewer come when fewer are open.
        """
        chosen = self._choose(min(num, len(self.groups)), version)
        if chosen is None:
            return None
        ids = {id(group) for group in chosen}
        handles = [group.handle for group in self.groups if id(group) in ids]
        assert all(version - group.version <= self.max_age for group in chosen), "a group outside of the window"
        self.groups = [group for group in self.groups if id(group) not in ids]
        return [handle for handle in handles if handle is not None]

    def _choose(self, num: int, version: int) -> list[OpenGroup] | None:
        if self.order == "in_order":
            chosen = self.groups[:num]
        else:
            due = self.groups[: self._num_due(version)]
            early = [group for group in self.groups[len(due) :] if group.handle is not None]
            early.sort(key=lambda group: group.arrival)
            chosen = [*due, *early][:num]
        is_there = len(chosen) == num and all(group.handle is not None for group in chosen)
        return chosen if is_there else None

    def _num_due(self, version: int) -> int:
        """How many of the oldest groups a step under weights `version` cannot leave to later steps.

        From the newest back, each group gets the latest step that its deadline and the groups behind it leave room in.
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

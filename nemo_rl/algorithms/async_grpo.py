"""Asynchronous GRPO: groups are sampled while the policy trains on earlier ones.

The step is `GRPOTrainer.step`. This file has where its groups come from instead, and what waits for what:

    dispatch up to max_open_steps steps of groups -> train on the next step's -> sync -> dispatch more

Without `in_flight_weight_updates` a weight sync waits for the groups that are being played. Every group is then sampled
from one version of the weights, and with `group_order: in_order` a run does not depend on timing. With it, engines take
new weights in the middle of a sequence and go on.
"""

from __future__ import annotations

import json
from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOConfig
from nemo_rl.algorithms.trainers.group_sources import OPEN_GROUPS, GroupSource, PromptRequests
from nemo_rl.algorithms.trainers.trainer import DataExhausted
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.replay_buffer import OpenGroup, ReplayBuffer
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
        return {"buffer_size": float(self.buffer.num_finished)}

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
        age = self.buffer.age_needed(groups, version)
        if age > self.buffer.max_age:
            raise CheckpointError(
                f"{folder.parent} holds groups that will be {age} weight updates old when it is their turn: set "
                f"grpo.async_grpo.max_trajectory_age_steps={age} or more (it is {self.buffer.max_age})"
            )
        self.buffer.restore(groups)
        self.rollouts.submit([group.request for group in groups if group.handle is None])

"""GRPO whose groups are sampled while the policy trains on earlier ones.

The phases are those of `grpo.py`; here is where groups come from instead, and what waits for what:

    dispatch up to max_open_steps steps of groups -> train on the next step's -> sync -> dispatch more

Without `in_flight_weight_updates` a sync waits for the groups that play: each is sampled from the weights of one
version, and with `group_order: in_order` a run has one outcome, whatever takes how long. With it engines stop in the
middle of their sentences, take the new weights, and go on.
"""

from __future__ import annotations

import json
from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.trainers.rollout_trainer import BUFFER_FOLDER, OPEN_GROUPS, RolloutParts
from nemo_rl.algorithms.trainers.trainer import DataExhausted, RunTools
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.rollouts.replay_buffer import OpenGroup, ReplayBuffer
from nemo_rl.types import GroupHandle
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.save import StateWrite


class AsyncGRPOTrainer(GRPOTrainer):
    """See the module."""

    generation_phase = "exposed_generation"  # the rest of it goes on beside training

    def __init__(self, config: GRPOMasterConfig, tools: RunTools, parts: RolloutParts) -> None:
        super().__init__(config, tools, parts)
        settings = config.grpo.async_grpo
        self.settings = settings
        self.buffer = ReplayBuffer(
            groups_per_step=config.grpo.num_prompts_per_batch,
            max_age=settings.max_trajectory_age_steps,
            open_steps=settings.open_steps,
            order=settings.group_order,
        )
        self.policy.while_waiting(self.rollouts.poll)

    def start(self) -> None:
        super().start()
        self.fill(self.state.total_steps)

    # -- where groups come from

    def next_groups(self) -> list[GroupHandle]:
        """The next batch of groups out of the buffer, waited for where it is not there yet."""
        version = self.state.total_steps
        self.fill(version)  # there is room when dynamic sampling takes a second batch in a step
        if len(self.buffer.groups) < self.buffer.groups_per_step:
            self.dispatch(version)  # and more than the steps that are left were planned to need
        self.buffer.finish(self.rollouts.finished(wait=False))
        while (groups := self.buffer.take(self.buffer.groups_per_step, version)) is None:
            self.buffer.finish(self.rollouts.finished(wait=True))
        return self.checked(groups)

    def sync_weights(self, version: int) -> None:
        self.version = version
        if not self.settings.in_flight_weight_updates:
            with self.phase("wait_for_rollouts"):
                self.rollouts.wait_all()
        self.buffer.finish(self.rollouts.finished(wait=False))
        self.record("train", {"buffer_size": float(self.buffer.num_finished)})
        super().sync_weights(version)
        self.fill(version)

    def fill(self, version: int) -> None:
        """Dispatch batches up to what the window of versions and the steps that are left have room for."""
        assert self.schedule.num_steps is not None
        per_batch = self.buffer.groups_per_step
        room = min(self.buffer.capacity, (self.schedule.num_steps - version) * per_batch)
        while len(self.buffer.groups) + per_batch <= room:
            try:
                self.dispatch(version)
            except DataExhausted:  # told when the open groups are used up
                return

    def dispatch(self, version: int) -> None:
        """Begin to play one more batch; raises DataExhausted when there is none."""
        requests = self.requests_of(self.next_prompts())
        self.buffer.dispatch(requests, version)
        self.rollouts.submit(requests)

    # -- state

    def recover(self, error: WorkerDied) -> None:
        self.rollouts.abandon()
        super().recover(error)

    def write_state(self, directory: Path) -> StateWrite:
        write = super().write_state(directory)
        self.write_buffer(directory / BUFFER_FOLDER)
        return write

    def write_buffer(self, folder: Path) -> None:
        """The open groups: finished ones whole, of the others what was asked for."""
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

    def read_buffer(self, folder: Path) -> None:
        if not folder.is_dir():  # the run was synchronous until now
            self.buffer.restore([])
            return
        handles = {handle.group_id: handle for handle in self.rollouts.load(folder)}
        groups = []
        for record in json.loads((folder / OPEN_GROUPS).read_text()):
            prompt = self.prompts.dataset[record["prompt_index"]]
            request = self.request(prompt, record["group_id"], record["seed_step"])
            handle = handles.get(request.group_id)
            group = OpenGroup(request=request, version=record["version"], handle=handle, arrival=record["arrival"])
            groups.append(group)
        age = self.buffer.age_needed(groups, self.state.total_steps)
        if age > self.buffer.max_age:
            raise CheckpointError(
                f"{folder.parent} holds groups that will be {age} weight updates old when it is their turn: set "
                f"grpo.async_grpo.max_trajectory_age_steps={age} or more (it is {self.buffer.max_age})"
            )
        self.buffer.restore(groups)
        self.rollouts.submit([group.request for group in groups if group.handle is None])

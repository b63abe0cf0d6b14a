"""The sources of a run's groups of samples: training prompts -> requests -> finished groups, and which failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl.algorithms.config.rollout import RolloutConfig, RolloutMasterConfig
from nemo_rl.algorithms.loop import DataExhausted
from nemo_rl.data.rows.dataloader import PromptDataLoader
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import GroupHandle, Prompt, SampleStatus, SamplingParams
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.console import RunConsole

BUFFER_FOLDER = "replay_buffer"
OPEN_GROUPS = "open_groups.json"
MAX_REASONS_SHOWN = 3
REPETITION = 2**32  # more than the batches of any run


class TooManyFailures(RuntimeError):
    """More episodes failed than `max_failed_sample_fraction` allows."""


class PromptRequests:
    """The training prompts as requests to play them, batch after batch until the last epoch ends."""

    def __init__(self, prompts: PromptDataLoader, rollout: RolloutConfig, sampling: SamplingParams) -> None:
        self.prompts = prompts
        self.num_epochs = rollout.max_num_epochs
        self.num_generations = rollout.num_generations_per_prompt
        self.num_steps = min(rollout.max_num_steps, rollout.max_num_epochs * len(prompts))
        self.sampling = sampling
        self.rewind()

    def rewind(self) -> None:
        """Go on from where the data loader stands, which has just been restored."""
        self._batches = self._remaining_batches()

    def _remaining_batches(self) -> Iterator[list[Prompt]]:
        while self.prompts.epoch < self.num_epochs:
            yield from self.prompts

    def next_batch(self) -> list[GroupRequest]:
        """Requests of the next batch of prompts; raises DataExhausted after the last epoch."""
        prompts = next(self._batches, None)
        if prompts is None:
            raise DataExhausted
        # Numbered by batch drawn, not by step: dynamic sampling may draw a prompt twice in a step, with other seeds.
        batch = self.prompts.epoch * len(self.prompts) + self.prompts.batches_done
        requests, seen = [], Counter[str]()
        for position, prompt in enumerate(prompts):
            # A small dataset with a weight has rows twice in a batch: their samples must not be copies.
            seed_step = batch + seen[prompt.prompt_id] * REPETITION
            requests.append(self.request(prompt, f"{batch}/{position}/{prompt.prompt_id}", seed_step))
            seen[prompt.prompt_id] += 1
        return requests

    def request(self, prompt: Prompt, group_id: str, seed_step: int) -> GroupRequest:
        """A group of training samples."""
        return GroupRequest(
            group_id=group_id,
            prompt=prompt,
            num_generations=self.num_generations,
            sampling=self.sampling,
            seed_step=seed_step,
        )


class GroupSource:
    """Gives a trainer its groups of samples: plays a batch of prompts and waits, or reads a record.

    `async_grpo.AsyncGroups` plays groups while the policy trains instead.
    """

    phase = "generation"
    """Phase in which a step waits for its groups."""

    overlaps_training = False
    """Whether groups are played while the policy trains."""

    pauses_for_sync = False
    """Whether a weight sync waits until no group is being played."""

    def __init__(self, requests: PromptRequests, rollouts: RolloutCollector) -> None:
        self.requests = requests
        self.rollouts = rollouts

    def next_groups(self, step: int, *, is_first: bool) -> list[GroupHandle]:
        """The next batch of groups of training step `step` (from 1). Raises DataExhausted when there is none.

        `is_first`: the step has no groups yet. With dynamic sampling it may take several batches.
        """
        groups = self.rollouts.next_groups(step, self.requests.next_batch, is_first=is_first)
        if not groups:
            raise DataExhausted
        return groups

    def before_sync(self) -> dict[str, float]:
        """Weights are about to change. Returns metrics of the step."""
        return {}

    def after_sync(self, version: int) -> None:
        """Generation has weights `version`."""

    def write_state(self, folder: Path) -> None:
        """Write groups that are open between steps into `folder`, which does not exist yet; here there are none."""

    def read_state(self, folder: Path, version: int) -> None:
        """Inverse of `write_state`, for policy weights `version`.

        Raises:
            CheckpointError: `folder` holds open groups that this run cannot train.
        """
        if folder.is_dir() and json.loads((folder / OPEN_GROUPS).read_text()):
            raise CheckpointError(
                f"{folder.parent} was written by an asynchronous run and holds groups that were not trained yet: "
                "set grpo.async_grpo.enabled=true, or take another checkpointing.checkpoint_dir"
            )


def check_failures(groups: Sequence[GroupHandle], config: RolloutMasterConfig, console: RunConsole) -> None:
    """Warn of samples without an outcome; stop the run when there are too many to be chance."""
    samples = [sample for group in groups for sample in group.samples]
    too_long = sorted({group.prompt_id for group in groups if group.samples[0].status is SampleStatus.PROMPT_TOO_LONG})
    if too_long:
        limit = config.data.max_input_seq_length
        text = f"prompts longer than data.max_input_seq_length={limit}: {', '.join(too_long[:8])}"
        if len(too_long) == len(groups):
            raise ValueError(f"all {text}; raise it and policy.max_total_sequence_length, or shorten the prompts")
        console.warn(f"{len(too_long)} {text}; they are left out")
    late = [sample for sample in samples if sample.status.is_late]
    limits = {
        SampleStatus.TIMED_OUT: f"{config.section}.episode_timeout_s={config.rollout.episode_timeout_s}",
        SampleStatus.AGENT_HUNG: "env.<name>.time_limit_s of their agents",
    }
    key = " or ".join(limits[status] for status in limits if any(sample.status is status for sample in late))
    if late and len(late) == len(samples):
        raise TooManyFailures(
            f"all {len(late)} episodes took longer than {key}: raise it, lower "
            f"{config.section}.max_rollout_turns or policy.generation.max_new_tokens, or sample on more devices"
        )
    if late:
        console.warn(f"{len(late)} of {len(samples)} episodes took longer than {key}")
    failed = [sample for sample in samples if sample.status.is_failure]
    # Each reason once, with the first sample that has it.
    by_reason = {str(sample.failure).replace(sample.sample_id, ""): str(sample.failure) for sample in failed[::-1]}
    reasons = "\n".join(sorted(by_reason.values())[:MAX_REASONS_SHOWN])
    if failed:
        console.warn(f"{len(failed)} of {len(samples)} episodes failed:\n{reasons}")
    if len(failed) > config.rollout.max_failed_sample_fraction * len(samples):
        limit = f"{config.section}.max_failed_sample_fraction={config.rollout.max_failed_sample_fraction}"
        raise TooManyFailures(f"{len(failed)} of {len(samples)} episodes failed, more than {limit}:\n{reasons}")

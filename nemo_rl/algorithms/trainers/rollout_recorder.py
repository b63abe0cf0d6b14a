"""Recording the rollouts of a run, and checking whether another run can train from the record."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.records import StepIndex, put_aside, read_index, recorded_steps, steps_text
from nemo_rl.types import BatchPlan, GroupHandle
from nemo_rl.utils.checkpoint.manager import flat_differences
from nemo_rl.utils.files import digest, size_text


def record_identity(config: RolloutMasterConfig, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the identity of a run on which recorded samples depend.

    A run that replays may have other learning rates, losses, reward shaping and seeds. With router replay, the record
    must hold the experts of the tokens.
    """
    rollout, generation = config.rollout, config.policy.generation
    replay = {"policy.router_replay": {"enabled": True}} if config.policy.router_replay.enabled else {}
    return replay | {
        "policy.model": identity["policy.model"],
        "policy.tokenizer": identity["policy.tokenizer"],
        "policy.generation": {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k")},
        "rollouts": {
            "num_prompts_per_step": rollout.num_prompts_per_step,
            "num_prompts_per_batch": rollout.num_prompts_per_batch,
            "num_generations_per_prompt": rollout.num_generations_per_prompt,
        },
    }


def check_record(config: RolloutMasterConfig, identity: Mapping[str, Any]) -> None:
    """Check that a run of this identity can train from the record of `replay_from`.

    Raises:
        FileNotFoundError, ValueError: what is missing or different.
    """
    key, own = f"{config.section}.replay_from={config.rollout.replay_from}", record_identity(config, identity)
    root = Path(str(config.rollout.replay_from))
    steps = recorded_steps(root) if root.is_dir() else []
    if not steps:
        raise FileNotFoundError(f"{key} holds no recorded step; a run with rollout_record.enabled=true makes them")
    if steps != list(range(1, len(steps) + 1)):
        raise ValueError(f"{key} holds steps {steps_text(steps)}; a replay needs all from 1 on")
    found = read_index(root, steps[0]).identity
    if "policy.router_replay" not in own:
        found = {name: part for name, part in found.items() if name != "policy.router_replay"}
    if differences := flat_differences(found, own, owner="the record"):
        raise ValueError(f"{key} was recorded by a run that this one cannot replay:\n" + "\n".join(differences))


def check_record_folder(config: RolloutMasterConfig, identity: Mapping[str, Any]) -> None:
    """Check that the folder of `rollout_record` holds no record of a run with other sizes or another model.

    Raises:
        ValueError: the differences.
    """
    root, own = Path(config.rollout.rollout_record.save_dir).absolute(), record_identity(config, identity)
    steps = recorded_steps(root) if root.is_dir() else []
    found = read_index(root, steps[0]).identity if steps else own
    if differences := flat_differences(found, own, owner="the record"):
        fix = f"set {config.section}.rollout_record.save_dir to another folder"
        raise ValueError(f"{root} holds the record of another run; {fix}:\n" + "\n".join(differences))


class RolloutRecorder:
    """Makes the rollout worker write the groups of every training step, one step at a time, in the background."""

    def __init__(self, config: RolloutMasterConfig, tools: RunTools, rollouts: RolloutCollector) -> None:
        self.settings = config.rollout.rollout_record
        self.check_folder = partial(check_record_folder, config, tools.identity)
        self.root = Path(self.settings.save_dir).absolute()  # the worker may run in another folder
        self.rollouts = rollouts
        self.console = tools.console
        self.make_index = partial(
            StepIndex,
            seed=config.rollout.seed,
            config_digest=digest(tools.resolved_config_yaml),
            identity=record_identity(config, tools.identity),
            groups_per_batch=config.rollout.num_prompts_per_batch,
        )
        self.num_bytes = 0
        self.num_steps = 0

    def start(self, after_step: int) -> None:
        """Prepare for the steps after `after_step`: move an earlier record of them aside, `check_record_folder`."""
        self.finish()  # a step that a dead worker made the run repeat
        self.root.mkdir(parents=True, exist_ok=True)
        self.check_folder()
        if aside := put_aside(self.root, after_step):
            self.console.info(f"rollouts that were recorded after step {after_step} are now in {aside}")

    def record(
        self,
        step: int,
        generated: Sequence[GroupHandle],
        trained: Sequence[GroupHandle],
        plan: BatchPlan | None,
        environment_metrics: Mapping[str, float],
        *,
        weight_version: int,
    ) -> dict[str, float]:
        """Begin to write step `step` after the previous one is written. Returns metrics.

        `trained` are the groups of `plan`, which is None if nothing is trained.
        """
        self.finish()
        advantages: list[list[float]] = [[0.0] * len(group.rows) for group in trained]
        for rank in plan.ranks if plan is not None else ():
            for micro_batches in rank.train:
                for planned in (sample for batch in micro_batches for sample in batch):
                    if planned.index >= 0:  # no copy that fills up a step
                        advantages[planned.group][planned.index] = planned.advantage
        index = self.make_index(
            step=step,
            weight_version=weight_version,
            group_ids=[group.group_id for group in generated],
            trained={group.group_id: of for group, of in zip(trained, advantages, strict=True)},
            environment_metrics=dict(environment_metrics),
        )
        self.rollouts.start_record(self.root, index, self.settings.keep, generated)
        self.num_steps += 1
        return {"recorded_bytes": float(self.num_bytes)}

    def finish(self) -> None:
        """Wait until the present step is written."""
        written = self.rollouts.finish_records()
        if written and not self.num_bytes:
            free = shutil.disk_usage(self.root).free
            self.console.info(
                f"rollouts are recorded in {self.root}: {size_text(written)} for the first step, {size_text(free)} free"
            )
        self.num_bytes += written

    def end(self) -> None:
        """Wait for the last step and report the size of the record."""
        self.finish()
        if self.num_steps:
            self.console.info(f"{self.num_steps} steps of rollouts, {size_text(self.num_bytes)}, are in {self.root}")

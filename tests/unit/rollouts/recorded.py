"""Groups and steps to record."""

from pathlib import Path

import numpy as np

from nemo_rl.rollouts.records import StepIndex, write_step
from nemo_rl.types import RolloutGroup, Sample, SampleStatus, StopReason, TurnMeta
from tests import fakes
from tests.conversations import answered


def sample(
    sample_id: str, reward: float, *, status: SampleStatus = SampleStatus.COMPLETED, generated: int = 3
) -> Sample:
    """Two prompt tokens, then sampled ones that get less likely."""
    meta = fakes.sample(reward, status, prompt=2, generated=generated, sample_id=sample_id)
    meta.failure = "the environment was out" if status is SampleStatus.FAILED else None
    of_turn = {"num_generated_tokens": generated, "num_env_tokens": 0, "reward": reward, "weight_version": 0}
    meta.turns = [TurnMeta(**of_turn, stop_reason=StopReason.STOP, generation_s=1.0, env_s=0.25)]
    return Sample(
        meta=meta,
        token_ids=np.arange(meta.length, dtype=np.int64) + 65,
        token_mask=np.array([False, False] + [True] * generated),
        generation_logprobs=np.array([0.0, 0.0] + [0.0 - 2.0 * n for n in range(generated)], dtype=np.float32),
        messages=answered(f"answer of {sample_id}", asked="2+2?"),
        metrics={"score": reward} if status is SampleStatus.COMPLETED else {},
    )


def group(group_id: str, *rewards: float | None) -> RolloutGroup:
    """A sample per reward; None: it failed."""
    statuses = [SampleStatus.FAILED if reward is None else SampleStatus.COMPLETED for reward in rewards]
    samples = [
        sample(f"{group_id}/{i}", reward or 0.0, status=status, generated=i + 1)
        for i, (reward, status) in enumerate(zip(rewards, statuses, strict=True))
    ]
    return RolloutGroup(group_id=group_id, prompt_id=group_id.rpartition("/")[2], samples=samples)


def index(step: int, groups: list[RolloutGroup], per_batch: int = 2) -> StepIndex:
    return StepIndex(
        step=step,
        weight_version=step - 1,
        seed=42,
        config_digest="digest",
        identity={"policy.model": {"name": "tiny"}},
        groups_per_batch=per_batch,
        group_ids=[group.group_id for group in groups],
        trained={group.group_id: [0.5] * len(group.samples) for group in groups[:1]},
        environment_metrics={"math/correct": 0.5, "math/of_nothing": float("nan")},
    )


def record(root: Path, *steps: int, keep: int | None = None) -> None:
    """Each step has two groups; the first one was trained."""
    for step in steps:
        groups = [group(f"{step}/0/d:0", 1.0, 0.0), group(f"{step}/1/d:1", 0.0, None, 0.0)]
        write_step(root, index(step, groups), groups, ["math", "chat"], keep)

"""What a rollout worker of a test is made from: every prompt is too long, so that no engine is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nemo_rl.rollouts.rollout_worker import Environment
from nemo_rl.types import DatumSpec, Prompt

LENGTH = 10


def process(prompt: Prompt) -> DatumSpec:
    return DatumSpec(
        message_log=[
            {"role": "user", "content": prompt.prompt_id, "token_ids": torch.zeros(LENGTH, dtype=torch.int64)}
        ],
        length=LENGTH,
        extra_env_info=None,
        loss_multiplier=0.0,
        idx=prompt.idx,
        task_name=prompt.task_name,
    )


def decode(tokens: Sequence[int]) -> str:
    raise AssertionError("nothing is generated")


def render(observation: dict[str, str]) -> list[int]:
    raise AssertionError("nothing is rendered")


def no_environments() -> Mapping[str, Environment]:
    return {}

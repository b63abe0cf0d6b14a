"""One conversation that an environment cannot answer does not take its batch with it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep, StepRefused, split_return
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.types import LLMMessageLogType

MAX_EXCERPT = 120


def step_each(
    environment: EnvironmentInterface[Any],
    logs: Sequence[LLMMessageLogType],
    metadata: Sequence[Any],
    *,
    name: str,
    executor: Executor,
) -> list[EnvironmentStep | EnvironmentFailure]:
    """What `environment.step` says of each conversation; a batch that it refuses is asked again one by one.

    `step` gets copies of the metadata. It runs in `executor`, whose futures hold whatever it raises.
    """
    if not logs:
        return []
    running = executor.submit(environment.step, list(logs), copy.deepcopy(list(metadata)))
    error = running.exception()
    if error is None:
        try:
            return split_return(running.result(), len(logs), name)
        except StepRefused as refusal:
            error = refusal
    if len(logs) > 1:
        return [
            step_each(environment, [log], [known], name=name, executor=executor)[0]
            for log, known in zip(logs, metadata, strict=True)
        ]
    reason = str(error) if isinstance(error, StepRefused) else f"environment {name!r} raised {error!r}"
    return [EnvironmentFailure(f"{reason} ({excerpt(logs[0])})")]


def excerpt(messages: LLMMessageLogType) -> str:
    """The end of a conversation, by which a person finds it."""
    text = str(messages[-1]["content"])
    shown = text if len(text) <= MAX_EXCERPT else "..." + text[-MAX_EXCERPT:]
    return f"in the conversation that ends {shown!r}"

"""A reward made of several: the weighted sum of reward functions and of other environments' rewards."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import EnvironmentFailure
from nemo_rl.environments.config import CompositeEnvironmentConfig, RewardFunctionConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.isolation import excerpt, step_each
from nemo_rl.environments.registry import new_environment
from nemo_rl.environments.rewards import check_arguments, find_reward_function
from nemo_rl.environments.sample_values import SampleValues
from nemo_rl.types import LLMMessageLogType


@dataclass(frozen=True)
class PartFailure:
    """Why a part has no value for a conversation."""

    reason: str


Value = float | PartFailure


def combine(values: Mapping[str, float], parts: Sequence[RewardFunctionConfig], *, normalize_weights: bool) -> float:
    """The reward: the sum of weight * value, of the gates alone where one of them is not above 0.

    `normalize_weights` divides by the sum of all weights, gates and closed parts included.
    """
    is_open = all(values[part.name] > 0 for part in parts if part.gate)
    total = sum(part.weight * values[part.name] for part in parts if part.gate or is_open)
    return total / sum(part.weight for part in parts) if normalize_weights else total


class CompositeEnvironment(EnvironmentInterface[Any]):
    """Scores an answer of one turn by all parts; a conversation of which one part fails has no reward."""

    def __init__(self, cfg: CompositeEnvironmentConfig | Mapping[str, Any]) -> None:
        """The sections that parts name are in `cfg.sections`.

        Raises:
            ValueError: a section is missing or a composite itself, a function does not exist or takes other arguments.
        """
        self.cfg = cfg if isinstance(cfg, CompositeEnvironmentConfig) else CompositeEnvironmentConfig(**cfg)
        self.parts = self.cfg.reward_functions
        functions = [part for part in self.parts if part.env is None]
        self.functions = {part.name: find_reward_function(part.function) for part in functions}
        for part in functions:
            check_arguments(part.function, self.functions[part.name], part.kwargs)
        self.environments = {part.name: self._environment(part.name, part.env) for part in self.parts if part.env}
        self.values = SampleValues()
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="reward")
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="environment")  # an environment knows one thread

    def _environment(self, part: str, section: str) -> EnvironmentInterface[Any]:
        if section not in self.cfg.sections:
            raise ValueError(f"reward_functions: {part!r} names env.{section}, and there is no such section")
        return new_environment(section, self.cfg.sections[section])

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """One turn, then the episode is over. What parts raise is in `failures`."""
        called = {
            part.name: [self._call(part, log, known) for log, known in zip(message_log_batch, metadata, strict=True)]
            for part in self.parts
            if part.env is None
        }
        answers: list[str | None] = [None] * len(metadata)
        asked = {part.name: self._ask(part, message_log_batch, metadata, answers) for part in self.parts if part.env}
        found: dict[str, list[Value]] = {
            part.name: asked[part.name]
            if part.env
            else [
                _value(part.name, future, log) for future, log in zip(called[part.name], message_log_batch, strict=True)
            ]
            for part in self.parts
        }
        rewards, observations, failures = [], [], []
        for number, log in enumerate(message_log_batch):
            values = {name: found[name][number] for name in found}
            failed = [value for value in values.values() if isinstance(value, PartFailure)]
            numbers = {name: value for name, value in values.items() if not isinstance(value, PartFailure)}
            failures.append("; ".join(failure.reason for failure in failed) or None)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            observations.append({"role": "environment", "content": f"Environment: {shown}"})
            if failed:
                rewards.append(0.0)  # stands for none: `failures` says so
                continue
            self.values.remember(log, numbers)
            rewards.append(combine(numbers, self.parts, normalize_weights=self.cfg.normalize_weights))
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=[None] * len(metadata),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            terminateds=torch.ones(len(metadata)),
            answers=answers,
            failures=failures,
        )

    def _call(self, part: RewardFunctionConfig, log: LLMMessageLogType, metadata: Any) -> Future[Any]:
        messages = [dict(message) for message in log]
        return self._threads.submit(self.functions[part.name], messages, copy.deepcopy(metadata), **part.kwargs)

    def _ask(
        self,
        part: RewardFunctionConfig,
        logs: Sequence[LLMMessageLogType],
        metadata: Sequence[Any],
        answers: list[str | None],
    ) -> list[Value]:
        """The rewards of an environment; fills in the answers that it extracts where none is known."""
        assert part.env is not None
        steps = step_each(self.environments[part.name], logs, metadata, name=part.env, executor=self._answers)
        values: list[Value] = []
        for number, step in enumerate(steps):
            if isinstance(step, EnvironmentFailure):
                values.append(PartFailure(f"reward {part.name!r}: {step}"))
            elif not step.terminated:
                values.append(
                    PartFailure(
                        f"reward {part.name!r}: environment {part.env!r} does not end the episode after one turn "
                        f"({excerpt(logs[number])}); a composite is of environments of one turn"
                    )
                )
            else:
                values.append(step.reward)
                answers[number] = step.answer if answers[number] is None else answers[number]
        return values

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """The mean of each part over a batch with `message_log` (list of B); of environments their own metrics as well.

        An environment's metrics `<part>/<metric>` see its own rewards; they are left out after a restart of this
        process, until all samples are known again.
        """
        logs = batch["message_log"]
        metrics = self.values.means(logs)
        known = [values for values in self.values.of(logs) if values is not None]
        if len(known) < len(logs):
            return batch, metrics
        for name, environment in self.environments.items():
            own = BatchedDataDict({**batch, "rewards": torch.tensor([values[name] for values in known])})
            _, found = environment.global_post_process_and_metrics(own)
            metrics.update({f"{name}/{metric}": value for metric, value in found.items()})
        return batch, metrics


def _value(part: str, future: Future[Any], log: LLMMessageLogType) -> Value:
    error = future.exception()
    if error is not None:
        return PartFailure(f"reward {part!r} raised {error!r} {excerpt(log)}")
    value = future.result()
    if not isinstance(value, Real):
        return PartFailure(f"reward {part!r} returned a {type(value).__name__}, not a number, {excerpt(log)}")
    if not math.isfinite(value):
        return PartFailure(f"reward {part!r} returned {float(value)} {excerpt(log)}")
    return float(value)

"""A reward of several parts: the weighted sum of reward functions and of other environments' rewards."""

import copy
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep, Outcome, excerpt, step_each
from nemo_rl.environments.config import CompositeEnvironmentConfig, RewardFunctionConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn
from nemo_rl.environments.registry import new_environment
from nemo_rl.environments.rewards import load_reward
from nemo_rl.types import LLMMessageLogType


def combine(values: Mapping[str, float], parts: Sequence[RewardFunctionConfig], *, normalize_weights: bool) -> float:
    """The reward: the sum of `contributions`; `normalize_weights` divides it by the sum of all weights."""
    total = sum(contributions(values, parts))
    return total / sum(part.weight for part in parts) if normalize_weights else total


def contributions(values: Mapping[str, float], parts: Sequence[RewardFunctionConfig]) -> list[float]:
    """weight * value of each part; 0 for all but the gates if one of them is not above 0."""
    is_open = all(values[part.name] > 0 for part in parts if part.gate)
    return [part.weight * values[part.name] if part.gate or is_open else 0.0 for part in parts]


class CompositeEnvironment(EnvironmentInterface[Any]):
    """Scores an answer of one turn by all parts; a conversation with a failing part has no reward.

    Metrics of a conversation: `<part>`, and `<part>/<metric>` for the metrics of an environment among the parts.
    """

    def __init__(self, cfg: CompositeEnvironmentConfig | Mapping[str, Any]) -> None:
        """The sections that parts name are in `cfg.sections`. ValueError for a part that does not exist."""
        self.cfg = CompositeEnvironmentConfig.model_validate(cfg)
        self.parts = self.cfg.reward_functions
        self.functions: dict[str, Any] = {}
        self.environments: dict[str, EnvironmentInterface[Any]] = {}
        for part in self.parts:
            if part.env is None:
                self.functions[part.name] = load_reward(part)
            elif part.env in self.cfg.sections:
                self.environments[part.name] = new_environment(part.env, self.cfg.sections[part.env])
            else:
                raise ValueError(f"reward_functions: {part.name!r} names env.{part.env}, and there is no such section")
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="reward")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")  # of all environments, as in an actor

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """One turn, then the episode is over. Errors of the parts are in `failures`."""
        calls = {
            part.name: [
                self._threads.submit(self.functions[part.name], *copy.deepcopy((log, known)), **part.kwargs)
                for log, known in zip(message_log_batch, metadata, strict=True)
            ]
            for part in self.parts
            if part.env is None
        }
        steps = {
            part.name: step_each(
                self.environments[part.name], message_log_batch, metadata, name=part.env, executor=self._thread
            )
            for part in self.parts
            if part.env is not None
        }
        texts, rewards, answers, failures, metrics = [], [], [], [], []
        for i, log in enumerate(message_log_batch):
            found = {
                part.name: _result(part.name, calls[part.name][i], log)
                if part.env is None
                else _reward(part, steps[part.name][i], log)
                for part in self.parts
            }
            values = {name: value for name, value in found.items() if not isinstance(value, str)}
            problems = [value for value in found.values() if isinstance(value, str)]
            ended = {
                name: step
                for name, of_part in steps.items()
                if isinstance(step := of_part[i], EnvironmentStep) and step.terminated
            }
            own = {f"{name}/{key}": value for name, step in ended.items() for key, value in step.metrics.items()}
            texts.append(", ".join(f"{name} {value:.4g}" for name, value in values.items()))
            # The reward of a failed conversation is a placeholder.
            rewards.append(self._rewards(values if not problems else dict.fromkeys(found, 0.0)))
            answers.append(next((step.answer for step in ended.values() if step.answer is not None), None))
            failures.append("; ".join(problems) or None)
            metrics.append(values | own)
        scores = torch.tensor(rewards, dtype=torch.float64)
        return one_turn(texts, metadata, scores, answers=answers, failures=failures, metrics=metrics)

    def _rewards(self, values: Mapping[str, float]) -> float | list[float]:
        if not self.cfg.several_rewards:
            return combine(values, self.parts, normalize_weights=self.cfg.normalize_weights)
        scale = sum(part.weight for part in self.parts) if self.cfg.normalize_weights else 1.0
        return [reward / scale for reward in contributions(values, self.parts)]

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """`<part>/<metric>` of the environments among the parts, over a batch with the samples' `metrics` (list of B).

        Each environment sees its own rewards and metrics.
        """
        found: dict[str, float] = {}
        for name, environment in self.environments.items():
            if not all(name in sample for sample in batch["metrics"]):  # samples of a checkpoint without metrics
                continue
            prefix = f"{name}/"
            own = {
                "rewards": torch.tensor([sample[name] for sample in batch["metrics"]]),
                "metrics": [
                    {key.removeprefix(prefix): value for key, value in sample.items() if key.startswith(prefix)}
                    for sample in batch["metrics"]
                ],
            }
            _, metrics = environment.global_post_process_and_metrics(BatchedDataDict({**batch, **own}))
            found |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
        return batch, found


def _result(part: str, future: Future[Any], log: LLMMessageLogType) -> float | str:
    """The value of a reward function, or the reason why there is none."""
    if error := future.exception():
        return f"reward {part!r} raised {error!r} {excerpt(log)}"
    value = future.result()
    if not isinstance(value, Real):
        return f"reward {part!r} returned a {type(value).__name__}, not a number, {excerpt(log)}"
    return float(value) if math.isfinite(value) else f"reward {part!r} returned {float(value)} {excerpt(log)}"


def _reward(part: RewardFunctionConfig, step: Outcome, log: LLMMessageLogType) -> float | str:
    """The reward of an environment, or the reason why there is none."""
    if isinstance(step, EnvironmentFailure):
        return f"reward {part.name!r}: {step}"
    if not step.terminated:
        return (
            f"reward {part.name!r}: environment {part.env!r} does not end the episode after one turn "
            f"({excerpt(log)}); a composite takes environments of one turn"
        )
    return step.reward

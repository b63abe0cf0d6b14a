"""A reward of several parts: the weighted sum of reward functions and of other environments' rewards."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from numbers import Real
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep, Outcome, excerpt, step_each
from nemo_rl.environments.config import CompositeEnvironmentConfig, RewardFunctionConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn, total
from nemo_rl.environments.registry import new_environment
from nemo_rl.environments.rewards import load_reward
from nemo_rl.types import LLMMessageLogType


def contributions(values: Mapping[str, float], parts: Sequence[RewardFunctionConfig]) -> list[float]:
    """weight * value of each part. If the value of a gate is not above 0, parts that are no gates give 0."""
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
        self.scale = total([part.weight for part in self.parts]) if self.cfg.normalize_weights else 1.0
        self.functions: dict[str, Callable[..., Any]] = {}
        self.environments: dict[str, EnvironmentInterface[Any]] = {}
        for part in self.parts:
            if part.env is None:
                self.functions[part.name] = partial(load_reward(part), **part.kwargs)
            elif part.env in self.cfg.sections:
                self.environments[part.name] = new_environment(part.env, self.cfg.sections[part.env])
            else:
                raise ValueError(f"reward_functions: {part.name!r} names env.{part.env}, and there is no such section")
        self.may_repeat_step = all(environment.may_repeat_step for environment in self.environments.values())
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="reward")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")  # of all environments, as in an actor

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """One turn, then the episode is over. Errors of the parts are in `failures`."""
        conversations = list(zip(message_log_batch, metadata, strict=True))
        calls = {
            name: [self._threads.submit(function, *copy.deepcopy(one)) for one in conversations]
            for name, function in self.functions.items()
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
                part.name: _of_function(part.name, calls[part.name][i], log)
                if part.env is None
                else _of_environment(part, steps[part.name][i], log)
                for part in self.parts
            }
            problems = [str(outcome) for outcome in found.values() if isinstance(outcome, EnvironmentFailure)]
            sound = {name: outcome for name, outcome in found.items() if isinstance(outcome, EnvironmentStep)}
            values = {name: outcome.reward for name, outcome in sound.items()}
            own = {f"{name}/{key}": value for name, step in sound.items() for key, value in step.metrics.items()}
            texts.append(", ".join(f"{name} {value:.4g}" for name, value in values.items()))
            # The reward of a failed conversation is a placeholder.
            weighted = contributions(values if not problems else dict.fromkeys(found, 0.0), self.parts)
            several = [reward / self.scale for reward in weighted]
            rewards.append(several if self.cfg.several_rewards else total(weighted) / self.scale)
            answers.append(next((step.answer for step in sound.values() if step.answer is not None), None))
            failures.append("; ".join(problems) or None)
            metrics.append(values | own)
        scores = torch.tensor(rewards, dtype=torch.float64)
        return one_turn(texts, metadata, scores, answers=answers, failures=failures, metrics=metrics)

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """`<part>/<metric>` of the environments among the parts, over a batch with the samples' `metrics` (list of B).

        Each environment sees its own rewards and metrics.
        """
        found: dict[str, float] = {}
        for name, environment in self.environments.items():
            if not all(name in sample for sample in batch["metrics"]):  # samples of a checkpoint without metrics
                continue
            prefix = f"{name}/"
            rewards = torch.tensor([sample[name] for sample in batch["metrics"]])
            own = {
                "rewards": rewards,
                "total_reward": rewards,
                "metrics": [
                    {key.removeprefix(prefix): value for key, value in sample.items() if key.startswith(prefix)}
                    for sample in batch["metrics"]
                ],
            }
            _, metrics = environment.global_post_process_and_metrics(BatchedDataDict({**batch, **own}))
            found |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
        return batch, found

    def shutdown(self) -> None:
        """Shut down the environments among the parts."""
        for environment in self.environments.values():
            environment.shutdown()


def _of_function(part: str, future: Future[Any], log: LLMMessageLogType) -> Outcome:
    """The value of a reward function as the step of an environment."""
    if error := future.exception():
        return EnvironmentFailure(f"reward {part!r} raised {error!r} {excerpt(log)}")
    value = future.result()
    if not isinstance(value, Real) or not math.isfinite(value):
        return EnvironmentFailure(f"reward {part!r} returned {value!r:.80}, which is no finite number, {excerpt(log)}")
    return EnvironmentStep(observation={}, reward=float(value), terminated=True, metadata=None)


def _of_environment(part: RewardFunctionConfig, step: Outcome, log: LLMMessageLogType) -> Outcome:
    """The step of an environment, which has to end the episode."""
    if isinstance(step, EnvironmentFailure):
        return EnvironmentFailure(f"reward {part.name!r}: {step}")
    if step.terminated:
        return step
    return EnvironmentFailure(
        f"reward {part.name!r}: environment {part.env!r} does not end the episode after one turn "
        f"({excerpt(log)}); a composite takes environments of one turn"
    )

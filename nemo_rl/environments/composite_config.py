"""Configuration of the composite environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.environments.actors_config import ActorsConfig
from nemo_rl.environments.rewards import REWARD_FUNCTIONS, check_arguments, find_reward_function


class RewardFunctionConfig(StrictModel):
    """One part of a reward: a function, or another environment."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """What its mean is reported as (`<environment>/<name>`); without `reward` and `env` also which function it is."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value in the reward. May be negative (a penalty) or 0 (reported, or a gate, and no more)."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    reward: str | None = None
    """The function: a registry name or an import path (`my_rewards:function`); null: that of `name`."""

    env: str | None = None
    """A section of `env` whose reward it is, in place of a function."""

    gate: bool = False
    """The parts that are no gates count only where the value of every gate is above 0."""

    @property
    def function(self) -> str:
        return self.reward or self.name

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.env is not None:
            if self.reward is not None:
                yield "env", f"a part is a function or an environment; remove env={self.env} or reward={self.reward}"
            if self.kwargs:
                yield "kwargs", f"kwargs are for functions; write them as keys of the section env.{self.env}"
        elif self.function in REWARD_FUNCTIONS:
            try:
                check_arguments(self.function, REWARD_FUNCTIONS[self.function], self.kwargs)
            except ValueError as error:
                yield "kwargs", str(error)
        elif ":" not in self.function:
            try:
                find_reward_function(self.function)
            except ValueError as error:
                yield "name" if self.reward is None else "reward", str(error)


class CompositeEnvironmentConfig(ActorsConfig):
    """A reward made of several, for answers of one turn."""

    type: Literal["composite"] = "composite"
    """Registry name of the environment."""

    reward_functions: list[RewardFunctionConfig] = Field(min_length=1)
    """The parts."""

    num_workers: int = Field(default=8, ge=1)
    """Threads that call reward functions; `math_expression` has a process in each."""

    normalize_weights: bool = False
    """Divide the weighted sum by the sum of all weights: parts between 0 and 1 then give a reward between 0 and 1."""

    sections: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Section of `env` -> its keys, of the environments that parts name. The run fills it in: leave it out in YAML."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for name, number in Counter(part.name for part in self.reward_functions).items():
            if number > 1:
                yield (
                    "reward_functions",
                    f"{number} parts are named {name!r}; name each differently, and say which function it is with "
                    "reward",
                )
        if self.normalize_weights and sum(part.weight for part in self.reward_functions) <= 0:
            yield "normalize_weights", "needs weights whose sum is above 0; set it to false, or raise a weight"
        if all(part.weight == 0 for part in self.reward_functions):
            yield "reward_functions", "every weight is 0, so that every reward is; raise one"

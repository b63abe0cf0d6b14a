"""Configuration of the environment that runs programs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemo_rl.environments.actors_config import ActorsConfig
from nemo_rl.environments.sandbox_config import SandboxConfig


class CodeEnvironmentConfig(ActorsConfig):
    """Programs that the model writes, run in a sandbox and judged by tests or by what they print."""

    type: Literal["code"] = "code"
    """Registry name of the environment."""

    num_workers: int = Field(default=8, ge=1)
    """Programs that run at the same time."""

    terminate_on_evaluation: bool = True
    """The episode ends with its first program. false: the model sees the result and may write another one, until its
    program passes or a turn has none."""

    test_reward: Literal["all", "fraction"] = "all"
    """Of a row with several tests: reward 1 when all pass, or the part of them that does."""

    max_result_characters: int = Field(default=2000, ge=1)
    """Characters of output and errors that the model sees; of a longer text, its beginning and its end."""

    sandbox: SandboxConfig = SandboxConfig()
    """What programs may use."""

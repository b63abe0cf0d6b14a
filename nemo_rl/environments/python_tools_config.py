"""Configuration of the environment of tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nemo_rl.environments.actors_config import ActorsConfig
from nemo_rl.environments.sandbox_config import SandboxConfig

BUILT_IN = ("calculator", "python")


class PythonToolsEnvironmentConfig(ActorsConfig):
    """Tools that the model calls, a turn each, until it answers; the answer is checked as in mathematics."""

    type: Literal["python_tools"] = "python_tools"
    """Registry name of the environment."""

    num_workers: int = Field(default=8, ge=1)
    """Calls of tools that are answered at the same time, and processes that check answers."""

    tools: list[str] = Field(default=["calculator", "python"], min_length=1)
    """`calculator`, `python`, and import paths (`pkg.module:name`) of tools of your own. What the model is told of them
    is the column `tools` of its row."""

    keep_state: bool = True
    """A call of `python` sees the names that earlier calls of its episode have made."""

    max_calls_per_turn: int = Field(default=4, ge=1)
    """Calls of one turn that are answered; for more, the model is told so."""

    max_result_characters: int = Field(default=2000, ge=1)
    """Characters of a result that the model sees; of a longer text, its beginning and its end."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """How an answer is compared with the expected one."""

    verify_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for checking one answer; past it the process is ended and the answer counts as wrong."""

    sandbox: SandboxConfig = SandboxConfig()
    """What Python code of the model may use."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for name in self.tools:
            if name not in BUILT_IN and ":" not in name:
                yield (
                    "tools",
                    f"there is no tool {name!r}: write calculator, python, or an import path (pkg.module:name)",
                )
        if len(set(self.tools)) != len(self.tools):
            yield "tools", "each tool once"

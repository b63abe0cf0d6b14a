"""Configuration of the environments that answer and reward samples."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from nemo_rl.config.base import NamedByKey, NotYet, StrictModel, one_of


class MathEnvironmentConfig(StrictModel):
    """The math environment: answers checked by math-verify or as multiple choice, in processes with a time limit."""

    type: Literal["math"] = "math"
    """Registry name of the environment."""

    num_workers: int = Field(default=8, ge=1)
    """Verifier processes."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """How an answer is compared with the expected one."""

    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """What kind of answer is expected."""

    verify_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for one answer; past it the process is ended and the answer counts as wrong."""

    # An episode of the math environment has one turn, and policy.generation.stop_strings ends it.
    not_yet: ClassVar = (NotYet("stop_strings", one_of(None)),)


class EnvironmentConfig(BaseModel):
    """Any other environment: `type` and its own keys, which it receives as a dictionary."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    """Registry name or import path, e.g. `my_package.envs:MyEnv`; absent: the name of the section."""

    @property
    def options(self) -> dict[str, Any]:
        """The environment's own keys, without `type`."""
        return dict(self.model_extra or {})


def _variant(value: Any) -> str | None:
    if isinstance(value, MathEnvironmentConfig):
        return "math"
    if isinstance(value, EnvironmentConfig):
        return "other"
    if isinstance(value, dict):
        return "math" if value.get("type") == "math" else "other"
    return None


AnyEnvironmentConfig = Annotated[
    Annotated[MathEnvironmentConfig, Tag("math")] | Annotated[EnvironmentConfig, Tag("other")],
    Discriminator(_variant),
]

EnvSection = Annotated[dict[str, AnyEnvironmentConfig], NamedByKey("type")]
"""The section `env`: name of an environment -> its configuration."""

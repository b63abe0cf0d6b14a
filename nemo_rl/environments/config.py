"""Configuration of the environments that answer and reward samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from nemo_rl.config.base import NamedByKey, NotYet, StrictModel, anything, one_of, switched_off
from nemo_rl.models.policy.config import TokenizerConfig


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


class RewardModelResources(StrictModel):
    """Where the reward model runs."""

    gpus_per_node: int = Field(default=0, ge=0)
    """1: on a GPU of its own, beside those of `cluster`; 0: on the CPU."""

    num_nodes: int = Field(default=1, ge=1)
    """Always 1."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.gpus_per_node > 1:
            yield "gpus_per_node", "the reward model runs on one device; set it to 1, or to 0 for the CPU"
        if self.num_nodes > 1:
            yield "num_nodes", "the reward model runs on one device; set it to 1"


def _is_one_device(dtensor_cfg: Any) -> bool:
    """Neutral when training settings of the model ask for no ranks that share it."""
    sizes = [value for key, value in (dtensor_cfg or {}).items() if key.endswith("_parallel_size")]
    return all(size in (None, 1) for size in sizes)


class RewardModelEnvironmentConfig(StrictModel):
    """A reward model that scores whole conversations; datasets that it answers need `conversation_processor`."""

    type: Literal["reward_model"] = "reward_model"
    """Registry name of the environment."""

    model_name: str = Field(min_length=1)
    """Hugging Face name or directory of a sequence classifier with one label, or a checkpoint of a reward model run
    (`results/rm/step_100`)."""

    checkpoint_path: str | None = None
    """A checkpoint (`step_N`) whose weights are used instead; null: those of `model_name`."""

    tokenizer: TokenizerConfig
    """The tokenizer of the reward model, whose chat template the conversations go through."""

    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of weights and computation."""

    batch_size: int = Field(default=16, ge=1)
    """Conversations of one forward pass, of similar lengths."""

    max_total_sequence_length: int | None = Field(default=None, ge=1)
    """Tokens of the longest conversation that is scored; the sample of a longer one counts as failed. null: as many as
    the model has positions."""

    add_bos: bool = True
    """Begin with the token for it where the template does not, as training of reward models does."""

    add_eos: bool = True
    """End with the end-of-sequence token where the template does not, as training of reward models does."""

    sigmoid: bool = False
    """Reward is the logistic function of the score, between 0 and 1, instead of the score."""

    resources: RewardModelResources = RewardModelResources()
    """Where the reward model runs."""

    not_yet: ClassVar = (
        NotYet("enabled", anything),  # the section is used where a dataset names it
        NotYet("logprob_batch_size", anything),
        NotYet("max_grad_norm", anything),
        NotYet("generation", anything),
        NotYet("dtensor_cfg", _is_one_device),
        NotYet("reward_model_cfg", anything),
        NotYet("reward_model_type", one_of("bradley_terry", None)),
        NotYet("megatron_cfg", switched_off),
        NotYet("dynamic_batching", anything),
        NotYet("sequence_packing", anything),
        NotYet("make_sequence_length_divisible_by", anything),
    )


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
    if isinstance(value, RewardModelEnvironmentConfig):
        return "reward_model"
    if isinstance(value, EnvironmentConfig):
        return "other"
    if isinstance(value, dict):
        return value["type"] if value.get("type") in ("math", "reward_model") else "other"
    return None


AnyEnvironmentConfig = Annotated[
    Annotated[MathEnvironmentConfig, Tag("math")]
    | Annotated[RewardModelEnvironmentConfig, Tag("reward_model")]
    | Annotated[EnvironmentConfig, Tag("other")],
    Discriminator(_variant),
]

EnvSection = Annotated[dict[str, AnyEnvironmentConfig], NamedByKey("type")]
"""The section `env`: name of an environment -> its configuration."""


def environment_gpus(env: Mapping[str, Any]) -> dict[str, int]:
    """Name of each environment that asks for GPUs of its own -> how many, beside those of `cluster`.

    Environments that are not ours say nothing of theirs here.
    """
    ours = {name: config for name, config in env.items() if isinstance(config, RewardModelEnvironmentConfig)}
    return {name: config.resources.gpus_per_node for name, config in ours.items() if config.resources.gpus_per_node}

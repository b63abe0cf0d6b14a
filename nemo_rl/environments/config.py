"""Configuration of the environments that answer and reward samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from nemo_rl.config.base import NamedByKey, NotYet, StrictModel, anything, one_of, switched_off
from nemo_rl.environments.actors_config import ActorsConfig
from nemo_rl.environments.code_config import CodeEnvironmentConfig
from nemo_rl.environments.composite_config import CompositeEnvironmentConfig
from nemo_rl.environments.judge_config import LLMJudgeEnvironmentConfig
from nemo_rl.environments.python_tools_config import PythonToolsEnvironmentConfig
from nemo_rl.environments.remote_config import RemoteEnvironmentConfig
from nemo_rl.environments.retrieval_config import RetrievalEnvironmentConfig
from nemo_rl.environments.sliding_puzzle_config import SlidingPuzzleEnvironmentConfig
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

    num_actors: int = Field(default=1, ge=1)
    """Actors that share the episodes; an episode stays on one of them, and a slow batch holds up its own only."""

    @property
    def options(self) -> dict[str, Any]:
        """The environment's own keys, without `type` and `num_actors`."""
        return dict(self.model_extra or {})


OURS: dict[str, type[StrictModel]] = {
    "python_tools": PythonToolsEnvironmentConfig,
    "code": CodeEnvironmentConfig,
    "composite": CompositeEnvironmentConfig,
    "llm_judge": LLMJudgeEnvironmentConfig,
    "remote": RemoteEnvironmentConfig,
    "math": MathEnvironmentConfig,
    "retrieval": RetrievalEnvironmentConfig,
    "reward_model": RewardModelEnvironmentConfig,
    "sliding_puzzle_game": SlidingPuzzleEnvironmentConfig,
}
"""`type` of each environment of the library -> its section."""


def _variant(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((name for name in OURS if name == value.get("type")), "other")
    if isinstance(value, EnvironmentConfig):
        return "other"
    return next((name for name, model in OURS.items() if isinstance(value, model)), None)


if TYPE_CHECKING:
    AnyEnvironmentConfig = (
        CodeEnvironmentConfig
        | PythonToolsEnvironmentConfig
        | CompositeEnvironmentConfig
        | LLMJudgeEnvironmentConfig
        | RemoteEnvironmentConfig
        | MathEnvironmentConfig
        | RetrievalEnvironmentConfig
        | RewardModelEnvironmentConfig
        | SlidingPuzzleEnvironmentConfig
        | EnvironmentConfig
    )
else:
    _variants = [Annotated[model, Tag(name)] for name, model in OURS.items()]
    AnyEnvironmentConfig = Annotated[
        Union[(*_variants, Annotated[EnvironmentConfig, Tag("other")])],
        Discriminator(_variant),
    ]

EnvSection = Annotated[dict[str, AnyEnvironmentConfig], NamedByKey("type")]
"""The section `env`: name of an environment -> its configuration."""


def sections_of(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """These sections of `env` as they are started: a composite holds the sections that its parts name."""
    found = {name: env[name] for name in names}
    for name, config in found.items():
        if isinstance(config, CompositeEnvironmentConfig):
            parts = {part.env: env[part.env] for part in config.reward_functions if part.env is not None}
            sections = {part: _keys(section) for part, section in parts.items()}
            found[name] = config.model_copy(update={"sections": sections})
    return found


def named_sections(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> list[str]:
    """These sections of `env`, and those that composites among them name."""
    wanted = dict.fromkeys(names)
    for name in list(wanted):
        config = env[name]
        if isinstance(config, CompositeEnvironmentConfig):
            wanted.update(dict.fromkeys(part.env for part in config.reward_functions if part.env is not None))
    return list(wanted)


def check_sections(env: Mapping[str, AnyEnvironmentConfig], step_timeout_s: float) -> Iterator[tuple[str, str]]:
    """(key, message) for sections that do not fit together, or not to the time limit of a step."""
    for name, config in env.items():
        if isinstance(config, CompositeEnvironmentConfig):
            yield from _check_parts(name, config, env)
        timed = isinstance(config, LLMJudgeEnvironmentConfig | RemoteEnvironmentConfig)
        if timed and config.time_limit_s >= step_timeout_s:
            yield (
                f"env.{name}.time_limit_s",
                f"{config.time_limit_s:g} s must be below env_step_timeout_s={step_timeout_s:g} s, at which the "
                "environment is ended with all its conversations",
            )
        if isinstance(config, CodeEnvironmentConfig | PythonToolsEnvironmentConfig):
            yield from _check_programs(name, config, step_timeout_s)


def _check_programs(
    name: str, config: CodeEnvironmentConfig | PythonToolsEnvironmentConfig, step_timeout_s: float
) -> Iterator[tuple[str, str]]:
    runs_any = isinstance(config, CodeEnvironmentConfig) or "python" in config.tools
    limit = config.sandbox.time_limit_s
    if runs_any and limit >= step_timeout_s:
        yield (
            f"env.{name}.sandbox.time_limit_s",
            f"{limit:g} s for one program must be below env_step_timeout_s={step_timeout_s:g} s, at which the "
            "environment is ended with all its conversations; lower it, or raise that",
        )


def _check_parts(
    name: str, config: CompositeEnvironmentConfig, env: Mapping[str, AnyEnvironmentConfig]
) -> Iterator[tuple[str, str]]:
    for index, part in enumerate(config.reward_functions):
        key = f"env.{name}.reward_functions.{index}.env"
        if part.env is not None and part.env not in env:
            yield key, f"no section env.{part.env}; there are: {', '.join(env)}"
        elif part.env is not None and isinstance(env[part.env], CompositeEnvironmentConfig):
            yield key, f"env.{part.env} is a composite itself; write its reward_functions here"
    parts = dict.fromkeys(part.env for part in config.reward_functions if part.env in env)
    on_gpus = [part for part in parts if part is not None and gpus_per_actor(env[part])]
    if len(on_gpus) > 1:
        yield (
            f"env.{name}.reward_functions",
            f"a composite has one GPU at most, and {' and '.join(f'env.{part}' for part in on_gpus)} ask for one each; "
            f"set env.{on_gpus[-1]}.resources.gpus_per_node=0",
        )


def _keys(config: AnyEnvironmentConfig) -> dict[str, Any]:
    return {"type": config.type, **config.options} if isinstance(config, EnvironmentConfig) else config.model_dump()


def environment_gpus(env: Mapping[str, Any]) -> dict[str, int]:
    """Name of each environment that asks for GPUs of its own -> how many, beside those of `cluster`.

    Composites as `sections_of` gives them. Environments that are not ours say nothing of theirs here.
    """
    wanted = {
        name: gpus_per_actor(config) * (config.num_actors if isinstance(config, ActorsConfig) else 1)
        for name, config in env.items()
    }
    return {name: number for name, number in wanted.items() if number}


def gpus_per_actor(config: Any) -> int:
    """GPUs of each process of an environment."""
    if isinstance(config, RewardModelEnvironmentConfig | LLMJudgeEnvironmentConfig):
        return config.resources.gpus_per_node
    if isinstance(config, CompositeEnvironmentConfig):
        on_devices = [
            section for section in config.sections.values() if section["type"] in ("reward_model", "llm_judge")
        ]
        return sum(section["resources"]["gpus_per_node"] for section in on_devices)
    return 0

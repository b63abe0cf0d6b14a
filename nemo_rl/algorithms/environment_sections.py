"""The sections of `env` that a run starts, as it starts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.environments.config import (
    AnyEnvironmentConfig,
    LLMJudgeEnvironmentConfig,
    named_sections,
    sections_of,
)


def sections_to_start(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """Name -> section, with the sections that composites name in them, and models and prompts of judges found.

    Raises:
        ValueError: for an unknown `tiny:` model.
    """
    names = sorted(set(names))
    return sections_of({name: _located(env[name]) for name in named_sections(env, names)}, names)


def _located(config: AnyEnvironmentConfig) -> AnyEnvironmentConfig:
    if not isinstance(config, LLMJudgeEnvironmentConfig):
        return config
    found = {"model_name": resolve_model(config.model_name)} if config.model_name is not None else {}
    if config.prompt_file is not None:  # its process may run in another folder
        found["prompt_file"] = str(Path(config.prompt_file).absolute())
    return config.model_copy(update=found)

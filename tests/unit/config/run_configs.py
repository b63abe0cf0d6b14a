"""The configuration of every kind of run, and the smallest one of GRPO, to vary in tests."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError, Problem, dotted
from nemo_rl.config.loader import build_config
from nemo_rl.utils.registry import import_object
from tools.config_cli import MODELS

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "examples" / "configs"

MASTERS: dict[str, Any] = {name: import_object(path, "model") for name, path in MODELS.items()}

MINIMAL: dict[str, Any] = {
    "policy": {"model_name": "m", "train_global_batch_size": 512},
    "data": {"train": {"dataset_name": "gsm8k", "split_validation_size": 0.1}},
    "env": {"math": {}},
}
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.optimizer=null")


def build(*overrides: str) -> GRPOMasterConfig:
    return build_config(GRPOMasterConfig, MINIMAL, overrides)


def problems_of(*overrides: str) -> str:
    """The text of the error that the minimal run with `overrides` gives."""
    with pytest.raises(ConfigError) as error:
        build(*overrides)
    return str(error.value)


_CLAUSE = r"[\w.]+(?:=(?:\[[^]]*\]|\{[^}]*\}|[^\s,;)]+)| above [\d.]+)"
_WAY = rf"{_CLAUSE}(?: and {_CLAUSE})*"
_WAYS = re.compile(rf"\bset ({_WAY}(?:, or {_WAY})*)")


_THESE = re.compile(r"these would: ([\d, ]+)")


def ways_out(problem: Problem) -> list[list[str]]:
    """The overrides of each way out that a message names: as `remedy` of the rules writes them, and `these would`."""
    key, message = dotted(problem.path), problem.message
    ways = [way.split(" and ") for found in _WAYS.findall(message) for way in found.split(", or ")]
    ways += [[f"{key}={value}"] for found in _THESE.findall(message) for value in found.split(", ")]
    return [[re.sub(r" above ([\d.]+)", lambda bound: f"={float(bound[1]) + 1:g}", one) for one in way] for way in ways]


def problems_of_run(model: Any, tree: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """The problems of a run; none if it loads."""
    try:
        build_config(model, tree, overrides)
    except ConfigError as error:
        return error.problems
    return []


def misleading(model: Any, tree: dict[str, Any], overrides: Sequence[str], problems: list[Problem]) -> list[str]:
    """The ways out of `problems`, which a run has, that do not end their problem, or lead into another one."""
    found = []
    for problem in problems:
        others = {other.path for other in problems if other is not problem}
        for way in ways_out(problem):
            left = problems_of_run(model, tree, [*overrides, *way])
            new = [str(one) for one in left if one.path not in others or one.message == problem.message]
            found += [f"{problem}\n  {' '.join(way)} leads to {one}" for one in new]
    return found

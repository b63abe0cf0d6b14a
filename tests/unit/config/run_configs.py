"""The configuration of every kind of run, and the smallest one of GRPO, to vary in tests."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
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

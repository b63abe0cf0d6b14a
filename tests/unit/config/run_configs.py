"""The configuration of every kind of run, and the smallest one of GRPO, to vary in tests."""

import copy
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig
from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.config.supervised import DPOMasterConfig, RMMasterConfig, SFTMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.evals.config import EvalMasterConfig

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "examples" / "configs"

MASTERS: dict[str, Any] = {
    "distillation": DistillationMasterConfig,
    "dpo": DPOMasterConfig,
    "eval": EvalMasterConfig,
    "grpo": GRPOMasterConfig,
    "ppo": PPOMasterConfig,
    "rm": RMMasterConfig,
    "sft": SFTMasterConfig,
}

MINIMAL: dict[str, Any] = {
    "policy": {"model_name": "m", "train_global_batch_size": 512},
    "data": {"train": {"dataset_name": "gsm8k", "split_validation_size": 0.1}},
    "env": {"math": {}},
}


def build(*overrides: str) -> GRPOMasterConfig:
    return build_config(GRPOMasterConfig, copy.deepcopy(MINIMAL), overrides)


def problems_of(*overrides: str) -> str:
    """The text of the error that the minimal run with `overrides` gives."""
    try:
        build(*overrides)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"accepted: {overrides}")

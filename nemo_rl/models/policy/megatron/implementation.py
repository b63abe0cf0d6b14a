"""Which modules Megatron's layers are made of: Transformer Engine's or torch's. Imports neither."""

from __future__ import annotations

import importlib.util

from nemo_rl.models.policy.megatron_config import MegatronConfig


def uses_transformer_engine(settings: MegatronConfig, *, use_gpu: bool) -> bool:
    """Whether layers are Transformer Engine's, by what is installed in this process. `auto`: where it can run.

    Raises:
        ValueError: they are asked for and cannot run here.
    """
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    if settings.transformer_impl == "transformer_engine" and not (is_installed and use_gpu):
        lacking = "is not installed" if use_gpu else "runs on GPUs only"
        raise ValueError(
            f"policy.megatron_cfg.transformer_impl=transformer_engine: Transformer Engine {lacking}; set it to local"
        )
    return settings.transformer_impl != "local" and is_installed and use_gpu

"""How `policy.optimizer` is written for Megatron Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SECTION = "policy.megatron_cfg.optimizer"
_NAMES = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps", "momentum": "sgd_momentum"}


def carried_over(kwargs: Mapping[str, Any]) -> str:
    """`, and say policy.megatron_cfg.optimizer.lr=0.0003 ... instead`, for arguments that Megatron has too."""
    values = {new: kwargs[old] for old, new in _NAMES.items() if old in kwargs}
    betas = kwargs.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        values |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    if not values:
        return f", and use {_SECTION}"
    return ", and carry its values over: " + " ".join(f"{_SECTION}.{name}={value}" for name, value in values.items())

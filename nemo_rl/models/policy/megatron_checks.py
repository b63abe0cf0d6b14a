"""Whether a model can be trained with Megatron Core as asked, found on the driver before any worker loads it."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from nemo_rl.models.policy.config import PolicyConfig


def check_megatron(policy: PolicyConfig, model: PretrainedConfig) -> None:
    """Raises ValueError naming the key to change and what would work."""


def check_megatron_checkpoint(directory: Path, policy: PolicyConfig, model: PretrainedConfig) -> None:
    """Whether the weights in `directory/weights` are those of this model. Raises CheckpointError otherwise."""

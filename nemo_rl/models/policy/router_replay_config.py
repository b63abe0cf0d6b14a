"""Configuration of routing replay: `policy.router_replay`."""

from __future__ import annotations

from nemo_rl.config.base import StrictModel


class RouterReplayConfig(StrictModel):
    """Training a mixture-of-experts model with the experts that generation chose for the same tokens."""

    enabled: bool = False
    """Have the engine return the experts of every token, and take these in logprob and training passes. With
    `policy.megatron_cfg`."""

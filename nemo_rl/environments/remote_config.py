"""Configuration of an environment behind HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemo_rl.environments.actors_config import ActorsConfig
from nemo_rl.environments.address import HttpAddress


class RemoteEnvironmentConfig(ActorsConfig):
    """An environment behind HTTP, by the protocol of `nemo_rl/environments/remote_protocol.py`."""

    type: Literal["remote"] = "remote"
    """Registry name of the environment."""

    base_url: HttpAddress
    """Where its server is, e.g. `http://127.0.0.1:8100`."""

    token_env: str | None = None
    """Environment variable that holds the server's token; null: none is sent."""

    batch_size: int = Field(default=256, ge=1)
    """Conversations of one request at most."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one attempt at a request."""

    max_retries: int = Field(default=3, ge=0)
    """How often a request is sent again, under the same id, that found no server, lost its connection, took too long
    or was refused with status 408, 425, 429, 502, 503 or 504."""

    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before a request is sent again; doubled each time."""

    time_limit_s: float = Field(default=240.0, gt=0)
    """Time for all of one step, retries included; conversations without an answer by then have failed. Below
    `grpo.env_step_timeout_s`, which ends the whole process."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the run waits for the server when it starts."""

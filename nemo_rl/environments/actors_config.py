"""How many processes an environment has."""

from __future__ import annotations

from pydantic import Field

from nemo_rl.config.base import StrictModel


class ActorsConfig(StrictModel):
    """Base of the sections of environments that may run as several actors."""

    num_actors: int = Field(default=1, ge=1)
    """Actors that share the episodes; an episode stays on one of them, and a slow batch holds up its own only."""

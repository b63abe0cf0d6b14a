"""How busy the two sides of a run are, training and generation, and which of them waits for the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl.rollouts.busy_time import GenerationUse

WAITING_PHASES = ("generation", "exposed_generation", "wait_for_rollouts")
"""Phases in which the policy's workers have nothing to do."""

EVEN = 0.1
"""Two idle fractions nearer to each other than this are called even."""


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """Shares of the time in which each side had nothing to do."""

    training_idle: float
    generation_idle: float
    exposed_generation_s: float  # that the step waited for groups

    @classmethod
    def of(cls, seconds: Mapping[str, float], generation: GenerationUse) -> PoolUse:
        """Of a step: `seconds` of its phases and as `total_step_time` of all of it; `generation` since the last step.

        Colocated and in turns, each side idles while the other works, so that the two add up to about 1.
        """
        exposed_s = sum(seconds.get(name, 0.0) for name in WAITING_PHASES)
        return cls(
            training_idle=exposed_s / seconds["total_step_time"],
            generation_idle=1.0 - generation.busy_s / generation.window_s,
            exposed_generation_s=exposed_s,
        )

    def metrics(self) -> dict[str, float]:
        """For `performance/`."""
        return {
            "training_idle_fraction": self.training_idle,
            "generation_idle_fraction": self.generation_idle,
            "exposed_generation_s": self.exposed_generation_s,
        }

    def verdict(self) -> str:
        """Which side has too little to do, for people; of use where both could be busy at the same time."""
        if self.training_idle > self.generation_idle + EVEN:
            return f"training waits for rollouts {self.training_idle:.0%}"
        if self.generation_idle > self.training_idle + EVEN:
            return f"generation starves: {self.generation_idle:.0%} idle"
        return f"training idle {self.training_idle:.0%}, generation {self.generation_idle:.0%}"

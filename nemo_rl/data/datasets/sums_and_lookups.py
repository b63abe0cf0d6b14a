"""Demonstrations of two tasks in turn, for the warm-up of a tiny model that can do a little of both."""

from __future__ import annotations

import random

from nemo_rl.data.datasets import arithmetic, lookup


def demonstrate(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A problem of the dataset `arithmetic`, or as often a question of `lookup`, with the answer of each."""
    if rng.random() < 0.5:
        return lookup.demonstrate(rng, mistake_probability)
    [conversation] = arithmetic.demonstrate_batch(rng, mistake_probability, 1, max_operand=9, operators="+-")
    return conversation

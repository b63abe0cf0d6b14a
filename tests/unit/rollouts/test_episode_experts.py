"""What an episode keeps of the experts that the engine says its tokens went through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_rl.rollouts.episode import EpisodeLimits, run_episode
from nemo_rl.types import Completion, Sample, SamplingParams, StopReason
from tests.unit.rollouts.test_episode import FakeEngine, FakeEnvironment, outcome


@dataclass
class EngineWithExperts:
    """The experts of token number t are [turn, t], in one layer."""

    inner: FakeEngine
    silent_turns: set[int] = field(default_factory=set)

    async def __call__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        completion = await self.inner(prompt_token_ids, sampling, seed)
        turn = len(self.inner.asked) - 1
        if turn in self.silent_turns:
            return completion
        count = len(prompt_token_ids) + len(completion.token_ids) - 1
        experts = np.array([[[turn, token]] for token in range(count)], dtype=np.uint8)
        return replace(completion, routed_experts=experts)


def play(silent_turns: set[int]) -> Sample:
    turns = [([11, 12], StopReason.STOP), ([13], StopReason.STOP), ([14, 15], StopReason.STOP)]
    message = {"role": "user", "content": "q", "token_ids": [1, 2, 3]}
    return asyncio.run(
        run_episode(
            {"message_log": [message], "extra_env_info": None, "task_name": "t", "idx": 0},  # pyright: ignore
            sample_id="0",
            generate=EngineWithExperts(FakeEngine(turns), silent_turns),
            env_step=FakeEnvironment([outcome(0.0, False), outcome(0.0, False), outcome(1.0, True)]),
            decode=lambda tokens: " ".join(map(str, tokens)),
            render=lambda observation, *, sampled: [21, 22],
            sampling=SamplingParams(max_new_tokens=8),
            limits=EpisodeLimits(max_turns=3, max_total_tokens=100),
            seed_of_turn=lambda turn: turn,
        )
    )


def turns_of_tokens(sample: Sample) -> list[int]:
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 1].tolist() == list(range(len(sample.routed_experts))), "of its own token"
    return sample.routed_experts[:, 0, 0].tolist()


def test_experts_are_those_of_the_turn_that_computed_the_token_first():
    sample = play(set())
    # Prompt 3, turn 2, observation 2, turn 1, observation 2, turn 2; the last token of a turn comes with the next.
    assert turns_of_tokens(sample) == [0] * 4 + [1] * 3 + [2] * 4
    assert len(sample.token_ids) == 12
    assert sample.routed_experts is not None and sample.meta.routed_experts_bytes == sample.routed_experts.nbytes > 0


def test_a_turn_without_experts_is_made_up_for_by_the_next():
    assert turns_of_tokens(play({0})) == [1] * 7 + [2] * 4
    assert turns_of_tokens(play({2})) == [0] * 4 + [1] * 3, "the rest has none"
    without = play({0, 1, 2})
    assert without.routed_experts is None and without.meta.routed_experts_bytes == 0

"""A game of two players: both answer the same sum, and the one that is right alone wins. The opponent stays as it is.

The rewards are the matrix of the game for the player: 1 for a win, 0.5 for a draw, 0 for a defeat. Run it with
`examples/run_grpo.py --config examples/configs/grpo_duel_cpu.yaml`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from nemo_rl.environments.agents.interfaces import AgentTask

HTTP = openai.DefaultAsyncHttpxClient()
NUM_ROUNDS = 2


async def play(task: AgentTask) -> dict[str, Any]:
    """The player's mean over the rounds. Each player sees its own moves only."""
    right = f"\\boxed{{{task.row['expected_answer']}}}"
    histories: dict[str, list[Any]] = {role: list(task.messages) for role in ("player", "opponent")}
    score, num_wins = 0.0, 0
    for _ in range(NUM_ROUNDS):
        moves = await asyncio.gather(*(_move(task, role, history) for role, history in histories.items()))
        is_right = [right in move for move in moves]
        score += 0.5 + 0.5 * (is_right[0] - is_right[1])
        num_wins += is_right[0] and not is_right[1]
        for (_, history), move in zip(histories.items(), moves, strict=True):
            history += [{"role": "assistant", "content": move}, task.messages[-1]]
    return {"rewards": {"player": score / NUM_ROUNDS}, "metrics": {"wins": num_wins / NUM_ROUNDS}}


async def _move(task: AgentTask, role: str, history: list[Any]) -> str:
    client = openai.AsyncOpenAI(base_url=task.roles[role], api_key=task.api_key, http_client=HTTP)
    answer = await client.chat.completions.create(model=task.model, messages=history)
    return answer.choices[0].message.content or ""

"""An agent that owns its loop: it asks, checks the answer itself, and asks once more in the same conversation.

Run it with `examples/run_grpo.py --config examples/configs/grpo_agent_cpu.yaml`.
"""

from __future__ import annotations

from typing import Any

import openai

from nemo_rl.environments.agents.interfaces import AgentTask

NUM_TRIES = 2
HTTP = openai.DefaultHttpxClient()  # a client of its own for each episode would open as many connections


def solve(task: AgentTask) -> float:
    """Returns the share of right answers."""
    right = f"\\boxed{{{task.row['expected_answer']}}}"
    messages: list[Any] = list(task.messages)
    num_right = 0
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP)
    for _ in range(NUM_TRIES):
        answer = client.chat.completions.create(model=task.model, messages=messages).choices[0].message
        num_right += right in (answer.content or "")
        messages += [{"role": "assistant", "content": answer.content}, task.messages[-1]]
    return num_right / NUM_TRIES

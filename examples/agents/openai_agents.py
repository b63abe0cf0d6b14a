"""An agent of OpenAI's agents SDK with a tool of its own, by `/v1/responses`.

`py_executable: requirements/agents/openai_agents.txt` gives it a Python of its own; see docs/guides/agents.md.
"""

from __future__ import annotations

from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

from nemo_rl.environments.agents.interfaces import AgentTask

set_tracing_disabled(True)  # the SDK sends traces to OpenAI otherwise
HTTP = openai.DefaultAsyncHttpxClient()


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two integers."""
    return a + b


async def solve(task: AgentTask, max_turns: int = 4) -> dict[str, Any]:
    """1 for the right answer. A call of a tool that does not exist, and a loop without an end, are wrong answers."""
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP)
    agent = Agent(
        name="calculator",
        model=OpenAIResponsesModel(model=task.model, openai_client=client),
        model_settings=ModelSettings(parallel_tool_calls=None),
        tools=[add],
    )
    messages: Any = [{"role": message["role"], "content": message["content"]} for message in task.messages]
    try:
        result = await Runner.run(agent, input=messages, max_turns=max_turns)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return {"reward": 0.0, "metrics": {"gave_up": 1.0}}
    right = f"\\boxed{{{task.row['expected_answer']}}}" in str(result.final_output)
    return {"reward": float(right), "metrics": {"gave_up": 0.0}}

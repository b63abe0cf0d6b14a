"""An agent of OpenAI's agents SDK with a tool of its own, by `/v1/responses`.

Run it with `examples/run_grpo.py --config examples/configs/grpo_agent_tools_cpu.yaml`.
"""

from __future__ import annotations

from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, ToolCallItem, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.code.tools import calculate

set_tracing_disabled(True)  # the SDK sends traces to OpenAI otherwise
HTTP = openai.DefaultAsyncHttpxClient()


@function_tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    return calculate(expression)


async def solve(task: AgentTask, max_turns: int = 4) -> dict[str, Any]:
    """1 for the right answer. A call of a tool that does not exist, and a loop without an end, are wrong answers."""
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP)
    agent = Agent(
        name="calculator",
        model=OpenAIResponsesModel(model=task.model, openai_client=client),
        model_settings=ModelSettings(parallel_tool_calls=None),
        tools=[calculator],
    )
    messages: Any = [{"role": message["role"], "content": message["content"]} for message in task.messages]
    try:
        result = await Runner.run(agent, input=messages, max_turns=max_turns)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return {"reward": 0.0, "metrics": {"gave_up": 1.0}}
    right = f"\\boxed{{{task.row['expected_answer']}}}" in str(result.final_output)
    num_calls = sum(isinstance(item, ToolCallItem) for item in result.new_items)
    return {"reward": float(right), "metrics": {"gave_up": 0.0, "tool_calls": num_calls}}

"""An agent of LangGraph with a tool: the loop that `langchain.agents.create_agent` makes.

    uv run --extra cpu examples/run_grpo.py --config examples/configs/grpo_agent_tools_cpu.yaml \\
        env.tool_agent.run=examples.agents.langgraph_agent:solve \\
        env.tool_agent.py_executable=requirements/agents/langgraph.txt
"""

from __future__ import annotations

from typing import Any

import openai
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from pydantic import SecretStr

from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.code.tools import ToolError, calculate

HTTP = openai.DefaultAsyncHttpxClient()


@tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    try:
        return calculate(expression)
    except ToolError as error:
        return f"error: {error}"


async def solve(task: AgentTask, max_steps: int = 8) -> dict[str, Any]:
    """1 for the right answer. A loop without an end is a wrong answer. `max_steps`: of the graph; a call takes two."""
    model = ChatOpenAI(
        model=task.model, base_url=task.base_url, api_key=SecretStr(task.api_key), http_async_client=HTTP, max_retries=0
    )
    question: Any = {"messages": [{"role": m["role"], "content": m["content"]} for m in task.messages]}
    try:
        messages = (await create_agent(model, [calculator]).ainvoke(question, {"recursion_limit": max_steps}))[
            "messages"
        ]
    except GraphRecursionError:
        return {"reward": 0.0, "metrics": {"gave_up": 1.0}}
    right = f"\\boxed{{{task.row['expected_answer']}}}" in str(messages[-1].content)
    num_calls = sum(message.type == "tool" for message in messages)
    return {"reward": float(right), "metrics": {"gave_up": 0.0, "tool_calls": num_calls}}

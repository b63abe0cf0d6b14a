"""An environment of OpenEnv behind its server: the model's answer is the action, and the observation its next message.

Its rows first, one for each seed, then the run:

    uv run --with-requirements requirements/agents/openenv.txt python -m examples.agents.openenv_env URL rows.jsonl
    env.mine: {type: agent, run: examples.agents.openenv_env:play, kwargs: {url: URL}}

`action` and `observation` name the fields of both that have the text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import openai
from openenv.core import GenericEnvClient

from nemo_rl.environments.agents.interfaces import AgentTask

HTTP = openai.DefaultAsyncHttpxClient()


async def play(task: AgentTask, url: str, action: str = "text", observation: str = "text") -> dict[str, Any]:
    """One episode with a session of its own at the server; the reward is the sum of those of its steps."""
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP, max_retries=0)
    messages: list[Any] = list(task.messages)
    reward, num_steps = 0.0, 0
    async with GenericEnvClient(url) as env:
        result = await env.reset(seed=task.row["seed"])
        while not result.done:
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            said = answer.choices[0].message.content or ""
            result = await env.step({action: said})
            reward += result.reward or 0.0
            num_steps += 1
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": result.observation[observation]},
            ]
    return {"reward": reward, "metrics": {"steps": num_steps}}


async def questions(url: str, num_rows: int, observation: str) -> list[str]:
    """The first message of the environment, for each seed."""
    async with GenericEnvClient(url) as env:
        return [(await env.reset(seed=seed)).observation[observation] for seed in range(num_rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("rows", help="file to write")
    parser.add_argument("--num-rows", type=int, default=256)
    parser.add_argument("--observation", default="text")
    args = parser.parse_args()
    with open(args.rows, "w", encoding="utf-8") as file:
        for seed, text in enumerate(asyncio.run(questions(args.url, args.num_rows, args.observation))):
            file.write(json.dumps({"messages": [{"role": "user", "content": text}], "seed": seed}) + "\n")


if __name__ == "__main__":
    main()

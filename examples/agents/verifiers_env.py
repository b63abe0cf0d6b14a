"""An environment of the package `verifiers` as it is: one turn, several, or with tools.

Its rows first, then the run; `py_executable: requirements/agents/verifiers.txt` gives both a Python of its own:

    uv run --with-requirements requirements/agents/verifiers.txt python -m examples.agents.verifiers_env NAME rows.jsonl
    env.mine: {type: agent, run: examples.agents.verifiers_env:play, kwargs: {environment: NAME}}
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from typing import Any
from unittest.mock import patch

import openai
import verifiers as vf
from verifiers.clients import OpenAIChatCompletionsClient

from nemo_rl.environments.agents.interfaces import AgentTask

HTTP = openai.DefaultAsyncHttpxClient()


@cache
def load(environment: str, arguments: str) -> vf.Environment:
    """The environment. The handlers of signals that it sets are for a program of its own; here the run has them."""
    with patch("signal.signal"):
        return vf.load_environment(environment, **json.loads(arguments))


async def play(task: AgentTask, environment: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """One rollout of the environment, scored by its rubric. The task's row has the environment's as JSON."""
    env = load(environment, json.dumps(arguments or {}))
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP, max_retries=0)
    output: Any = await env.run_rollout(
        json.loads(task.row["rollout"]), OpenAIChatCompletionsClient(client), task.model, sampling_args={}
    )
    if output["error"] is not None:
        raise RuntimeError(f"{environment}: {output['error']}")
    metrics = {name: value for name, value in (output["metrics"] or {}).items() if isinstance(value, int | float)}
    return {"reward": output["reward"], "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment")
    parser.add_argument("rows", help="file to write")
    parser.add_argument("--arguments", default="{}", help="of load_environment, as JSON")
    args = parser.parse_args()
    env = load(args.environment, args.arguments)
    with open(args.rows, "w", encoding="utf-8") as file:
        for row in env.get_dataset():
            shown = [{"role": turn["role"], "content": turn["content"]} for turn in row["prompt"]]
            kept = {name: value for name, value in row.items() if value is not None}
            file.write(json.dumps({"messages": shown, "rollout": json.dumps(kept)}) + "\n")


if __name__ == "__main__":
    main()

"""Tasks of NeMo Gym, played with its servers: https://docs.nvidia.com/nemo/gym/latest.

    env.gym: {type: agent, run: nemo_rl.environments.agents.nemo_gym:play, kwargs: {resources_url: http://host:port}}

A resources server has the tools of a task and its verifier; this module is then the agent: `/seed_session`, the model
by `/v1/responses` and the tools in turn, `/verify`. An agent server does all of that by itself: `agent_url` is posted
`/run`. Its requests have the parameters of the row, with the key of the episode's session in their metadata, so its
model server is `http://<session.host>:<session.port>` of the run. Rows come from `dataset_name: nemo_gym`.
"""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from nemo_rl.environments.agents.interfaces import AgentTask
from nemo_rl.environments.agents.runner import MAX_QUOTED, AgentFailed, post_json

# The keys of a response that a verifier reads.
_RESPONSE_KEYS = (
    *("id", "object", "created_at", "model", "parallel_tool_calls"),
    *("tool_choice", "tools", "usage", "status"),
)


async def play(
    task: AgentTask, resources_url: str | None = None, agent_url: str | None = None, max_steps: int = 100
) -> dict[str, Any]:
    """The reward of one task, and the numbers that its verifier returns beside it.

    ValueError unless there is exactly one URL, and the row is one of NeMo Gym. AgentFailed for an error status.
    """
    if (resources_url is None) == (agent_url is None):
        raise ValueError("give resources_url, for the tools and the verifier of tasks, or agent_url, for their agent")
    if "gym" not in task.row:
        raise ValueError("the row is no task of NeMo Gym: set dataset_name: nemo_gym")
    row: Mapping[str, Any] = task.row["gym"]
    # One of its own for each episode: a resources server knows its session by a cookie, also at an IP address.
    jar = aiohttp.CookieJar(unsafe=True)
    timeout = aiohttp.ClientTimeout(total=None)  # the runner has the limit of the episode
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=timeout) as http:
        if agent_url is not None:
            params = row["responses_create_params"]
            params = {**params, "metadata": {**(params.get("metadata") or {}), "nemo_rl_key": task.api_key}}
            verified = await post_json(http, f"{agent_url}/run", {**row, "responses_create_params": params})
        else:
            await post_json(http, f"{resources_url}/seed_session", row)
            response = await _respond(http, task, str(resources_url), row["responses_create_params"], max_steps)
            verified = await post_json(http, f"{resources_url}/verify", {**row, "response": response})
    if not isinstance(verified, dict) or not isinstance(verified.get("reward"), int | float):
        raise AgentFailed(f"the verifier returned no reward: {str(verified)[:MAX_QUOTED]}")
    known = {"reward", *row}
    numbers = {k: v for k, v in verified.items() if isinstance(v, int | float) and k not in known}
    return {"reward": verified["reward"], "metrics": numbers}


async def _respond(
    http: aiohttp.ClientSession, task: AgentTask, resources_url: str, params: Mapping[str, Any], max_steps: int
) -> dict[str, Any]:
    """The model and the tools in turn, until an answer has no call. Returns the response with all items."""
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    # Parameters that the model does not have, as reasoning efforts, are left out: the run decides how it samples.
    keys = ("instructions", "tools", "max_output_tokens")
    wanted = {key: params[key] for key in keys if params.get(key) is not None}
    headers = {"Authorization": f"Bearer {task.api_key}"}
    tools = {tool.get("name") for tool in wanted.get("tools", ())}
    output: list[dict[str, Any]] = []
    response: dict[str, Any] = {}
    for _ in range(max_steps):
        body = {"model": task.model, "input": [*items, *output], **wanted}
        response = await post_json(http, f"{task.base_url}/responses", body, headers)
        output += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        for call in calls:
            content = f"there is no tool {call['name']!r}"
            if call["name"] in tools:  # the server has other paths, such as its verifier's
                url, arguments = f"{resources_url}/{call['name']}", json.loads(call["arguments"])
                async with http.post(url, json=arguments, allow_redirects=False) as answer:
                    content = await answer.text()  # an error of a tool is for the model to read
            output.append({"type": "function_call_output", "call_id": call["call_id"], "output": content})
        if not calls:
            break
    return {**{key: response[key] for key in _RESPONSE_KEYS if key in response}, "output": output}

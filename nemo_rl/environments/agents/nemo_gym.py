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

MAX_QUOTED = 2000  # characters
# Of a response: what a verifier reads. The rest is ours.
_RESPONSE_KEYS = (
    "id",
    "object",
    "created_at",
    "model",
    "parallel_tool_calls",
    "tool_choice",
    "tools",
    "usage",
    "status",
)


class GymError(RuntimeError):
    """A server of NeMo Gym, or the model, answered with an error."""


async def play(
    task: AgentTask, resources_url: str | None = None, agent_url: str | None = None, max_steps: int = 100
) -> dict[str, Any]:
    """The reward of one task, and the numbers that its verifier returns beside it.

    Raises:
        ValueError: unless there is exactly one URL, and the row is one of NeMo Gym.
        GymError: for an answer with an error status.
    """
    if (resources_url is None) == (agent_url is None):
        raise ValueError("give resources_url, for the tools and the verifier of tasks, or agent_url, for their agent")
    if "gym" not in task.row:
        raise ValueError("the row is none of NeMo Gym: set dataset_name: nemo_gym")
    row: Mapping[str, Any] = task.row["gym"]
    # One of its own for each episode: a resources server knows its session by a cookie, also at an IP address.
    jar = aiohttp.CookieJar(unsafe=True)
    timeout = aiohttp.ClientTimeout(total=None)  # the runner has the limit of the episode
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=timeout) as http:
        if agent_url is not None:
            params = row["responses_create_params"]
            params = {**params, "metadata": {**(params.get("metadata") or {}), "nemo_rl_key": task.api_key}}
            verified = await _post(http, f"{agent_url}/run", {**row, "responses_create_params": params})
        else:
            await _post(http, f"{resources_url}/seed_session", row)
            response = await _respond(http, task, str(resources_url), row["responses_create_params"], max_steps)
            verified = await _post(http, f"{resources_url}/verify", {**row, "response": response})
    if not isinstance(verified, dict) or not isinstance(verified.get("reward"), int | float):
        raise GymError(f"the verifier returned no reward: {str(verified)[:MAX_QUOTED]}")
    known = {"reward", *row}
    numbers = {k: v for k, v in verified.items() if isinstance(v, int | float) and k not in known}
    return {"reward": verified["reward"], "metrics": numbers}


async def _respond(
    http: aiohttp.ClientSession, task: AgentTask, resources_url: str, params: Mapping[str, Any], max_steps: int
) -> dict[str, Any]:
    """The model and the tools in turn, until an answer has no call. Returns the response with all items."""
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    # What the model cannot do, as reasoning efforts, is left out: the run decides how it samples.
    keys = ("instructions", "tools", "max_output_tokens")
    wanted = {key: params[key] for key in keys if params.get(key) is not None}
    headers = {"Authorization": f"Bearer {task.api_key}"}
    tools = {tool.get("name") for tool in wanted.get("tools", ())}
    output: list[dict[str, Any]] = []
    response: dict[str, Any] = {}
    for _ in range(max_steps):
        body = {"model": task.model, "input": [*items, *output], **wanted}
        response = await _post(http, f"{task.base_url}/responses", body, headers)
        output += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        for call in calls:
            # The server has other paths, such as its verifier's, which are no tools.
            is_tool = call["name"] in tools
            content = await _call(http, resources_url, call) if is_tool else f"there is no tool {call['name']!r}"
            output.append({"type": "function_call_output", "call_id": call["call_id"], "output": content})
        if not calls:
            break
    return {**{key: response[key] for key in _RESPONSE_KEYS if key in response}, "output": output}


async def _call(http: aiohttp.ClientSession, resources_url: str, call: Mapping[str, Any]) -> str:
    """What a tool answers; its errors are for the model to read."""
    url = f"{resources_url}/{call['name']}"
    async with http.post(url, json=json.loads(call["arguments"]), allow_redirects=False) as answer:
        return await answer.text()


async def _post(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Any:
    async with http.post(url, json=body, headers=headers, allow_redirects=False) as answer:
        said = await answer.text()
        if answer.status != 200:
            raise GymError(f"POST {url}: status {answer.status}: {said[:MAX_QUOTED]}")
        try:
            return json.loads(said)
        except json.JSONDecodeError as error:
            raise GymError(f"POST {url}: the answer is no JSON: {said[:MAX_QUOTED]}") from error

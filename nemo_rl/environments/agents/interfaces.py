"""The input and the result of an agent: a program that the user writes, which calls the model over HTTP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nemo_rl.utils.registry import import_object


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """One episode, for the agent. `base_url` and `api_key` reach the model in the episode's own session.

    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    client.chat.completions.create(model=task.model, messages=task.messages)
    """

    base_url: str
    api_key: str
    model: str
    reward_url: str  # POST {"reward": 1.0} with the key, for one answer also {"answer": its id}; or return the reward
    row: Mapping[str, Any]  # of the dataset
    messages: Sequence[Mapping[str, Any]]  # the prompt: role and content
    metadata: Any  # of the data processor, e.g. {"ground_truth": "4"}
    seed: int  # of this episode, for random choices of the agent
    episode: str  # the sample's id
    roles: Mapping[str, str] = field(default_factory=dict)  # role -> base URL of the session in its name


def import_agent(path: str) -> Callable[[AgentTask], Any]:
    """The function that plays episodes. Raises ValueError if it cannot be imported."""
    return import_object(path, "agent")


class AgentEnd(StrEnum):
    """How an agent ended."""

    DONE = "done"
    CRASHED = "crashed"
    HUNG = "hung"  # stopped at its time limit


@dataclass(frozen=True, kw_only=True)
class AgentOutcome:
    """The result of an agent that has ended."""

    end: AgentEnd
    reward: float | None = None  # that it returned
    rewards: Mapping[str, float] = field(default_factory=dict)  # of single roles
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""  # the reason, unless it is done

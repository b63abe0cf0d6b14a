"""Starts agents, one for each episode: a Python callable, in the process of this actor.

Agents run beside each other. A callable that does not return is left alone when its time is over: its session is
closed, and its next call of the model raises.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemo_rl.environments.agents.interfaces import AgentEnd, AgentOutcome, AgentTask
from nemo_rl.environments.config import AgentEnvironmentConfig
from nemo_rl.utils.registry import import_object


class AgentRunner:
    """An actor that runs the agents of a section `env.<name>` of type `agent`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.config = AgentEnvironmentConfig(**options)
        self.agent = import_object(self.config.run, "agent")
        self._slots = asyncio.Semaphore(self.config.max_concurrent)
        self._threads = ThreadPoolExecutor(self.config.max_concurrent, thread_name_prefix="agent")

    async def run(self, task: AgentTask) -> AgentOutcome:
        """Run one episode to its end. The time limit begins when the agent does."""
        async with self._slots:
            playing = asyncio.create_task(self._call(task))
            try:
                await asyncio.wait([playing], timeout=self.config.time_limit_s)
                if not playing.done():
                    limit = f"it had not ended after time_limit_s={self.config.time_limit_s:g}"
                    return AgentOutcome(end=AgentEnd.HUNG, failure=limit)
                error = playing.exception()  # whatever a program of the user raises is its outcome
                if error is not None:
                    return AgentOutcome(end=AgentEnd.CRASHED, failure=_text(error))
                return playing.result()
            finally:
                playing.cancel()

    async def _call(self, task: AgentTask) -> AgentOutcome:
        if inspect.iscoroutinefunction(self.agent):
            return outcome(await self.agent(task))
        return outcome(await asyncio.get_running_loop().run_in_executor(self._threads, self._in_thread, task))

    def _in_thread(self, task: AgentTask) -> Any:
        try:
            return self.agent(task)
        except SystemExit as error:  # would end this actor with all its agents
            raise RuntimeError(f"it called sys.exit({error.code!r})") from error


def outcome(returned: Any) -> AgentOutcome:
    """What a callable returned: nothing, a number, or `{"reward": number, "metrics": {name: number}}`.

    Raises TypeError or ValueError for anything else.
    """
    metrics: Any = {}
    reward = returned
    if isinstance(returned, Mapping):
        unknown = returned.keys() - {"reward", "metrics"}
        if unknown:
            raise ValueError(f"an agent returns reward and metrics, not {', '.join(sorted(map(str, unknown)))}")
        reward, metrics = returned.get("reward"), returned.get("metrics", {})
    if reward is not None and not math.isfinite(reward := float(reward)):
        raise ValueError(f"an agent's reward must be finite, got {reward}")
    return AgentOutcome(
        end=AgentEnd.DONE, reward=reward, metrics={str(name): float(value) for name, value in metrics.items()}
    )


def _text(error: BaseException) -> str:
    """The error and the line of the agent that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"

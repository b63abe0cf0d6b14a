"""A server of OpenEnv to try `openenv_env.py` with: a sum, which is asked again while the answer is wrong.

uv run --with-requirements requirements/agents/openenv.txt python -m examples.agents.openenv_sums 8000
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MAX_TRIES = 3
MAX_EPISODES = 1000  # at the same time


class Answer(Action):
    text: str


class Question(Observation):
    text: str


class Sums(Environment[Answer, Question, State]):
    """The same seed asks the same sum."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = self.num_tries = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Question:
        draw = random.Random(seed)
        self.a, self.b, self.num_tries = draw.randint(0, 9), draw.randint(0, 9), 0
        return Question(text=f"{self.a}+{self.b}")

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Question:
        self.num_tries += 1
        is_right = f"\\boxed{{{self.a + self.b}}}" in action.text
        done = is_right or self.num_tries == MAX_TRIES
        return Question(text=f"{self.a}+{self.b}", reward=float(is_right), done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.num_tries)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    app = create_fastapi_app(Sums, Answer, Question, max_concurrent_envs=MAX_EPISODES)
    # It logs an error for each client that leaves first.
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="critical")

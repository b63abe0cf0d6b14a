"""The section of agents: programs of their own that call the model."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.rules import StrictModel
from nemo_rl.environments.section_parts import ActorsConfig, HttpAddress


class SessionConfig(StrictModel):
    """The address of the sessions of agents. Each session has its own key."""

    host: str = "127.0.0.1"
    """Address of the interface; 127.0.0.1 admits programs of this machine only."""

    port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0 is any free one."""


class AgentEnvironmentConfig(ActorsConfig):
    """Agents that own their loop: programs that call the model in a session of their own, and give a reward."""

    type: Literal["agent"] = "agent"

    run: str | None = None
    """Import path (`pkg.module:name`) of a function of one `AgentTask`, plain or `async`, that plays one episode."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `run`, by name."""

    command: list[str] | None = Field(default=None, min_length=1)
    """In its place: a program and its arguments, started for each episode with the session in its environment."""

    url: HttpAddress | None = None
    """In its place: a service to which each episode's task is posted as JSON."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of `command`."""

    memory_mib: int | None = Field(default=None, ge=64)
    """Address space of each process of `command` in MiB; null: no limit."""

    isolate: bool = True
    """A `command` changes files in its own folder only, reads no temporary or hidden file of other programs, and looks
    into no other process; so it finds no other session's key. Needs Landlock (Linux 5.13)."""

    network: bool = True
    """A `command` has the network. false: it connects only to the port of its session. Needs Linux 6.7."""

    paths: list[str] = Field(default_factory=list)
    """Further files and folders that an isolated `command` may read, run and change."""

    roles: dict[str, str | None] = Field(default_factory=dict)
    """Roles that the model plays in an episode, by name, each with a URL of its own: null is the policy; a model or
    checkpoint (`results/grpo/step_100`) is an opponent whose weights stay as they are."""

    verifier: str | None = None
    """Import path of a function of the task and of the conversations of the episode, one list of messages for each row,
    that returns a reward; it is added to the agent's."""

    environment: str | None = None
    """Section of `env` that gives a reward to the last conversation of the episode; it is added to the agent's."""

    credit: Literal["shared", "branch", "discounted"] = "shared"
    """Credit of the rows of an episode: its advantage for all; for each the rewards of its own answers and of the
    episode; or its advantage times `discount` for each later call of the model."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor of `credit: discounted`."""

    max_concurrent: int = Field(default=256, ge=1)
    """Agents of each actor that run at the same time."""

    time_limit_s: float = Field(default=600.0, gt=0)
    """Seconds of one agent."""

    max_generated_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one episode may sample in all its calls; the call that passes it is the last. null: no limit."""

    session: SessionConfig = SessionConfig()

    rules: ClassVar = {
        "network: not network and not isolate": "is kept only from isolated commands -> isolate=true",
        "paths requires isolate": "are of isolated commands -> isolate=true",
        "not network requires command": "is kept only from commands; leave it out",
        "paths requires command": "are of commands; leave them out",
        "env_vars requires command": "are of commands; leave them out",
        "memory_mib requires command": "limits commands; leave it out",
        "raw_text": "no effect: sessions of agents render messages themselves; leave it out",
        "kwargs requires run": "are arguments of run; a command has env_vars, and a service has the row",
        "credit: credit=discounted and roles": "roles have rewards of their own -> credit=shared | credit=branch",
        "discount: discount != 1 requires credit=discounted": (
            "no effect with {credit} -> credit=discounted | discount=1"
        ),
    }

    @property
    def rewards_rows(self) -> bool:
        """Whether each row of an episode has a reward of its own."""
        return self.credit == "branch" or bool(self.roles)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        ways = {"run": self.run, "command": self.command, "url": self.url}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            yield "run", f"an agent has one of run, command and url, not {' and '.join(given) or 'none'}"
        bad = [name for name in self.roles if not re.fullmatch(r"[\w-]+", name)]
        if bad:
            yield "roles", f"{bad[0]!r} is no name of a role: use letters, digits, _ and -"

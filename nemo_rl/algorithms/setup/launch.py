"""From a checked configuration to a run that has ended: what every algorithm's command shares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.trainers.rollout_trainer import TooManyFailures
from nemo_rl.algorithms.trainers.trainer import NonFiniteLoss, RunTools, Trainer
from nemo_rl.config.loader import dump_config
from nemo_rl.distributed.errors import ResourceInsufficientError, WorkerError
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.refit.layout import RefitError
from nemo_rl.utils.checkpoint.manager import CheckpointError, DiskFullError
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import LogError, Logger, get_next_experiment_dir
from nemo_rl.utils.venvs import VenvBuildError

USER_ERRORS = (ValueError, FileNotFoundError, ResourceInsufficientError, VenvBuildError, CheckpointError)
RUN_ERRORS = (WorkerError, RefitError, TooManyFailures, NonFiniteLoss, DiskFullError, LogError)


class Prepared(Protocol):
    """What `prepare` returns: the parts of a run that need no worker, checked."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with a run that continues it."""
        ...


ConfigT = TypeVar("ConfigT", bound=RunConfig)
PreparedT = TypeVar("PreparedT", bound=Prepared)


def launch(
    config: ConfigT,
    *,
    prepare: Callable[[ConfigT], PreparedT],
    build: Callable[[ConfigT, ExitStack, RunTools, PreparedT], Trainer],
    num_steps: int,
) -> int:
    """Set up, train, tear down. Returns the exit status: 2 for what the user has to change, 1 for what broke.

    Args:
        prepare: loads what needs no worker, and raises one of `USER_ERRORS` for what is wrong with it.
        build: a trainer ready to run, resumed if there is a checkpoint; what it starts it enters into the stack.
    """
    console = RunConsole(num_steps=num_steps)
    console.configure_logging()
    run_dir: Path | None = None
    try:
        prepared = prepare(config)
        run_dir = get_next_experiment_dir(config.logger.log_dir)
        with ExitStack() as stack:
            tools = run_tools(config, prepared, run_dir, console)
            stack.callback(tools.logger.close)
            init_ray(str(run_dir))
            stack.callback(ray.shutdown)
            build(config, stack, tools, prepared).train()
    except RUN_ERRORS as error:
        console.error(
            f"{error}\nthe run's files are in {run_dir}; the same command resumes from the last checkpoint, if there "
            "is one"
        )
        return 1
    except USER_ERRORS as error:
        console.error(str(error))
        return 2
    except KeyboardInterrupt:
        console.warn("interrupted; the same command resumes from the last checkpoint, if there is one")
        return 130
    console.info(f"done; metrics and configuration are in {run_dir}")
    return 0


def run_tools(config: RunConfig, prepared: Prepared, run_dir: Path, console: RunConsole) -> RunTools:
    """What the run writes to; the resolved configuration is written first."""
    tools = RunTools(
        logger=Logger(config.logger, run_dir),
        console=console,
        checkpointing=config.checkpointing,
        resolved_config_yaml=dump_config(config),
        identity=prepared.identity,
    )
    tools.logger.log_hyperparams(config.model_dump())
    return tools

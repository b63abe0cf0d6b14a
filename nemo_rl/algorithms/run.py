"""A command from its configuration to its exit status: console, signals, log folder, report, Ray."""

import gc
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.interruption import LAST_WORDS_S, Interruption, command_line
from nemo_rl.algorithms.loop import TRACKER_RUNS, NonFiniteLoss, RunTools, Trainer
from nemo_rl.algorithms.parts.hardware import slow_precision
from nemo_rl.algorithms.parts.saves import Saves
from nemo_rl.algorithms.trainers.group_sources import TooManyFailures
from nemo_rl.config.loader import dump_config
from nemo_rl.distributed.errors import RayLost, ResourceInsufficientError, WorkerError
from nemo_rl.distributed.virtual_cluster import init_ray, shutdown_ray
from nemo_rl.refit.layout import RefitError
from nemo_rl.report.recorder import RunRecorder
from nemo_rl.utils.alarms import LearningAlarms
from nemo_rl.utils.checkpoint.lock import FolderLost, FolderTaken
from nemo_rl.utils.checkpoint.manager import CheckpointError, DiskFullError
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.files import is_disk_full
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.logger import LogError, Logger, get_next_experiment_dir
from nemo_rl.utils.seeds import seed_everything
from nemo_rl.utils.timer import TimeoutChecker
from nemo_rl.utils.venvs import VenvBuildError

USER_ERRORS = (ValueError, FileNotFoundError, ResourceInsufficientError, VenvBuildError, CheckpointError, FolderTaken)
RUN_ERRORS = (WorkerError, RayLost, RefitError, TooManyFailures, NonFiniteLoss, DiskFullError, LogError, FolderLost)

SHUTDOWN_S = 15.0  # for the workers of a run that was told to end; what is left ends with this process


class Command:
    """`with Command(...) as command:` around all that a command does. An error in the body becomes a message.

    `status` is the exit status: 0 for success, 1 for a failure, 2 for a mistake that the user has to mend, 130 and 143
    for SIGINT and SIGTERM. Parts of the command register their end with `stack`; they end before the message.

    Args:
        num_steps: of the console's progress.
        files, again: parts of messages: the content of `folder`, and the effect of the same command.
    """

    def __init__(self, *, num_steps: int, files: str, again: str, interruption: Interruption) -> None:
        self.console = RunConsole(num_steps=num_steps)
        self.interruption = interruption
        self.stack = ExitStack()
        self.folder: Path | None = None
        self.last_words = "done"  # after success
        self.status = 0
        self._files, self._again = files, again
        self._after_status = ExitStack()  # ends when the status is known
        self._scope: AbstractContextManager[None] = self._telling_errors()

    def __enter__(self) -> Self:
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return bool(self._scope.__exit__(kind, error, traceback))

    def keep_files_in(self, folder: Path) -> None:
        """The console's lines go to events.jsonl there, too, and messages name the folder."""
        self.folder = folder
        self.console.keep_events(folder)

    @contextmanager
    def _telling_errors(self) -> Generator[None]:
        console, interruption = self.console, self.interruption
        console.configure_logging()
        with self._after_status, interruption.listening():
            try:
                with self.stack:
                    yield
                console.info(self.last_words)
            except RUN_ERRORS as error:
                text = f"{console.where(error)}: {type(error).__name__}: {error}"
                console.error(f"{text}\n{self._files} in {self.folder}; the same command {self._again}")
                self.status = console.end(1)
            except USER_ERRORS as error:
                console.error(str(error))
                self.status = console.end(2)
            except KeyboardInterrupt:
                if not console.has_ended:
                    text = f"{interruption.name}: the command ends; the same one {self._again}: {command_line()}"
                    console.warn(text)
                    console.end(interruption.status)
                self.status = interruption.status
            except BaseException as error:
                if isinstance(error, Exception) and is_disk_full(error, free_bytes=sys.maxsize):
                    self._tell_full_disk(error)
                    self.status = console.end(1)
                    return
                console.note("error", f"{type(error).__name__}: {error}")
                self.status = console.end(1)
                raise
            else:
                self.status = console.end(0)

    def _tell_full_disk(self, error: Exception) -> None:
        folders = str(cache_root()) if self.folder is None else f"{self.folder} and {cache_root()}"
        text = f"{self.console.where(error)}: a disk is full: {error}; free some space for {folders}"
        files = "" if self.folder is None else f"\n{self._files} in {self.folder}; the same command {self._again}"
        self.console.error(text + files)


class Run[ConfigT: RunConfig](Command):
    """The command of a training run.

    `with Run(config) as run:` prepare the parts that need no worker -> `run.start(saves)` -> start the parts that have
    workers -> `run.train(trainer)`.

    `tools` exist from `start` on.
    """

    tools: RunTools

    def __init__(self, config: ConfigT) -> None:
        super().__init__(
            num_steps=config.loop.max_num_steps,
            files="the run's files are",
            again="resumes from the last checkpoint, if there is one",
            interruption=Interruption(config.cluster.grace_s),
        )
        self._config = config
        self._deadline = TimeoutChecker(config.checkpointing.checkpoint_must_save_by, fit_last_save_time=True)

    def __enter__(self) -> Self:
        super().__enter__()
        seed_everything(self._config.loop.seed)
        return self

    @property
    def config(self) -> ConfigT:
        """As it was given; from `start` on, a run that resumes has the hyperparameters of its checkpoint."""
        return self._config

    def start(self, saves: Saves) -> None:
        """Take the log folder and the checkpoints, open trackers and report, start Ray."""
        run_dir = get_next_experiment_dir(self._config.logger.log_dir)
        self.keep_files_in(run_dir)
        self._config, changes, info = saves.open(self._config, run_dir, self.stack)
        for change in changes:
            self.console.warn(change)
        if (workers := self._config.workers_line) is not None:
            self.console.info(workers)
        if (slow := slow_precision(self._config)) is not None:
            self.console.warn(slow)
        config, monitor = self._config, None
        if config.logger.monitor_gpus:
            from nemo_rl.distributed.meters import UsageMonitor

            monitor = UsageMonitor(config.logger.gpu_monitoring.collection_interval, gpus=config.cluster.use_gpus)
        self.tools = tools = RunTools(
            logger=Logger(config.logger, run_dir, info.get(TRACKER_RUNS, {})),  # a run that resumes goes on there
            console=self.console,
            checkpointing=config.checkpointing,
            checkpointer=saves.manager,
            deadline=self._deadline,
            resolved_config_yaml=dump_config(config),
            identity=saves.identity,
            known_metrics=config.known_metrics,
            profile=config.performance.profile,
            monitor=monitor,
            interruption=self.interruption,
            alarms=LearningAlarms(config.logger.alarms),
        )
        tools.logger.log_hyperparams(config.model_dump())
        self.stack.push(lambda kind, error, _: tools.logger.close(f"{kind.__name__}: {error}" if kind else None))
        if config.logger.report.enabled:
            tools.recorder = RunRecorder(config.logger.report, run_dir, self.console)
            self._after_status.callback(tools.recorder.close)  # the page also says how the run ended
            tools.recorder.open(config.model_dump())
        init_ray(str(run_dir), forks_workers=not config.cluster.use_gpus)
        self.stack.callback(shutdown_ray)
        if monitor is not None:
            self.stack.enter_context(monitor)

    def train(self, trainer: Trainer) -> None:
        """Resume if there is a checkpoint, and run the loop to its end."""
        trainer.start()
        if self.tools.recorder is not None:
            self.tools.recorder.start(trainer.num_steps, trainer.policies[0])
        gc.freeze()  # what is there now stays: without this every collection would look at it
        end = trainer.describe_end()
        try:
            trainer.train()
        except (KeyboardInterrupt, *RUN_ERRORS) as error:
            if self.interruption.signal is None:
                raise
            # Told, and with its page, before the workers end, which takes seconds.
            self.console.warn(f"{trainer.describe_interruption()}: {command_line()}")
            self.console.end(self.interruption.status)
            if self.tools.recorder is not None:
                self.tools.recorder.close(max(LAST_WORDS_S, self.interruption.left_s()))
            self._after_status.enter_context(self.interruption.exit_after(SHUTDOWN_S))
            raise KeyboardInterrupt from error
        self.last_words = f"{end}; {self.tools.logger.summary()}"

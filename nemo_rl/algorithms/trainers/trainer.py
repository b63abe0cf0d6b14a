"""What every algorithm's loop shares: when to validate, to save, to log and to end. An algorithm brings its step.

while steps are left: step -> validate if due -> checkpoint if due -> log
"""

from __future__ import annotations

import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.loop import EarlyStoppingConfig, LoopConfig
from nemo_rl.distributed.errors import WorkerDied, WorkerError
from nemo_rl.utils.checkpoint.manager import CheckpointManager, check_identity
from nemo_rl.utils.checkpoint.save import PendingSave, StateWrite
from nemo_rl.utils.config import CheckpointingConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.seeds import load_rng_state, save_rng_state
from nemo_rl.utils.timer import TimeoutChecker, Timer

logger = logging.getLogger(__name__)

MAX_RECOVERIES_AT_ONE_STEP = 2
CONTROLLER_RNG = Path("rng", "controller.safetensors")


class DataExhausted(Exception):
    """The training data has been passed over `max_num_epochs` times."""


@dataclass(kw_only=True)
class TrainerState:
    """Counters that go into a checkpoint."""

    total_steps: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    best_validation: float | None = None  # of the metric that early stopping watches
    validations_without_best: int = 0  # since then
    stopped_early: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When the loop does what."""

    num_steps: int | None  # None: until the data ends
    val_period: int
    val_at_start: bool
    val_at_end: bool
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)

    @classmethod
    def of(cls, config: LoopConfig, *, num_steps: int | None) -> Schedule:
        """As the algorithm's section says, for a run of `num_steps`."""
        return cls(
            num_steps=num_steps,
            val_period=config.val_period,
            val_at_start=config.val_at_start,
            val_at_end=config.val_at_end,
            early_stopping=config.early_stopping,
        )


@dataclass(kw_only=True)
class RunTools:
    """What a run writes to and is shown on."""

    logger: Logger
    console: RunConsole
    checkpointing: CheckpointingConfig
    resolved_config_yaml: str
    identity: Mapping[str, Any]  # what a checkpoint must share with this run


class Trainer(ABC):
    """A run: state, tools and the loop. Subclasses implement `step`, `validate`, `write_state` and `read_state`.

    With `checkpointing.async_save` at most one checkpoint is on its way to the disk while the next steps are taken. It
    is looked after between steps, and finished before the next one begins and before the run ends.
    """

    def __init__(self, schedule: Schedule, tools: RunTools) -> None:
        self.schedule = schedule
        self.tools = tools
        self.state = TrainerState()
        self.timer = Timer()
        self.validated_at = -1  # step after which the last validation ran
        self.metrics: dict[str, float] = {}  # of the step in progress, by logged name
        self.checkpointer = CheckpointManager(tools.checkpointing) if tools.checkpointing.enabled else None
        self.pending_save: PendingSave | None = None
        self.deadline = TimeoutChecker(tools.checkpointing.checkpoint_must_save_by)

    @abstractmethod
    def step(self) -> None:
        """One training step, number `state.total_steps + 1`. Logs through `record`; raises DataExhausted at the end."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of a validation, by name without prefix."""

    @abstractmethod
    def write_state(self, directory: Path) -> StateWrite:
        """Write everything the next step depends on under `directory`.

        With `checkpointing.async_save` other processes may write on after the return; what they write is the present
        state.
        """

    @abstractmethod
    def read_state(self, directory: Path) -> None:
        """Inverse of `write_state`."""

    def recover(self, error: WorkerDied) -> None:
        """Rebuild what died. The default cannot: the error ends the run."""
        raise error

    # -- the loop

    def train(self) -> None:
        """Run until the steps, the data or the time are used up."""
        num_recoveries, failed_at = 0, -1
        if self.schedule.num_steps is not None:
            self.tools.console.set_num_steps(self.schedule.num_steps)
        with self.tools.console, self._save_settled():
            if self.schedule.val_at_start and self.state.total_steps == 0:
                self._validate()
                self._log()
                self._say_if_stopped_early()
            self.deadline.start_iterations()
            while not (self._is_last_step() or self.state.stopped_early):
                try:
                    is_last = self._run_step()
                except WorkerDied as error:
                    num_recoveries = num_recoveries + 1 if failed_at == self.state.total_steps else 1
                    failed_at = self.state.total_steps
                    if num_recoveries > MAX_RECOVERIES_AT_ONE_STEP:
                        raise
                    self._recover(error)
                    continue
                if is_last:
                    return

    def _run_step(self) -> bool:
        """One turn of the loop; True when it was the last."""
        try:
            with self.timer.time("total_step_time"):
                self.step()
        except DataExhausted:
            self.tools.console.info(f"the training data is used up after {self.state.total_steps} steps")
            self._finish_early()
            return True
        self.state.total_steps += 1
        self._advance_save()
        if self._validation_is_due():
            self._validate()
        out_of_time = self.deadline.check_save()
        ends = out_of_time or self.state.stopped_early
        if ends or self._checkpoint_is_due():
            self._checkpoint()
        if ends or self._is_last_step():
            self._finish_save()
        self._log()
        self.deadline.mark_iteration()
        self._say_if_stopped_early()
        if out_of_time and not self.state.stopped_early:
            self.tools.console.info(
                "checkpoint_must_save_by is near: saved, and the run ends; the same command resumes it"
            )
        return ends

    def _say_if_stopped_early(self) -> None:
        if self.state.stopped_early:
            name = self.schedule.early_stopping.metric_name
            self.tools.console.info(f"{name} is good enough or gets no better: done")

    def _finish_early(self) -> None:
        """The last validation and checkpoint of a run whose data ended before its steps."""
        self.metrics, self.timer = {}, Timer()
        validates = self.schedule.val_at_end and self.validated_at != self.state.total_steps
        if validates:
            self._validate()
        self._finish_save()
        if self.state.total_steps > 0 and not self._checkpoint_exists():
            self._checkpoint()
            self._finish_save()
        if validates:
            self._log()

    def _is_last_step(self) -> bool:
        return self.schedule.num_steps is not None and self.state.total_steps >= self.schedule.num_steps

    def _validation_is_due(self) -> bool:
        period = self.schedule.val_period
        return (period > 0 and self.state.total_steps % period == 0) or (
            self.schedule.val_at_end and self._is_last_step()
        )

    def _checkpoint_is_due(self) -> bool:
        return self.state.total_steps % self.tools.checkpointing.save_period == 0 or self._is_last_step()

    def _validate(self) -> None:
        with self.phase("validation"):
            metrics = self.validate()
        self.record("validation", metrics)
        self.validated_at = self.state.total_steps
        self._watch(metrics)
        self.record("timing/validation", {"total_validation_time": self.timer.get_latest_elapsed("validation")})

    def _watch(self, metrics: Mapping[str, float]) -> None:
        """Early stopping: whether the run ends with this validation."""
        settings, state = self.schedule.early_stopping, self.state
        if settings.metric_name is None:
            return
        value = metrics[settings.metric_name.removeprefix("val:")]
        sign, best = (1.0 if settings.higher_is_better else -1.0), state.best_validation
        if not math.isnan(value) and (best is None or sign * (value - best) > settings.min_delta):
            state.best_validation, state.validations_without_best = value, 0
        else:
            state.validations_without_best += 1
        is_reached = settings.threshold is not None and sign * (value - settings.threshold) >= 0
        is_spent = settings.patience is not None and state.validations_without_best >= settings.patience
        self.state.stopped_early = is_reached or is_spent

    def _log(self) -> None:
        """One line for the step: everything recorded since the last one, and the seconds of each phase."""
        self.record("timing/train", self.timer.get_timing_metrics("sum"))
        self.timer.reset()
        metrics, self.metrics = self.metrics, {}
        self.tools.logger.log_metrics(metrics, self.state.total_steps)
        self.tools.console.finish_step(self.state.total_steps, self.tools.logger.finish_step(self.state.total_steps))

    def record(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """Add metrics to the step in progress as `<prefix>/<name>`."""
        for name, value in metrics.items():
            assert f"{prefix}/{name}" not in self.metrics, f"{prefix}/{name} is recorded twice"
            self.metrics[f"{prefix}/{name}"] = value

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and show it while it runs."""
        with self.tools.console.phase(name), self.timer.time(name):
            yield

    # -- checkpoints

    def _checkpoint_exists(self) -> bool:
        latest = self.checkpointer.get_latest_checkpoint_path() if self.checkpointer is not None else None
        return self.checkpointer is None or (latest is not None and latest.name == f"step_{self.state.total_steps}")

    def _checkpoint(self) -> None:
        if self.checkpointer is None:
            return
        self._finish_save()
        with self.phase("checkpointing"):
            info = {**dataclasses.asdict(self.state), "identity": self.tools.identity}
            self.pending_save = self.checkpointer.start_save(
                self.state.total_steps,
                self._start_write,
                info,
                self.tools.resolved_config_yaml,
                self.metrics,
            )
        if not self.tools.checkpointing.async_save:
            self._finish_save()

    def _start_write(self, directory: Path) -> StateWrite:
        (directory / CONTROLLER_RNG).parent.mkdir()
        save_rng_state(directory / CONTROLLER_RNG, devices=False)  # the devices are the workers'
        return self.write_state(directory)

    def _advance_save(self) -> None:
        """Look after a save that runs in the background. Raises what went wrong with it."""
        if self.pending_save is None:
            return
        pending, self.pending_save = self.pending_save, None
        if pending.advance() is None:
            self.pending_save = pending
        else:
            self.deadline.note_save(pending.seconds)

    def _finish_save(self) -> None:
        """Wait for a save that runs. Raises what went wrong with it."""
        if self.pending_save is None:
            return
        pending, self.pending_save = self.pending_save, None
        with self.phase("checkpointing"):
            pending.finish()
        self.deadline.note_save(pending.seconds)

    @contextmanager
    def _save_settled(self) -> Iterator[None]:
        """No save is left running when the block is left, by whatever way."""
        try:
            yield
        except BaseException as error:
            self._settle_save(can_wait=isinstance(error, Exception) and not isinstance(error, WorkerError))
            raise
        assert self.pending_save is None

    def _settle_save(self, *, can_wait: bool) -> None:
        """After an error: finish a save that runs, or give it up where that would mean to wait for dead workers."""
        pending, self.pending_save = self.pending_save, None
        if pending is None:
            return
        if not (can_wait or pending.is_written):
            pending.discard()
            self.tools.console.warn(f"the checkpoint of step {pending.step} was still being written and is given up")
            return
        try:
            pending.finish()
        except (RuntimeError, OSError, ValueError) as failure:  # the error that ends the run is told, not this one
            self.tools.console.warn(f"the checkpoint of step {pending.step} could not be finished: {failure}")

    def resume(self) -> bool:
        """Continue from the newest sound checkpoint of this run; False when there is none."""
        path = self.checkpointer.latest_sound() if self.checkpointer is not None else None
        if path is None:
            return False
        info = CheckpointManager.load_training_info(path)
        assert info is not None
        check_identity(info["identity"], self.tools.identity)
        known = {field.name: info[field.name] for field in dataclasses.fields(TrainerState) if field.name in info}
        self.state = TrainerState(**known)
        self.read_state(path)
        load_rng_state(path / CONTROLLER_RNG, devices=False)
        self.tools.console.info(f"resumed from {path} after step {self.state.total_steps}")
        if self.state.stopped_early and self.schedule.early_stopping.metric_name is None:
            self.state.stopped_early = False
        elif self.state.stopped_early:
            self.tools.console.info("it was stopped early, and stays so; early_stopping.metric_name=null would go on")
        return True

    def _recover(self, error: WorkerDied) -> None:
        self._settle_save(can_wait=False)
        if self.checkpointer is None or self.checkpointer.latest_sound() is None:
            raise error
        self.metrics, self.timer = {}, Timer()
        self.recover(error)
        self.tools.console.warn(f"{error}\nit is replaced, and the run goes on from the last checkpoint")
        self.resume()

"""The loop that all algorithms share: when to validate, save, log and stop. An algorithm brings its step.

while steps are left: step -> validate if due -> checkpoint if due -> log
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nemo_rl.algorithms.config.loop import NO_LIMIT, LoopConfig
from nemo_rl.algorithms.interruption import LAST_WORDS_S, Interruption
from nemo_rl.algorithms.recovery import Recovery
from nemo_rl.distributed.actor_host import traced
from nemo_rl.distributed.errors import RayLost, WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import ray_loss
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.report.recorder import RunRecorder
from nemo_rl.types import LossFunction, TrainResult, loss_name, reduce_steps
from nemo_rl.utils.alarms import LearningAlarms
from nemo_rl.utils.checkpoint.manager import CheckpointManager, PendingSave, check_identity, require_optimizer
from nemo_rl.utils.checkpoint.save import AllWritten, SaveRequest, StateWrite
from nemo_rl.utils.config import AlarmsConfig, CheckpointingConfig, ProfileConfig, chosen_metric
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.seeds import load_rng_state, save_rng_state
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from nemo_rl.distributed.meters import UsageMonitor

MAX_RECOVERIES_AT_ONE_STEP = 2
CONTROLLER_RNG = Path("rng", "controller.safetensors")
TRACKER_RUNS = "tracker_runs"  # in training_info.json: the names of the run in its trackers
DATALOADER_STATE = "train_dataloader.pt"


class DataExhausted(Exception):
    """The training data has been passed over `max_num_epochs` times, or a record ends."""


class NonFiniteLoss(RuntimeError):
    """A loss or gradient was not finite and `policy.nonfinite_action` is `stop`."""


@dataclass(kw_only=True)
class TrainerState:
    """Counters that go into a checkpoint."""

    total_steps: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    best_validation: float | None = None  # best value of the metric that early stopping watches
    validations_without_best: int = 0  # since then
    owes_validation: bool = False  # a signal ended the run before the validation of its last step
    stopped_early: bool = False


@dataclass(kw_only=True)
class RunTools:
    """Logging, console and checkpointing of a run."""

    logger: Logger
    console: RunConsole
    checkpointing: CheckpointingConfig
    checkpointer: CheckpointManager | None  # None: nothing is saved
    deadline: TimeoutChecker  # counts from the start of the run, setup included
    resolved_config_yaml: str
    identity: Mapping[str, Any]  # values that a checkpoint must share with this run
    known_metrics: Collection[str] = frozenset()  # logged names that follow from the configuration
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    monitor: UsageMonitor | None = None
    recorder: RunRecorder | None = None
    interruption: Interruption = field(default_factory=Interruption)
    alarms: LearningAlarms = field(default_factory=lambda: LearningAlarms(AlarmsConfig()))


class DataPosition(Protocol):
    """A data loader, of which a checkpoint holds the position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Trainer(ABC):
    """A run: state, tools, the policies and the loop. Subclasses implement `step` and `validate`.

    `policies` are the policies that are trained and saved, PPO's value model included. Metrics of a policy other than
    the first carry its name (`value/loss`). `data` is the data loader, whose position is saved with them. `num_steps`
    None: until the data ends. `recovery` replaces dead workers; without one, those of the policies.

    With `checkpointing.async_save` at most one checkpoint is being written while the next steps run. The loop looks
    after it between steps, and finishes it before the next checkpoint begins and before the run ends.
    """

    def __init__(
        self,
        loop: LoopConfig,
        tools: RunTools,
        *,
        num_steps: int | None,
        policies: Sequence[Policy],
        data: DataPosition,
        nonfinite_action: str,
        recovery: Recovery | None = None,
    ) -> None:
        self.loop = loop
        self.num_steps = num_steps
        self.tools = tools
        self.policies = policies
        self.data = data
        self.nonfinite_action = nonfinite_action
        self.recovery = Recovery(policies) if recovery is None else recovery
        self.state = TrainerState()
        self.timer = Timer()
        self.metrics: dict[str, float] = {}  # of the step in progress, by logged name
        self.validated_at = -1  # step after which the last validation ran
        self.checkpointer = tools.checkpointer
        self.pending_save: PendingSave | None = None

    @abstractmethod
    def step(self) -> None:
        """One training step, number `state.total_steps + 1`. Logs through `record`; raises DataExhausted at the end."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of a validation, by name without prefix."""

    # -- the loop

    def start(self) -> None:
        """Resume if there is a checkpoint. The parts are running."""
        self.resume()

    def describe_interruption(self) -> str:
        """The last step of a run that was told to end, and the step from which the same command continues it."""
        latest = None if self.checkpointer is None else self.checkpointer.get_latest_checkpoint_path()
        if latest is None:
            again = "nothing was saved, and the same command starts from step 1"
        elif latest.name == f"step_{self.state.total_steps}":
            again = "it is saved, and the same command resumes after it"
        else:
            again = f"the same command resumes after {latest.name.replace('_', ' ')}, the last one saved"
        return f"{self.tools.interruption.name}: the run ends after step {self.state.total_steps}; {again}"

    def describe_end(self) -> str:
        """The first words about a run that ends without an error, asked before `train`."""
        if self._is_last_step():
            return f"nothing left to train: step {self.state.total_steps} of {self.num_steps}"
        return "done"

    def train(self) -> None:
        """Run until the steps, the data or the time are used up."""
        if self.num_steps is not None:
            self.tools.console.set_num_steps(self.num_steps)
            self._announce_fewer_steps(self.num_steps)
        with self.tools.console, self.tools.interruption.steps():
            try:
                self._run_steps()
            except BaseException as error:
                self._settle_save(can_wait=isinstance(error, Exception) and not isinstance(error, WorkerError))
                raise
        if self.tools.interruption.signal is not None:
            raise KeyboardInterrupt
        if self.tools.recorder is not None:
            self.tools.recorder.finish(self.state.total_steps, self.policies[0])

    def _announce_fewer_steps(self, num_steps: int) -> None:
        loop = self.loop
        if num_steps < loop.max_num_steps < NO_LIMIT:
            self.tools.console.info(
                f"{loop.key('max_num_epochs')}={loop.max_num_epochs} ends the run after step {num_steps}, where the "
                f"data ends, before {loop.key('max_num_steps')}={loop.max_num_steps}"
            )

    def _run_steps(self) -> None:
        num_recoveries, failed_at = 0, -1
        if self.state.owes_validation or (self.loop.val_at_start and self.state.total_steps == 0):
            self._validate()
            self._log()
            self._announce_early_stop()
        self.tools.deadline.start_iterations()
        while not (self._is_last_step() or self.state.stopped_early):
            try:
                if self._run_step():
                    return
            except WorkerDied as error:
                if self.tools.interruption.signal is not None:
                    raise KeyboardInterrupt from error  # the workers were told to end, too
                num_recoveries = num_recoveries + 1 if failed_at == self.state.total_steps else 1
                failed_at = self.state.total_steps
                if num_recoveries > MAX_RECOVERIES_AT_ONE_STEP:
                    raise
                self.recover(error)

    def _run_step(self) -> bool:
        """One turn of the loop; True when it was the last."""
        profile, profiled = self.tools.profile, nullcontext()
        if profile.steps:
            from nemo_rl.distributed.meters import profiled_step

            profiled = profiled_step(profile, self.tools.logger.run_dir / "profile", self.state.total_steps + 1)
        try:
            with self.timer.time("total_step_time"), profiled:
                self.step()
                self._write_samples()
        except DataExhausted:
            self.tools.console.info(f"the training data is used up after {self.state.total_steps} steps")
            self._end_with_the_data()
            return True
        self.state.total_steps += 1
        self._advance_save(wait=False)
        is_periodic = self.loop.validates_after(self.state.total_steps)
        is_told = self.tools.interruption.signal is not None
        self.state.owes_validation = is_periodic or (self.loop.val_at_end and self._is_last_step())
        if self.state.owes_validation and not is_told:
            self._validate()
        out_of_time = self.tools.deadline.check_save()
        is_told = self.tools.interruption.signal is not None
        ends = out_of_time or self.state.stopped_early or is_told
        is_due = ends or self.tools.checkpointing.saves_after(self.state.total_steps) or self._is_last_step()
        if is_told and self.tools.deadline.longest_save_s > self.tools.interruption.left_s(keep_s=LAST_WORDS_S):
            self._settle_save(can_wait=False)
        elif is_due:
            self._save_checkpoint()
            if ends or self._is_last_step():
                self._advance_save(wait=True)
        self._log()
        self.tools.deadline.mark_iteration()
        self._announce_early_stop()
        if out_of_time and not self.state.stopped_early and not is_told:
            saved = "saved, and the run ends; the same command resumes it"
            if self.checkpointer is None:
                saved = "the run ends, and nothing is saved, because checkpointing.enabled=false"
            self.tools.console.info(f"checkpoint_must_save_by is near: {saved}")
        return ends

    def _write_samples(self) -> None:
        if self.tools.recorder is not None:
            self.tools.recorder.write_samples(self.state.total_steps + 1, self.policies[0])

    def _end_with_the_data(self) -> None:
        """The last validation and checkpoint of a run whose data ended before its steps."""
        self.metrics, self.timer = {}, Timer()
        validates = self.loop.val_at_end and self.validated_at != self.state.total_steps
        if validates:
            self._validate()
        self._advance_save(wait=True)
        if self.checkpointer is not None and self.state.total_steps > 0:
            latest = self.checkpointer.get_latest_checkpoint_path()
            if latest is None or latest.name != f"step_{self.state.total_steps}":
                self._save_checkpoint()
                self._advance_save(wait=True)
        if validates:
            self._log()

    def _is_last_step(self) -> bool:
        return self.num_steps is not None and self.state.total_steps >= self.num_steps

    def _validate(self) -> None:
        with self.phase("validation"):
            metrics = self.validate()
        self.record("validation", metrics)
        self.validated_at = self.state.total_steps
        self.state.owes_validation = False
        self._update_early_stopping()
        self.record("timing/validation", {"total_validation_time": self.timer.get_elapsed("validation")[-1]})

    def _update_early_stopping(self) -> None:
        settings, state = self.loop.early_stopping, self.state
        if settings.metric_name is None:
            return
        key = settings.key("metric_name")
        value = chosen_metric(key, settings.metric_name, self.metrics, self.tools.known_metrics)
        if value is None:
            self.tools.console.warn(f"this validation has no {settings.metric_name}: it counts as no better")
            value = math.nan
        sign, best = (1.0 if settings.higher_is_better else -1.0), state.best_validation
        if not math.isnan(value) and (best is None or sign * (value - best) > settings.min_delta):
            state.best_validation, state.validations_without_best = value, 0
        else:
            state.validations_without_best += 1
        is_reached = settings.threshold is not None and sign * (value - settings.threshold) >= 0
        is_spent = settings.patience is not None and state.validations_without_best >= settings.patience
        state.stopped_early = is_reached or is_spent

    def _announce_early_stop(self) -> None:
        if self.state.stopped_early:
            name = self.loop.early_stopping.metric_name
            self.tools.console.info(f"early stopping: {name} has reached its goal, or no longer improves")

    def _log(self) -> None:
        """One line for the step: everything recorded since the last one, and the seconds of each phase."""
        self.record("timing/train", self.timer.get_timing_metrics("sum"))
        self.timer.reset()
        if self.tools.recorder is not None:
            self.record("performance", {"report_s": self.tools.recorder.take_seconds()})
        if self.tools.monitor is not None:
            self.record("system", self.tools.monitor.metrics())
        metrics, self.metrics = self.metrics, {}
        self.tools.logger.log_metrics(metrics, self.state.total_steps)
        logged = self.tools.logger.finish_step(self.state.total_steps)
        alarms = self.tools.alarms
        self.tools.console.finish_step(self.state.total_steps, logged, alarms.max_disagreement)
        for alarm in alarms.note(logged):
            self.tools.console.warn(alarm)
        if self.tools.recorder is not None:
            self.tools.recorder.finish_step(self.state.total_steps)

    def record(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """Add metrics to the step in progress as `<prefix>/<name>`."""
        for name, value in metrics.items():
            assert f"{prefix}/{name}" not in self.metrics, f"{prefix}/{name} is recorded twice"
            self.metrics[f"{prefix}/{name}"] = value

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time a phase and show it while it runs."""
        recorder = self.tools.recorder
        noted = recorder.phase(name) if recorder is not None else nullcontext()
        with self.tools.console.phase(name), self.timer.time(name), traced(name), noted:
            yield

    # -- optimizer steps

    def take_steps(self, policy: Policy, loss_fn: LossFunction, task: HeadTask, *, num_passes: int = 1) -> TrainResult:
        """The optimizer steps of the loaded plan, `num_passes` times over.

        If a loss or gradient is not finite, its samples are written down; then the run stops or skips the update, as
        `policy.nonfinite_action` says.
        """
        results = []
        for number in range(1, num_passes + 1):
            results.append(policy.train(loss_fn, task, is_last_pass=number == num_passes))
            if results[-1].num_skipped_steps and self.nonfinite_action == "stop":
                break
        result, is_first = merge_results(results), policy is self.policies[0]
        if result.nonfinite_samples:
            step = self.state.total_steps + 1
            records = [{"step": step, "sample_id": sample} for sample in result.nonfinite_samples]
            owner = "" if is_first else f"{policy.name_prefix}_"
            path = self.tools.logger.log_records(records, f"{owner}nonfinite_step_{step}.jsonl")
            numbers = f"loss {result.losses[-1]}, gradient norm {result.grad_norms[-1]}"
            text = f"{numbers} ({loss_name(loss_fn)}); samples in {path}"
            if self.nonfinite_action == "stop":
                self._write_samples()
                raise NonFiniteLoss(f"{text}. policy.nonfinite_action=skip would go on without this update")
            self.tools.console.warn(f"step {step}: {text}")
        metrics = {
            **result.metrics,
            "grad_norm": math.fsum(result.grad_norms) / len(result.grad_norms),
            "lr": result.learning_rates[-1],
            "num_skipped_steps": result.num_skipped_steps,
        }
        self.record("train" if is_first else f"train/{policy.name_prefix}", metrics)
        if is_first:
            self.state.total_valid_tokens += int(result.num_valid_tokens)
        return result

    # -- state

    def write_state(self, directory: Path) -> StateWrite:
        """Write everything the next step depends on under `directory`.

        With `checkpointing.async_save` the workers may still be writing on return; they write the present state.
        """
        torch.save(self.data.state_dict(), directory / DATALOADER_STATE)
        checkpointing = self.tools.checkpointing
        request = SaveRequest(
            save_optimizer=checkpointing.save_optimizer,
            save_consolidated=checkpointing.save_consolidated,
            model_save_format=checkpointing.model_save_format or "torch_save",
            in_background=checkpointing.async_save,
        )
        return AllWritten([policy.save_checkpoint(directory, request) for policy in self.policies])

    def read_state(self, directory: Path) -> None:
        """Inverse of `write_state`."""
        require_optimizer(directory)
        for policy in self.policies:
            policy.load_checkpoint(directory, load_optimizer=True)
        self.data.load_state_dict(torch.load(directory / DATALOADER_STATE, weights_only=True))

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
        self.tools.console.resume(self.state.total_steps)
        self.tools.console.info(f"resumed from {path} after step {self.state.total_steps}")
        if self.state.stopped_early and self.loop.early_stopping.metric_name is None:
            self.state.stopped_early = False
        elif self.state.stopped_early:
            self.tools.console.info("early stopping had ended this run; early_stopping.metric_name=null continues it")
        return True

    def recover(self, error: WorkerDied) -> None:
        """Replace the dead workers and go back to the last checkpoint. Raises `error` if either is impossible."""
        if (loss := ray_loss()) is not None:
            raise RayLost(f"{first_line(error)}: {loss}") from error
        self._settle_save(can_wait=False)
        if self.checkpointer is None or self.checkpointer.latest_sound() is None:
            raise error
        self.metrics, self.timer = {}, Timer()
        self.recovery.replace_dead(error)
        self.tools.console.warn(f"{error}\nit is replaced, and the run goes on from the last checkpoint")
        self.resume()

    # -- checkpoints

    def _save_checkpoint(self) -> None:
        if self.checkpointer is None:
            return
        self._advance_save(wait=True)
        with self.phase("checkpointing"):
            self.pending_save = self.checkpointer.start_save(
                self.state.total_steps,
                self._start_write,
                {
                    **dataclasses.asdict(self.state),
                    "identity": self.tools.identity,
                    TRACKER_RUNS: self.tools.logger.run_ids,
                },
                self.tools.resolved_config_yaml,
                self.metrics,
            )
        if not self.tools.checkpointing.async_save:
            self._advance_save(wait=True)

    def _start_write(self, directory: Path) -> StateWrite:
        (directory / CONTROLLER_RNG).parent.mkdir()
        save_rng_state(directory / CONTROLLER_RNG, devices=False)  # workers save the generators of their devices
        return self.write_state(directory)

    def _advance_save(self, *, wait: bool) -> None:
        """Continue a background save as far as possible without waiting, or to its end. Raises its errors."""
        pending, self.pending_save = self.pending_save, None  # a save that raises is over
        if pending is None:
            return
        if wait:
            with self.phase("checkpointing"):
                pending.finish()
        elif pending.advance() is None:
            self.pending_save = pending
            return
        self.tools.deadline.note_save(pending.seconds)

    def _settle_save(self, *, can_wait: bool) -> None:
        """End a background save after an error: finish it, or discard it if that would wait for dead workers."""
        pending, self.pending_save = self.pending_save, None
        if pending is None:
            return
        if not (can_wait or pending.is_written):
            pending.discard()
            self.tools.console.warn(f"the checkpoint of step {pending.step} was still being written and is given up")
            return
        try:
            pending.finish()
        except (RuntimeError, OSError, ValueError) as failure:  # the error that ends the run is reported, not this one
            self.tools.console.warn(f"the checkpoint of step {pending.step} could not be finished: {failure}")


def merge_results(results: Sequence[TrainResult]) -> TrainResult:
    """One result of several passes over a plan: counts add up, means are averaged."""
    return TrainResult(
        losses=[loss for result in results for loss in result.losses],
        grad_norms=[norm for result in results for norm in result.grad_norms],
        learning_rates=[rate for result in results for rate in result.learning_rates],
        metrics=reduce_steps([result.metrics for result in results]),
        num_skipped_steps=sum(result.num_skipped_steps for result in results),
        nonfinite_samples=sorted({sample for result in results for sample in result.nonfinite_samples}),
    )

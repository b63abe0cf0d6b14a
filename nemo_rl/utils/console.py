"""The console output of a run: progress, a summary of each step, alarms, sample rollouts.

On a terminal, a live line at the bottom shows step, phase, tokens per second and time left. Otherwise (a file, a CI
log) there is neither live line nor colour, but one plain line per step and event.
"""

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from nemo_rl.config.terminal import VisibleFormatter, visible

EVENTS_NAME = "events.jsonl"

_DISAGREEMENT = "train/token_mult_prob_error"

_SUMMARY = (  # metric, name shown, format
    ("train/reward", "reward", ".4f"),
    ("train/loss", "loss", ".5f"),
    ("train/grad_norm", "grad norm", ".4f"),
    (_DISAGREEMENT, "token_mult_prob_error", ".7f"),
    ("train/accuracy", "accuracy", ".4f"),
    ("train/value/loss", "value loss", ".5f"),
    ("train/reverse_kl", "reverse KL", ".5f"),
    ("validation/accuracy", "accuracy", ".4f"),
    ("validation/val_loss", "val loss", ".5f"),
    ("validation/validation-default_accuracy", "val accuracy", ".4f"),
)
_MUST_BE_FINITE = ("train/loss", "train/grad_norm", "train/reward", "validation/accuracy", "validation/val_loss")
_LAG = "train/weight_version_lag/max"
_TOKENS_PER_S = "performance/tokens_per_sec"
_TIMING_PREFIX = "timing/train/"
_PREDICTED_PREFIX = "performance/predicted_s/"
_STEP_TIMER = "total_step_time"  # the sum of the phases but these, which follow a step
_BEHIND_STEP = ("validation", "checkpointing")
_NUM_STEPS_FOR_TIME_LEFT = 20
ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "environment": "yellow", "tool": "yellow"}


class RunConsole:
    """The console of one run of `num_steps` steps. Enter it when the first step begins.

    with RunConsole(num_steps=100) as console:
        with console.phase("rollout"):
            ...
        console.finish_step(1, metrics)

    `file` defaults to standard output; `clock` returns seconds and never decreases.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        file: TextIO | None = None,
        force_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._console = Console(file=file or sys.stdout, force_terminal=force_terminal, highlight=False)
        self._events: Path | None = None
        self._handler: logging.Handler | None = None
        self._step = 0  # the last finished one
        self.is_live = self._console.is_terminal
        self._phases: list[str] = []
        self._failure: tuple[BaseException, str] | None = None  # the last error in a phase, and the phases
        self._last_phase = ""  # that ended
        self._runs = False  # steps have begun
        self.has_ended = False
        self._remarks: list[str] = []  # for the line of the next step
        self._step_ends: deque[float] = deque(maxlen=_NUM_STEPS_FOR_TIME_LEFT + 1)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("[bold]{task.fields[phase]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=0, phase="", speed="", left="")

    @property
    def _current_step(self) -> int:
        return min(self._step + 1, self._num_steps)  # after the last step no other one is in progress

    def set_num_steps(self, num_steps: int) -> None:
        """Set the number of steps once it is known: the data may end before `max_num_steps`."""
        self._num_steps = num_steps
        self._progress.update(self._task, total=num_steps)

    def resume(self, step: int) -> None:
        """The run goes on after step `step`."""
        self._step = step

    def __enter__(self) -> "RunConsole":
        self._runs = True
        self._step_ends.clear()
        self._step_ends.append(self._clock())
        if self.is_live:
            self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.is_live:
            self._progress.stop()

    # ---- events

    def keep_events(self, folder: Path) -> None:
        """From now on, also write messages, and warnings of the log, to `events.jsonl` in the folder of the run.

        {"time": 1764000000.1, "step": 3, "kind": "warning", "text": "..."}: seconds since 1970; the step in progress,
        or the last step after its end; kind is info, warning, error, log or, once at the end and with the exit
        `status`, end.
        """
        self._events = folder / EVENTS_NAME
        self._handler = _EventHandler(self)
        logging.getLogger().addHandler(self._handler)

    def note(self, kind: str, text: str, **more: Any) -> None:
        """Write an event only to the file."""
        if self._events is None:
            return
        event = {"time": round(time.time(), 3), "step": self._current_step, "kind": kind, "text": text, **more}
        try:
            with self._events.open("a", encoding="ascii") as file:
                file.write(json.dumps(event) + "\n")
        except FileNotFoundError:  # somebody deleted the folder; the owner of its other files makes it again, or ends
            pass
        except OSError as error:
            path, self._events = self._events, None
            self.warn(f"events are no longer written to {path}: {error.strerror}")

    def end(self, status: int) -> int:
        """Note the end of the run, with its exit status, which is returned."""
        self.note("end", "", status=status)
        self.has_ended = True
        self._events = None
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
        return status

    def info(self, message: str) -> None:
        self.note("info", message)
        self._line(Text(visible(message)))

    def warn(self, message: str) -> None:
        self.note("warning", message)
        self._line(Text("WARNING ", style="bold yellow").append(visible(message), style="yellow"))

    def error(self, message: str) -> None:
        self.note("error", message)
        self._line(Text("ERROR ", style="bold red").append(visible(message), style="red"))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Show `name` in the live line while the body runs. Phases nest."""
        self._phases.append(name)
        self._progress.update(self._task, phase=" > ".join(self._phases))
        try:
            yield
        except BaseException as error:
            if self._failure is None or self._failure[0] is not error:
                self._failure = error, " > ".join(self._phases)
            raise
        finally:
            self._last_phase = self._phases.pop()
            self._progress.update(self._task, phase=" > ".join(self._phases))

    def where(self, error: BaseException) -> str:
        """The place at which `error` was raised: "step 7, weight_sync", "step 7, after weight_sync" or "start"."""
        if self._failure is not None and self._failure[0] is error:
            return f"step {self._current_step}, {self._failure[1]}"
        after = f", after {self._last_phase}" if self._last_phase else ""
        return f"step {self._current_step}{after}" if self._runs else "start"

    # ---- steps

    def remark(self, text: str) -> None:
        """Add a text to the line of the next finished step."""
        self._remarks.append(visible(text))

    def finish_step(self, step: int, metrics: Mapping[str, float], max_disagreement: float | None = None) -> None:
        """Show the summary and the alarms of step `step`, and advance the progress. `metrics` are by logged name."""
        ends = self._step_ends
        ends.append(self._clock())
        step_s = (ends[-1] - ends[0]) / max(1, len(ends) - 1)  # mean of the latest steps
        left = f"{format_duration((self._num_steps - step) * step_s)} left"
        speed = f"{metrics[_TOKENS_PER_S]:,.0f} tok/s" if _TOKENS_PER_S in metrics else ""
        self._progress.update(self._task, completed=step, speed=speed, left=left)
        line = Text(f"step {step}/{self._num_steps}", style="bold")
        line.append("  ".join(["", summary_line(metrics), *self._remarks, left]), style="not bold")
        self._remarks.clear()
        self._line(line)
        for alarm in alarms(metrics, max_disagreement):
            self.warn(alarm)
        self._step = step

    def show_samples(
        self, message_logs: Sequence[Sequence[Mapping[str, Any]]], rewards: Sequence[float], *, title: str
    ) -> None:
        """Show rollouts: messages ("role", "content") coloured by role, and the reward."""
        for number, (messages, reward) in enumerate(zip(message_logs, rewards, strict=True), start=1):
            heading = visible(f"{title}, sample {number}, reward {reward:.4f}")
            body = Text()
            for message in messages:
                body.append_text(message_text(message))
            body.rstrip()
            if self.is_live:
                self._console.print(Panel(body, title=Text(heading), title_align="left"))
            else:
                self._line(Text(f"--- {heading}\n").append_text(body))

    def configure_logging(self) -> None:
        """Send the log records of this process to the console, above the live line."""
        handler: logging.Handler
        if self.is_live:
            handler = RichHandler(console=self._console, show_path=False, markup=False, rich_tracebacks=False)
            handler.setFormatter(VisibleFormatter("%(name)s: %(message)s"))
        else:
            handler = logging.StreamHandler(self._console.file)
            handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        root = logging.getLogger()
        root.handlers[:] = [handler]
        root.setLevel(logging.INFO)

    def _line(self, text: Text) -> None:
        # With soft_wrap, lines of a log file are not folded.
        self._console.print(text, soft_wrap=not self.is_live)
        self._console.file.flush()


class _EventHandler(logging.Handler):
    """Warnings of the log, as events of a console."""

    def __init__(self, console: RunConsole) -> None:
        super().__init__(logging.WARNING)
        self._events = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):  # a library's own mistake: its arguments do not fit its text
            text = str(record.msg)
        self._events.note("log", f"{record.name}: {text}")


def message_text(message: Mapping[str, Any]) -> Text:
    """A message ("role", "content") and a line break, coloured by role."""
    style = ROLE_STYLES.get(message["role"], "white")
    text = Text().append(f"{visible(str(message['role']))}: ", style=f"bold {style}")
    return text.append(visible(str(message["content"])) + "\n", style=style)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each phase of a step, and of the step: `total_step_time`."""
    # "a/b" is part of "a", and "valid_tokens_per_sec_per_gpu" is not a time.
    names = (key.partition(_TIMING_PREFIX)[2] for key in metrics if key.startswith(_TIMING_PREFIX))
    return {name: metrics[_TIMING_PREFIX + name] for name in names if "/" not in name and "per_sec" not in name}


def summary_line(metrics: Mapping[str, float]) -> str:
    """One line: the main metrics, tokens per second, and the seconds of each phase, longest first.

    A phase with a prediction has it behind it, as in `policy_training 24.1 (22.7 predicted)`. Validation and checkpoint
    follow a step and are no part of its seconds: `0.7 s (generation 0.4, policy_training 0.3), then validation 0.2`.
    """
    lag = metrics.get(_LAG, 0.0)
    parts = [
        f"{name} {float(metrics[key]):{spec}}"
        + (f" (weights up to {lag:.0f} updates old)" if key == _DISAGREEMENT and lag > 0 else "")
        for key, name, spec in _SUMMARY
        if key in metrics
    ]
    if _TOKENS_PER_S in metrics:
        parts.append(f"{metrics[_TOKENS_PER_S]:,.0f} tok/s")
    seconds = phase_seconds(metrics)
    total = seconds.pop(_STEP_TIMER, None)
    phases = sorted(((value, name) for name, value in seconds.items() if value >= 0.05), reverse=True)
    predicted = {name: metrics.get(_PREDICTED_PREFIX + name) for _, name in phases}
    shown = {
        name: f"{name} {value:.1f}" + (f" ({predicted[name]:.1f} predicted)" if predicted[name] is not None else "")
        for value, name in phases
    }
    behind = [shown.pop(name) for name in _BEHIND_STEP if name in shown] if total is not None else []
    if total is not None or shown:
        text = (f"{total:.1f} s" if total is not None else "seconds") + (
            f" ({', '.join(shown.values())})" if shown else ""
        )
        parts.append(text + (f", then {', '.join(behind)}" if behind else ""))
    return "  ".join(parts)


def alarms(metrics: Mapping[str, float], max_disagreement: float | None) -> list[str]:
    """Messages about metrics of one step that need attention; empty if there are none.

    `max_disagreement`: a `token_mult_prob_error` above it is an alarm; None: none is.
    """
    found = [
        f"{key} is {metrics[key]}" for key in _MUST_BE_FINITE if key in metrics and not math.isfinite(metrics[key])
    ]
    error, limit = metrics.get(_DISAGREEMENT), max_disagreement
    # Samples of older weights than those trained have other probabilities by design.
    is_stale = metrics.get(_LAG, 0.0) > 0
    if error is not None and limit is not None and not error <= limit and not (is_stale and error < math.inf):
        found.append(
            f"train/token_mult_prob_error is {error:.4f}, above {limit:g}: training and generation "
            "disagree on the probabilities of the sampled tokens (stale weights, other dtype, temperature or mask)"
        )
    if metrics.get("train/baseline_reward/pct_mixed") == 0.0:
        found.append("every group got equal rewards: this step has no gradient (task too easy or too hard)")
    if (num_failed := metrics.get("train/num_failed_samples", 0.0)) > 0:
        found.append(f"{num_failed:.0f} episodes failed and are left out of the baseline and the loss")
    if (num_skipped := metrics.get("train/num_skipped_steps", 0.0)) > 0:
        found.append(f"{num_skipped:.0f} optimizer steps were skipped: loss or gradient was not finite")
    return found


def format_duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

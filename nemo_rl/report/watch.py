"""A run on a terminal: what `examples/watch.py` draws from the files of a log folder. Reads only, prints nothing."""

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_rl.config.terminal import visible
from nemo_rl.report.run_files import (
    SAMPLES,
    STEP_TIME,
    Run,
    duration,
    read_block,
    status_of,
)
from nemo_rl.utils.console import message_text, phase_seconds

KL = "train/kl_penalty"
CURVES = (  # title, metric
    ("reward", "train/reward"),
    ("validation", "validation/accuracy"),
    ("validation loss", "validation/val_loss"),
    ("loss", "train/loss"),
    ("answer, tokens", "train/mean_gen_tokens_per_sample"),
    ("entropy", "train/approx_entropy"),
    ("KL", KL),
    ("disagreement", "train/token_mult_prob_error"),
    ("grad norm", "train/grad_norm"),
    ("accuracy", "train/accuracy"),
    ("tokens/s", "performance/tokens_per_sec"),
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"running": "green", "finished": "green", "failed": "red", "dead": "red"}
_EVENT_STYLES = {"error": "red", "warning": "yellow", "log": "yellow"}
_MAX_EVENTS, _MAX_SAMPLES, _MAX_CHARS = 6, 2, 600
_MAX_STEPS_KEPT = 2000
_AROUND_CURVES = 10  # columns of a panel's frame and of the gaps in its table


class Watch:
    """A run that somebody else started. `update` reads new lines, `view` draws the run."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)

    def update(self) -> None:
        """Read the lines that were written since the last call."""
        self.run.update()
        for step in list(self.run.rows)[:-_MAX_STEPS_KEPT]:
            del self.run.rows[step]

    def view(self, *, width: int = 100, now: float | None = None) -> RenderableType:
        """Everything, top to bottom: state, curves, phases of the last step, events, samples."""
        run = self.run
        parts: list[RenderableType] = [self._head(now)]
        if not run.rows:
            parts.append(Text("no step is finished yet", style="dim"))
        else:
            parts += [self._curves(width), self._phases(width)]
        parts += [part for part in (self._events(), self._samples()) if part is not None]
        return Group(*parts)

    def _head(self, now: float | None) -> RenderableType:
        run, status = self.run, status_of(self.run, now)
        total = run.num_steps
        line = Text(visible(str(run.folder)), style="bold").append(f"  {run.algorithm}", style="dim")
        steps = Text(f"step {run.last_step}" + (f" of {total}" if total else "") + ", ")
        steps.append(visible(status.text), style=_STYLES.get(status.kind, "yellow"))
        seconds = [row[STEP_TIME] for row in self._latest_rows(20) if STEP_TIME in row]
        if status.kind == "running" and total and seconds:
            steps.append(f", about {duration(statistics.fmean(seconds) * (total - run.last_step))} left", style="dim")
        parts: list[RenderableType] = [line, steps]
        if total:
            parts += [ProgressBar(total=total, completed=min(run.last_step, total), width=60), Text()]
        return Group(*parts)

    def _latest_rows(self, count: int) -> list[dict[str, float]]:
        return list(self.run.rows.values())[-count:]

    def _curves(self, width: int) -> RenderableType:
        """A line each, as wide as the texts beside it leave room for."""
        rows = self._latest_rows(_MAX_STEPS_KEPT)
        curves: list[tuple[str, str, list[float], str]] = []
        for title, name in CURVES:
            values = [row[name] for row in rows if name in row]
            # A KL of exactly 0 in every step is that of a run without a reference model.
            if values and (name != KL or any(values)):
                low, high = _ends(values)
                curves.append((title, f"{values[-1]:.5g}", values, f"{low:.4g} to {high:.4g}"))
        texts = sum(max((len(curve[column]) for curve in curves), default=0) for column in (0, 1, 3))
        room = max(10, width - texts - _AROUND_CURVES)
        table = Table.grid(padding=(0, 2))
        for title, latest, values, ends in curves:
            line = Text(sparkline(values, room), style="cyan")
            table.add_row(Text(title, style="dim"), Text(latest, style="bold"), line, Text(ends, style="dim"))
        return Panel(table, title="curves", title_align="left", expand=False)

    def _phases(self, width: int) -> RenderableType:
        latest = next((row for row in reversed(self._latest_rows(5)) if STEP_TIME in row), {})
        seconds = phase_seconds(latest)
        # A step does not count its validation and its checkpoint.
        total = max(seconds.pop("total_step_time", 0.0), sum(seconds.values()))
        table = Table.grid(padding=(0, 2))
        for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
            if total > 0 and value >= 0.005 * total:
                table.add_row(
                    Text(visible(name), style="dim"),
                    Text(f"{value:.2f} s"),
                    Text("█" * max(1, round(value / total * max(10, width - 60))), style="magenta"),
                    Text(f"{value / total:.0%}", style="dim"),
                )
        return Panel(table, title=f"phases of the last step, {total:.2f} s", title_align="left", expand=False)

    def _events(self) -> RenderableType | None:
        events = [event for event in self.run.events if event["kind"] in _EVENT_STYLES][-_MAX_EVENTS:]
        if not events:
            return None
        lines = [
            Text.assemble(
                (time.strftime("%H:%M:%S ", time.localtime(event["time"])), "dim"),
                (visible(f"step {event['step']}  "), "dim"),
                (visible(str(event["text"]))[:_MAX_CHARS], _EVENT_STYLES[event["kind"]]),
            )
            for event in events
        ]
        return Panel(Group(*lines), title="warnings and errors", title_align="left")

    def _samples(self) -> RenderableType | None:
        blocks = sorted((self.run.folder / SAMPLES).glob("*.js"), key=lambda path: path.stat().st_mtime)
        if not blocks:
            return None
        samples = list(read_block(blocks[-1]))[-_MAX_SAMPLES:]
        return Panel(Group(*(sample_text(sample) for sample in samples)), title="last samples", title_align="left")


def sample_text(sample: dict[str, Any]) -> Text:
    """Messages of a sample, or its tokens where it has none; long texts are cut in the middle."""
    facts = [f"step {sample['step']}", str(sample["id"])]
    facts += [f"{name} {sample[name]:.7g}" for name in ("reward", "error") if isinstance(sample.get(name), int | float)]
    text = Text(visible(", ".join(facts)) + "\n", style="dim")
    messages = sample.get("messages") or [{"role": "tokens", "content": "".join(sample["texts"])}]
    half = _MAX_CHARS // 2
    for message in messages:
        content = str(message["content"])
        content = content if len(content) <= _MAX_CHARS else f"{content[:half]} […] {content[-half:]}"
        text.append_text(message_text({"role": message["role"], "content": content}))
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of blocks: one per value or, of more than `width`, per mean of neighbours; a space has no number."""
    count = min(width, len(values))
    means = []
    for at in range(count):
        part = values[at * len(values) // count : (at + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    low, high = _ends(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if math.isnan(mean) else _BLOCKS[round((mean - low) * scale)] for mean in means)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)

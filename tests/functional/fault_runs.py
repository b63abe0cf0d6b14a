"""Plays cells of the fault matrix on runs of the real command line, and checks how each ends.

A chain of cells is played in one folder by the same command, again and again: a life of the run ends with the first
fault that it does not heal, and the next life resumes. What holds of every cell:

- healed: later steps are finished in the same life; or
- ended: status 1 within `cluster.worker_timeout_s` and 30 s, with one message that names process, phase and remedy, and
  the next life goes on. What is hurt in a start may be waited for when the other processes have started.

After each life nothing is left of it. In the end every step has the metrics of a run without faults, or every step
that was taken again those of the first time, to the bit; of an asynchronous run, which samples beside training, every
prompt was trained once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.utils.venvs import python_executable_for
from tests.functional import faulty
from tests.functional.cli import ROOT, assert_out_of_reach, begin, comparable, example, keys, run, small
from tests.functional.fault_table import SGLANG, Cell

TIMEOUT_S = 30
LIFE_S = 900  # of a start and of one cell
START_S = 60  # of the rest of a start, after which the run first waits for the process that was hurt
HOOKS = Path(__file__).parent / "hooks"
NUM_PROMPTS = 12  # of an asynchronous run: an epoch is three steps
NAMES = {  # in messages
    "environment": "environment 'math'",
    "engine": "generation-0",
    "core": "generation-",  # the newest, of whichever engine
    "detokenizer": "generation-0",
    "keeper": "group_keeper-0",
    "critic": "value-0",
    "rollout": "rollout-0",
    "tokenizer": "tokenizer-0",
    "driver": "",
    "node": "Ray",
}


def _sampling(section: str) -> tuple[str, ...]:
    long = keys(**{section: "max_num_steps=400 max_failed_sample_fraction=0"})
    return (*small(section), *long, "policy.generation.vllm_cfg.enforce_eager=true")


REFERENCE = ("grpo.skip_reference_policy_logprobs_calculation=false", "loss_fn.reference_policy_kl_penalty=0.01")
EXACT = ("grpo.async_grpo.in_flight_weight_updates=false", "grpo.async_grpo.max_trajectory_age_steps=1")
# Nothing is decided but in verifier processes.
VERIFIED = ("env.math.math_verify_impl=dapo_math_verify", "env.math.verify_timeout_s=1")
RECORDED = "grpo.rollout_record={enabled: true, save_dir: record}"
ASYNC = (f"data.train.kwargs={{num_samples: {NUM_PROMPTS}}}", "grpo.max_num_epochs=1000", RECORDED)
SUPERVISED = keys(
    sft="max_num_steps=400 val_period=5", checkpointing="save_period=2", logger="tensorboard_enabled=false"
)
CRITIC = ("value.train_global_batch_size=16", "value.train_micro_batch_size=8")
TWO_RANKS = ("cluster.cpu_workers_per_node=2",)
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # of a loop: script and configuration, overrides
    "grpo": (example("grpo_math"), (*_sampling("grpo"), *REFERENCE, *TWO_RANKS)),
    "async": (example("grpo_math", "grpo_math_async_cpu"), (*_sampling("grpo"), *REFERENCE, *ASYNC)),
    "ppo": (example("ppo", "ppo_math_cpu"), (*_sampling("ppo"), *CRITIC)),
    "distillation": (example("distillation", "distillation_math_cpu"), _sampling("distillation")),
    "sft": (example("sft"), (*SUPERVISED, *TWO_RANKS)),
    "sglang": (example("grpo_math", "grpo_math_sglang_cpu"), _sampling("grpo")),
}
COMMON = (f"cluster.worker_timeout_s={TIMEOUT_S}", "checkpointing.keep_top_k=3", "checkpointing.metric_name=null")


@dataclass(kw_only=True)
class Ending:
    """How a cell ended: "healed" or "ended", after how many seconds, and the first line of the message."""

    cell: Cell
    how: str
    seconds: float
    message: str = ""

    def __str__(self) -> str:
        return f"{self.cell}: {self.how} after {self.seconds:.0f} s {self.message}".rstrip()


@dataclass(kw_only=True)
class Chain:
    """A run in `folder`, which has had `lives`."""

    loop: str
    folder: Path
    overrides: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    while_running: Callable[[], None] = lambda: None  # called about twice a second
    after: int = 0  # steps before the first fault
    goes_on: bool = False  # to the end of the run, after the last fault
    lives: int = 0
    endings: list[Ending] = field(default_factory=list)

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    def play(self, cells: Sequence[Cell]) -> list[Ending]:
        """Every cell, and one more life if the last one ended the run."""
        left = list(enumerate(cells))
        if self.loop == SGLANG:
            python_executable_for(SGLANG)  # uv, which makes its environment, leaves locks in TMPDIR
        if any(cell.who == "verifier" for cell in cells):
            self.overrides += VERIFIED
        self.folder.mkdir(parents=True, exist_ok=True)
        barren = 0  # lives in a row without a cell: one, which makes the checkpoint that a cell of a resume needs
        while left or (self.endings and self.endings[-1].how == "ended"):
            done = self._live(left)
            if not left:
                break
            barren = 0 if done else barren + 1
            assert barren < 2, f"no cell was played: {left[0][1]}\n{self.output[-4000:]}"
            left = left[done:]
        return self.endings

    @property
    def output(self) -> str:
        return (self.folder / f"life_{self.lives}.log").read_text()

    def _live(self, cells: list[tuple[int, Cell]]) -> int:
        """Start the command with these cells, wait until it ends, and look. Returns the number of cells played."""
        self.lives += 1
        shutil.rmtree(self.orders, ignore_errors=True)
        self.orders.mkdir()
        (self.orders / "cells.json").write_text(json.dumps([(number, asdict(cell)) for number, cell in cells]))
        every_s = float(self.environment.get("FAULTS_EVERY_S", "0"))
        status, ended_at = self._run(LIFE_S + len(cells) * (TIMEOUT_S + 60 + every_s))
        log, by_number = self.orders / "played.jsonl", dict(cells)
        played = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        ends_itself = bool(played) and played[-1]["number"] is None
        times = [*(entry["time"] for entry in played), ended_at]
        found = [(entry, until) for entry, until in zip(played, times[1:], strict=True) if entry["number"] is not None]
        for entry, until in found:
            ending = Ending(cell=by_number[entry["number"]], how="healed", seconds=until - entry["time"])
            if entry is played[-1] and status != 0:
                ending.how = "ended"
                ending.message = self._check_end(ending.cell, status, ending.seconds)
            self.endings.append(ending)
            print(f"  life {self.lives}: {ending}", file=sys.stderr, flush=True)
        if ends_itself:
            assert status == 130, self.output[-4000:]
        assert cells or ends_itself, f"the same command does not resume\n{self.output[-4000:]}"
        return len(found)

    def _run(self, limit_s: float) -> tuple[int, float]:
        """The exit status and the time of the end. No other machine reaches the run, and nothing of it is left."""
        how, overrides = RUNS[self.loop]
        temporary = Path(tempfile.mkdtemp(prefix="rf_", dir="/tmp"))  # sockets: short paths
        shared = temporary / "shm"  # its own /dev/shm: other runs beside this one use the machine's
        for folder in (shared, temporary / "t"):
            folder.mkdir()
        environment = {
            "PYTHONPATH": f"{HOOKS}{os.pathsep}{ROOT}",
            "FAULTS_FOLDER": str(self.orders),
            "RAY_TMPDIR": str(temporary),
            "TMPDIR": str(temporary / "t"),
            **self.environment,
            **({"FAULTS_AFTER": str(self.after)} if self.lives == 1 else {}),
            **({"FAULTS_GO_ON": "1"} if self.goes_on else {}),
        }
        command = [sys.executable, faulty.__file__, str(how["script"]), "--config", str(how["config"])]
        is_root = os.geteuid() == 0
        if is_root:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", shared], check=True)
            inside = f'mount --bind {shared} /dev/shm && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", inside, "sh", *command]
        command += [*overrides, *COMMON, *self.overrides]
        process = begin(command, self.folder / f"life_{self.lives}.log", **environment)
        try:
            deadline = time.monotonic() + limit_s
            while (status := process.poll()) is None:
                assert time.monotonic() < deadline, f"still there after {limit_s:.0f} s\n{self.output[-6000:]}"
                self.while_running()
                assert_out_of_reach(process.pid, at_least=0)
                time.sleep(0.5)
            ended_at = time.time()
            (self.folder / faulty.FILLER).unlink(missing_ok=True)
            check_nothing_left(self.orders, [shared, temporary / "t"], self.output)
        finally:
            for pid in processes_of(self.orders):
                os.kill(pid, signal.SIGKILL)
            if is_root:
                subprocess.run(["umount", "-l", shared], check=True)
            shutil.rmtree(temporary, ignore_errors=True)
        return status, ended_at

    def _check_end(self, cell: Cell, status: int, seconds: float) -> str:
        output = self.output
        if cell.who == "driver" and cell.what == "kill":
            assert status == -signal.SIGKILL, (status, output[-4000:])
            return ""
        assert status == 1, f"{cell}: status {status}\n{output[-6000:]}"
        limit_s = TIMEOUT_S + 30 + START_S * (cell.when == "start-up")
        assert seconds < limit_s, f"{cell}: {seconds:.0f} s\n{output[-6000:]}"
        messages = re.findall(r"^ERROR (.*)", output, re.MULTILINE)
        assert len(messages) == 1, f"{cell}: {len(messages)} messages\n{output[-6000:]}"
        text = output.rpartition("\nERROR ")[2]
        wanted = [NAMES.get(cell.who, cell.who) if cell.what != "disk" else ""]
        if cell.what == "nonsense":
            wanted += ["loss nan", "loss inf"]  # of all ranks
        if cell.what == "cut" and cell.who.startswith("policy-"):
            wanted += ["policy-"]  # either end of the connection
        assert any(name in text for name in wanted), f"{cell}: {wanted} not in the message\n{output[-6000:]}"
        assert re.match(r"(step \d+, (after )?\w+|start): ", text), f"{cell}: neither step nor phase\n{output[-6000:]}"
        assert "the same command" in text, f"{cell}: no remedy\n{output[-6000:]}"
        return text.splitlines()[0][:200]

    # -- in the end

    def check_metrics(self) -> None:
        """Every step has the metrics of a run without faults, to the bit.

        A step in which a run is told to end has no validation: the next life begins with it.
        """
        rows = rows_in(self.folder)
        last = max(rows) + 1  # the last step may be validated whatever the period
        how, overrides = RUNS[self.loop]
        section = "grpo" if self.loop in ("async", SGLANG) else self.loop
        limit = f"{section}.max_num_steps={last}"
        folder = self.folder.with_name("whole")
        run(folder, *overrides, *COMMON, *self.overrides, limit, **how, timeout_s=LIFE_S + last * 10)
        want = rows_in(folder)
        for step, several in rows.items():
            whole = {name: value for row in want[step] for name, value in row.items()}
            known: dict[str, float] = {}
            for row in several:
                known |= row
                is_injected = "NaN" in row.values() and row is not several[-1]  # the step was taken again
                assert is_injected or row.items() <= whole.items(), f"step {step}: {difference(row, whole)}"
            missing = whole.keys() - known.keys()
            owed = {name for name in missing if name.startswith("validation/")} if step == max(rows) else set[str]()
            assert missing == owed, f"step {step} lacks {sorted(missing)}"

    def check_repeated(self) -> list[dict[str, float]]:
        """Every step that was taken again has the same metrics, to the bit. Returns those of each step once."""
        rows = rows_in(self.folder)
        for step, several in rows.items():
            for row in several[1:]:
                assert row == several[0], f"step {step}: {difference(row, several[0])}"
        return [rows[step][0] for step in sorted(rows)]

    def check_prompts(self) -> None:
        """Every prompt once in each finished epoch, none twice and none missing."""
        steps = sorted(self.folder.glob("record/step_*"))
        assert [int(step.name[5:]) for step in steps] == list(range(1, len(steps) + 1))
        trained = [list(json.loads((step / "index.json").read_text())["trained"]) for step in steps]
        per_epoch = NUM_PROMPTS // len(trained[0])
        epochs: dict[int, list[str]] = {}
        for group in (group for step in trained for group in step):
            batch, _, prompt = group.split("/", 2)
            epochs.setdefault((int(batch) - 1) // per_epoch, []).append(prompt)
        assert all(len(set(prompts)) == len(prompts) for prompts in epochs.values())
        assert all(len(epochs[epoch]) == NUM_PROMPTS for epoch in range(len(steps) // per_epoch))


def rows_in(folder: Path) -> dict[int, list[dict[str, float]]]:
    """The metrics of every step of a run in `folder`, as often as it was taken."""
    files = sorted(folder.glob("logs/exp_*/metrics.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    rows: dict[int, list[dict[str, float]]] = {}
    for row in comparable(found):
        rows.setdefault(row["step"], []).append(row)
    return rows


def difference(row: dict[str, float], want: dict[str, float]) -> dict[str, tuple[float | None, float | None]]:
    names = [name for name in {*row, *want} if row.get(name) != want.get(name)]
    return {name: (row.get(name), want.get(name)) for name in sorted(names)}


# -- what is left of a run


def processes_of(orders: Path) -> list[int]:
    """Processes that were started with the variables of a run, wherever their parents are."""
    mark = f"FAULTS_FOLDER={orders}\0".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is of another user
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def check_nothing_left(orders: Path, folders: Sequence[Path], output: str) -> None:
    """No process, hence no port; no shared memory and no temporary file, which are in `folders`."""
    deadline = time.monotonic() + 20
    while left := processes_of(orders):
        if time.monotonic() > deadline:
            shown = [f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}" for pid in left]
            raise AssertionError("left behind:\n" + "\n".join(shown) + "\n" + output[-4000:])
        time.sleep(0.1)
    files = [str(path) for folder in folders for path in folder.rglob("*") if not path.is_dir()]
    assert not files, f"left behind: {files}\n{output[-2000:]}"

"""A long asynchronous run with a fault each minute: `SOAK_MINUTES=120 pytest -m soak`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.functional.cli import Finished, ends, keys
from tests.functional.fault_runs import Chain, processes_of
from tests.functional.fault_table import Cell

MINUTES = float(os.environ.get("SOAK_MINUTES", "120"))
SEED = int(os.environ.get("FAULTS_SEED", "0"))
WARM_UP = 15.0  # minutes of each process, in which its allocators take up to 17 MB at once
JUDGED = 5.0  # minutes at least, after that
MAX_MB_PER_MINUTE = 1.0
MAX_MORE = 8  # file descriptors, threads
LOG_FILES = 200  # which Ray's log monitor keeps open at most, those of dead workers included
HEALS = {
    **dict.fromkeys(("environment", "rollout", "policy-0"), ("kill", "pause")),
    **{"engine": ("kill", "stop"), "core": ("exception",), "keeper": ("kill",)},
}
HEALING = [
    Cell(loop="async", who=who, what=what, when=when)
    for who, several in HEALS.items()
    for what in several
    for when in ("generation", "train", "refit", "validation")
]


def look(folder: Path, minutes: float) -> None:
    """Memory, descriptors and threads of the processes of a run, each of its driver and workers, into `memory.jsonl`.

    A reading is [pid, name, minutes, MB, descriptors, threads]. Memory is what no file backs: a page of a library that
    a process calls for the first time is not its growth.
    """
    for pid in processes_of(folder / "orders"):
        with suppress(OSError, KeyError), (folder / "memory.jsonl").open("a") as file:  # it may just have ended
            of = Path(f"/proc/{pid}")
            status = dict(line.split(":\t", 1) for line in (of / "status").read_text().splitlines())
            memory = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024
            command = (of / "cmdline").read_text().split("\0")
            scripts = [Path(part).name for part in command if part.endswith(".py")]
            name = scripts[0] if scripts and status["Name"] == "python" else Path(command[0]).name
            reading = (pid, name, minutes, memory, len(list((of / "fd").iterdir())), int(status["Threads"]))
            file.write(f"{json.dumps(reading)}\n")


def growing(path: Path) -> list[str]:
    """Processes of a `memory.jsonl` that grow after WARM_UP minutes.

    The slope is the median of the slopes between all pairs of readings (Theil and Sen), because an allocator takes
    several MB at once: one such step is no growth, and a leak is in most pairs. A worker that a fault ends before it is
    warm is not judged.
    """
    seen: dict[int, list[list[float]]] = {}
    names: dict[int, str] = {}
    for pid, name, *reading in map(json.loads, path.read_text().splitlines()):
        seen.setdefault(pid, []).append(reading)
        names[pid] = name
    found = []
    for pid, readings in seen.items():
        rows = np.array(readings)
        rows = rows[rows[:, 0] >= rows[0, 0] + WARM_UP]
        if len(rows) < 10 or rows[-1, 0] - rows[0, 0] < JUDGED:
            continue
        some = rows[np.linspace(0, len(rows) - 1, min(len(rows), 500)).astype(int)]
        late, early = np.triu_indices(len(some), 1)[::-1]
        slope = np.median((some[late, 1] - some[early, 1]) / (some[late, 0] - some[early, 0]))
        half = len(rows) // 2
        more = np.median(rows[half:, 2:], axis=0) - np.median(rows[:half, 2:], axis=0)
        text = (
            f"{names[pid]} {pid}, minutes {rows[0, 0]:.0f} to {rows[-1, 0]:.0f}: {slope:+.2f} MB a minute "
            f"({rows[0, 1]:.0f} to {rows[-1, 1]:.0f}), {more[0]:+.0f} descriptors, {more[1]:+.0f} threads"
        )
        print(text, file=sys.stderr)
        files = LOG_FILES if names[pid] == "log_monitor.py" else MAX_MORE
        if slope > MAX_MB_PER_MINUTE or more[0] > files or more[1] > MAX_MORE:
            found.append(text)
    return found


@pytest.mark.soak
@pytest.mark.timeout(int(MINUTES * 60 * 2 + 1200))
def test_a_fault_each_minute_costs_no_prompt_no_memory_and_no_reward(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    cells = [rng.choice(HEALING) for _ in range(max(1, int(MINUTES)))]
    steps = keys(grpo="max_num_steps=1000000 max_num_epochs=1000000")
    rate = "policy.optimizer.kwargs.lr=1e-5"  # of short runs it is 3e-4, too much for thousands of epochs of 12 prompts
    chain, began = Chain(loop="async", folder=tmp_path / "run", overrides=(*steps, rate)), time.monotonic()
    chain.environment = {"FAULTS_EVERY_S": "60"}
    chain.while_running = lambda: look(chain.folder, (time.monotonic() - began) / 60)
    endings = chain.play(cells)
    grown = growing(chain.folder / "memory.jsonl")
    assert [ending.how for ending in endings] == ["healed"] * len(cells)
    chain.check_prompts()
    rows = Finished("", chain.folder).steps
    rewards, seconds = (ends(rows, name) for name in ("train/reward", "timing/train/total_step_time"))
    print(f"{len(rows)} steps, reward {rewards}, seconds of a step {seconds}", file=sys.stderr)
    assert all(row["train/failed_sample_rate"] == 0 for row in rows)
    assert rewards[1] >= rewards[0]
    assert not grown, grown


def test_a_leak_is_found_and_a_step_of_the_allocator_is_not(tmp_path: Path) -> None:
    times = np.arange(0, 40, 0.1)
    of = {"leaks": 500 + 1.5 * times, "steps": 500 + 9.0 * (times > 21), "warms up": 500 + 30 * np.minimum(times, 12)}
    readings = [(pid, name, t, mb, 9, 9) for pid, name in enumerate(of) for t, mb in zip(times, of[name], strict=True)]
    (tmp_path / "memory.jsonl").write_text("\n".join(map(json.dumps, readings)))
    assert [text.split()[0] for text in growing(tmp_path / "memory.jsonl")] == ["leaks"]

"""A long asynchronous run with a fault each minute: `SOAK_MINUTES=120 pytest -m soak`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.functional.fault_runs import Chain, processes_of
from tests.functional.fault_table import Cell

MINUTES = float(os.environ.get("SOAK_MINUTES", "120"))
SEED = int(os.environ.get("FAULTS_SEED", "0"))
MAX_MB_PER_MINUTE = 1.0
MAX_MORE = 8  # file descriptors, threads
LOG_FILES = 200  # which Ray's log monitor keeps open at most, those of dead workers included
HEALING = [
    Cell(loop="async", who=who, what=what, when=when)
    for who, what in [
        ("environment", "kill"),
        ("environment", "pause"),
        ("engine", "kill"),
        ("engine", "stop"),
        ("core", "exception"),
        ("rollout", "kill"),
        ("rollout", "pause"),
        ("keeper", "kill"),
        ("policy-0", "kill"),
        ("policy-0", "pause"),
    ]
    for when in ("generation", "train", "refit", "validation")
]


class Meter:
    """Memory, descriptors and threads of the driver of a run, which lives as long as the run, and of its workers."""

    def __init__(self, orders: Path) -> None:
        self.orders = orders
        self.seen: dict[int, list[tuple[float, float, int, int]]] = {}  # pid -> minutes, MB, descriptors, threads
        self.names: dict[int, str] = {}

    def look(self, minutes: float) -> None:
        for pid in processes_of(self.orders):
            try:
                folder = Path(f"/proc/{pid}")
                status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
                memory = int(status["VmRSS"].split()[0]) / 1024
                reading = minutes, memory, len(list((folder / "fd").iterdir())), int(status["Threads"])
                command = (folder / "cmdline").read_text().split("\0")
                scripts = [Path(part).name for part in command if part.endswith(".py")]
                self.names[pid] = scripts[0] if scripts and status["Name"] == "python" else command[0]
            except (OSError, KeyError):  # it has just ended
                continue
            self.seen.setdefault(pid, []).append(reading)

    def growing(self) -> list[str]:
        """Processes that grow after the first third of their time."""
        found = []
        for pid, readings in self.seen.items():
            rows = np.array(readings)
            rows = rows[rows[:, 0] >= rows[0, 0] + (rows[-1, 0] - rows[0, 0]) / 3]
            if len(rows) < 10 or rows[-1, 0] - rows[0, 0] < 3:
                continue
            slope = np.polyfit(rows[:, 0], rows[:, 1], 1)[0]
            half = len(rows) // 2
            more = np.median(rows[half:, 2:], axis=0) - np.median(rows[:half, 2:], axis=0)
            text = (
                f"{self.names[pid]} {pid}, minutes {rows[0, 0]:.0f} to {rows[-1, 0]:.0f}: {slope:+.2f} MB a minute "
                f"({rows[0, 1]:.0f} to {rows[-1, 1]:.0f}), {more[0]:+.0f} descriptors, {more[1]:+.0f} threads"
            )
            print(text, file=sys.stderr)
            files = LOG_FILES if self.names[pid] == "log_monitor.py" else MAX_MORE
            if slope > MAX_MB_PER_MINUTE or more[0] > files or more[1] > MAX_MORE:
                found.append(text)
        return found


@pytest.mark.soak
@pytest.mark.timeout(int(MINUTES * 60 * 2 + 1200))
def test_a_fault_each_minute_costs_no_prompt_no_memory_and_no_reward(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    cells = [rng.choice(HEALING) for _ in range(max(1, int(MINUTES)))]
    how = (
        "grpo.max_num_steps=1000000",
        "grpo.max_num_epochs=1000000",
        "policy.optimizer.kwargs.lr=1e-5",  # of short runs it is 3e-4, too much for thousands of epochs of 12 prompts
    )
    chain = Chain(loop="async", folder=tmp_path / "run", overrides=how)
    meter, began = Meter(chain.orders), time.monotonic()
    chain.environment = {"FAULTS_EVERY_S": "60"}
    chain.while_running = lambda: meter.look((time.monotonic() - began) / 60)
    endings = chain.play(cells)
    growing = meter.growing()
    assert [ending.how for ending in endings] == ["healed"] * len(cells)
    chain.check_prompts()
    (log,) = chain.folder.glob("logs/exp_*/metrics.jsonl")
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if row["step"] > 0]
    tenth = max(1, len(rows) // 10)
    rewards = [float(np.mean([row["train/reward"] for row in part])) for part in (rows[:tenth], rows[-tenth:])]
    seconds = [
        float(np.median([row["timing/train/total_step_time"] for row in part]))
        for part in (rows[:tenth], rows[-tenth:])
    ]
    print(f"{len(rows)} steps, reward {rewards}, seconds of a step {seconds}", file=sys.stderr)
    assert all(row["train/failed_sample_rate"] == 0 for row in rows)
    assert rewards[1] >= rewards[0]
    assert not growing, growing

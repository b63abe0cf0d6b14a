"""Predicted memory of each kind of process of a run on CPUs against measured sums of proportional set sizes (PSS).

    python benchmarks/memory_of_runs.py grpo examples/configs/grpo_math_cpu.yaml grpo.max_num_steps=3

The kinds are the groups of workers (`policy`, `generation`, `value`, `teacher`), with the processes that they start.
PSS divides a page that several processes share among them, so sums of it count nothing twice.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig
from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.config.supervised import SFTMasterConfig
from nemo_rl.algorithms.distillation import run_distillation
from nemo_rl.algorithms.grpo import run_grpo
from nemo_rl.algorithms.parts.placement import local_config, phases_of
from nemo_rl.algorithms.ppo import run_ppo
from nemo_rl.algorithms.supervised import run_sft
from nemo_rl.config.loader import load_config
from nemo_rl.distributed.worker_groups import LIVE
from nemo_rl.models.policy.memory import Machine, ModelShape

RUNS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "grpo": (GRPOMasterConfig, run_grpo),
    "ppo": (PPOMasterConfig, run_ppo),
    "distillation": (DistillationMasterConfig, run_distillation),
    "sft": (SFTMasterConfig, run_sft),
}
GROUPS = {"": "policy", "engine": "generation"}  # kind of process -> group of workers
INTERVAL_S = 0.2


def pss_bytes(pid: str) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)


def bytes_by_group() -> dict[int, int]:
    """Process group -> PSS of its processes."""
    found: dict[int, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            group = os.getpgid(int(pid))
            found[group] = found.get(group, 0) + pss_bytes(pid)
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue  # it ended meanwhile
    return found


class Peaks:
    """The largest PSS of a worker of each kind while the body runs."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            now = bytes_by_group()
            for group in list(LIVE):
                kind = re.sub(r"-\d+\Z", "", group.name_prefix)
                for worker in group.members:
                    if worker.identity is not None:
                        size = now.get(worker.identity.pid, 0)
                        self.bytes[kind] = max(self.bytes.get(kind, 0), size)


def main() -> None:
    name, file, *overrides = sys.argv[1:]
    model, run = RUNS[name]
    config = load_config(model, file, overrides)
    found = local_config(config.policy)
    assert found is not None, "the model is on this machine"
    predicted: dict[str, float] = {}
    for phase in phases_of(config, ModelShape.of(found), Machine(is_gpu=False)):
        kind = GROUPS.get(phase.device, phase.device)
        predicted[kind] = max(predicted.get(kind, 0.0), phase.num_bytes)
    with Peaks() as peaks:
        status = run(config)
    assert status == 0
    sys.stdout.write(f"{'kind':<16}{'predicted':>11}{'measured':>11}{'ratio':>8}\n")
    for kind, size in peaks.bytes.items():
        guess = predicted.get(kind)
        shown = "" if guess is None else f"{guess / 1e6:>8.0f} MB"
        ratio = "" if guess is None else f"{guess / size:>8.2f}"
        sys.stdout.write(f"{kind:<16}{shown:>11}{size / 1e6:>8.0f} MB{ratio}\n")


if __name__ == "__main__":
    main()

"""A run of the real command line that hurts its own processes: real signals, each in a phase of a step of its own.

As a script it takes the command line of `run_grpo_math.py` and reads `faults.json` in the folder it runs in: a list of
`Fault`. A line of output is written for each.
"""

import json
import os
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

FAULTS = "faults.json"
COMMANDS = {"environment": "ray::MathEnvironment", "keeper": "ray::GroupKeeper", "verifier": "math.verification"}
GROUPS = {"generation": "generation-0", "engine": "generation-0", "rollout": "rollout", "policy": "policy"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Send `number` to the process of `role` when phase `phase` of step `step` has lasted for `after_s`."""

    step: int
    phase: str
    role: str  # of COMMANDS or GROUPS
    number: int = signal.SIGKILL
    after_s: float = 0.0


def processes_below(pid: int) -> dict[int, tuple[int, str]]:
    """Descendants: pid -> (parent, command)."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = {int(r[0]): (int(r[1]), r[2]) for line in table.splitlines()[1:] if len(r := line.split(None, 2)) == 3}
    found: dict[int, tuple[int, str]] = {}
    parents = {pid}
    while parents:
        children = {child: row for child, row in rows.items() if row[0] in parents}
        found |= children
        parents = set(children)
    return found


class _Faults:
    """What is still to be done to the run of this process."""

    def __init__(self, faults: list[Fault]) -> None:
        self.left = faults
        self.step = 1
        self.pids: dict[str, int] = {}  # worker group -> the process of its first worker

    def begin(self, phase: str) -> None:
        due = [fault for fault in self.left if (fault.step, fault.phase) == (self.step, phase)]
        self.left = [fault for fault in self.left if fault not in due]
        for fault in due:
            pid = self.process(fault.role)
            if fault.after_s:
                threading.Timer(fault.after_s, self.send, [fault, pid]).start()
            else:
                self.send(fault, pid)

    def send(self, fault: Fault, pid: int) -> None:
        print(f"FAULT at {time.time():.1f}: {fault}", flush=True)
        os.kill(pid, fault.number)

    def process(self, role: str) -> int:
        """The newest process of a role, waited for where the last one has just ended."""
        below = processes_below(os.getpid())
        if role in COMMANDS:
            while not (found := [pid for pid, (_, command) in below.items() if COMMANDS[role] in command]):
                time.sleep(0.1)
                below = processes_below(os.getpid())
            return max(found)
        pid = self.pids[GROUPS[role]]
        if role != "engine":
            return pid
        return next(child for child, (parent, command) in below.items() if parent == pid and "EngineCore" in command)


def _main() -> None:
    from nemo_rl.distributed.worker_groups import RayWorkerGroup
    from nemo_rl.utils.console import RunConsole

    faults = _Faults([Fault(**record) for record in json.loads(Path(FAULTS).read_text())])
    show_phase, finish_step, start = RunConsole.phase, RunConsole.finish_step, RayWorkerGroup._start

    @contextmanager
    def phase(self: RunConsole, name: str) -> Iterator[None]:
        with show_phase(self, name):
            faults.begin(name)
            yield

    def finish(self: RunConsole, step: int, metrics: Mapping[str, float]) -> None:
        finish_step(self, step, metrics)
        print(f"STEP {step} at {time.time():.1f}", flush=True)
        faults.step = step + 1

    def started(self: RayWorkerGroup, timeout_s: float) -> None:
        start(self, timeout_s)
        identity = self.members[0].identity
        assert identity is not None
        faults.pids[self.name_prefix] = identity.pid

    RunConsole.phase, RunConsole.finish_step, RayWorkerGroup._start = phase, finish, started
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "run_grpo_math.py"), run_name="__main__")


def write_faults(folder: Path, faults: list[Fault]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAULTS).write_text(json.dumps([asdict(fault) for fault in faults]))


if __name__ == "__main__":
    _main()

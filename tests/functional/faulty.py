"""A run of the real command line that hurts its own processes, each in the phase of a step that a cell names.

As a script it takes an example script and its command line. It reads `cells.json` in `$FAULTS_FOLDER`, a list of
[number, cell] of `fault_table`, and plays them one after another: the next one waits until steps have been finished
after the last. `played.jsonl` gets a line for each. A cell of the start or of a resume that is not the first ends the
run with SIGINT, as the end of the list does, unless `$FAULTS_GO_ON` is set: whoever reads the file starts the run
again.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PAUSE_S = 20.0
STEPS_BETWEEN = 2
FILLER = "filler"  # the file that fills the disk of the run
COMMANDS = {  # which a process has in its command line, one of them
    "environment": ("ray::MathEnvironment",),
    "keeper": ("ray::GroupKeeper",),
    "verifier": ("math.verification",),
    "node": ("raylet/raylet",),
}
OF_ENGINE = ("core", "detokenizer")  # which its worker starts, in this order
GROUPS = {  # where they are called otherwise
    "engine": "generation-0",
    "tokenizer": "tokenizer-0",
    "critic": "value",
}
PHASES = {
    "generation": ("generation", "exposed_generation"),
    "logprobs": ("policy_and_reference_logprobs", "teacher_logprob_inference"),
    "train": ("policy_training",),
    "refit": ("weight_sync",),
    "validation": ("validation",),
    "checkpoint": ("checkpointing",),
}
_PIDFD_GETFD = 438


def processes_below(pid: int) -> dict[int, tuple[int, str]]:
    """Descendants: pid -> (parent, command), children of a process in the order of their start."""
    command = ["ps", "-e", "--sort=start_time", "-o", "pid,ppid,args"]  # a pid may be smaller than an older one
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {int(r[0]): (int(r[1]), r[2]) for line in table.splitlines()[1:] if len(r := line.split(None, 2)) == 3}
    found: dict[int, tuple[int, str]] = {}
    parents = {pid}
    while parents:
        children = {child: row for child, row in rows.items() if row[0] in parents}
        found |= children
        parents = set(children)
    return found


def engine_processes(pid: int) -> list[int]:
    """The processes of an engine's worker below `pid`, itself or another: its core, then SGLang's detokenizer.

    Their titles do not always tell: setproctitle sets none where the first variable of the environment has been
    changed, and Ray gives a worker its variables in a random order.
    """
    below = processes_below(pid)
    workers = {pid, *(worker for worker, (_, command) in below.items() if "ray::ActorHost" in command)}
    texts = ("multiprocessing.spawn", "EngineCore", "sglang::")
    started = [(child, command) for child, (parent, command) in below.items() if parent in workers]
    return [child for child, command in started if any(text in command for text in texts)]


# -- what is done to a process, from outside


def pause(pid: int) -> None:
    """SIGSTOP, and SIGCONT after `PAUSE_S`, by a process of its own: the target may be this one."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S:g}; kill -CONT {pid}"], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)


def forbid_memory(pid: int) -> None:
    """No address beyond those that the process has now."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmSize"))
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)  # a verifier limits itself
    resource.prlimit(pid, resource.RLIMIT_AS, (kilobytes * 1024, hard))


def cut_network(pid: int) -> None:
    """Shut down the TCP connections of a process, through duplicates of its descriptors."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.pidfd_open(pid)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            number = libc.syscall(_PIDFD_GETFD, target, int(entry.name), 0)
            with socket.socket(fileno=number) as connection:
                if connection.family == socket.AF_INET and not connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    connection.shutdown(socket.SHUT_RDWR)
    os.close(target)


def fill_disk() -> None:
    with suppress(OSError), Path(FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def truncate_checkpoint(who: str) -> None:
    """Cut a file of the newest checkpoint that `who` reads."""
    newest = max(Path.cwd().glob("results/*/step_*"), key=lambda path: int(path.name[5:]))
    part = {"critic": "value", "driver": "."}.get(who, "policy")
    files = [path for path in (newest / part).rglob("*") if path.is_file()]
    if part == ".":
        files = [path for path in files if path.parent == newest and path.name != "manifest.json"]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size * 2 // 3)


# -- when


class _Faults:
    """The cells that are still to be played."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left: list[tuple[int, dict[str, str]]] = json.loads((folder / "cells.json").read_text())
        self.every_s = float(os.environ.get("FAULTS_EVERY_S", "0"))  # at least, between two faults
        # A run that is to heal has a checkpoint before the first fault, however slow its steps are.
        self.steps_since = 0 if self.every_s else STEPS_BETWEEN - int(os.environ.get("FAULTS_AFTER", "0"))
        self.last = time.monotonic()
        self.is_young = True  # nothing has been played and no step finished
        self.groups: dict[str, Any] = {}  # the newest of each name

    @property
    def next(self) -> dict[str, str] | None:
        is_due = self.steps_since >= STEPS_BETWEEN and time.monotonic() - self.last >= self.every_s
        return self.left[0][1] if self.left and is_due else None

    def begin(self, phase: str) -> None:
        if self.next is None or phase not in PHASES.get(self.next["when"], (self.next["when"],)):
            return
        if self.next["who"] != "verifier" or self._process("verifier") is not None:  # it starts with the first answer
            self.play()

    def finish_step(self) -> None:
        self.steps_since += 1
        self.is_young = False
        ends = self.left[0][1]["when"] in ("start-up", "resume") if self.left else "FAULTS_GO_ON" not in os.environ
        if ends and self.steps_since >= STEPS_BETWEEN + 2 * bool(self.left):  # a resume finds a checkpoint of its own
            print("FAULTS: the run ends here", flush=True)
            self.note(None)
            os.kill(os.getpid(), signal.SIGINT)

    def play(self) -> None:
        number, cell = self.left.pop(0)
        self.steps_since, self.is_young, self.last = 0, False, time.monotonic()
        who, what = cell["who"], cell["what"]
        is_here = who == "driver" or what in ("disk", "truncated")
        pid = os.getpid() if is_here else self.process(who)
        self.note(number)
        print(f"FAULT {number}: {cell} at pid {pid}", flush=True)
        from_outside: dict[str, Callable[[], None]] = {
            "kill": lambda: os.kill(pid, signal.SIGKILL),
            "stop": lambda: os.kill(pid, signal.SIGSTOP),
            "pause": lambda: pause(pid),
            "memory": lambda: forbid_memory(pid),
            "cut": lambda: cut_network(pid),
            "disk": fill_disk,
            "truncated": lambda: truncate_checkpoint(who),
        }
        if what in from_outside:
            from_outside[what]()
            return
        order, new = self.folder / str(pid), self.folder / f"{pid}.new"
        new.write_text(what)
        new.rename(order)
        deadline = time.monotonic() + 30
        while order.exists():
            assert time.monotonic() < deadline, f"process {pid} has not taken its order"
            time.sleep(0.01)

    def note(self, number: int | None) -> None:
        with (self.folder / "played.jsonl").open("a") as file:
            file.write(json.dumps({"number": number, "time": time.time()}) + "\n")

    def process(self, who: str, limit_s: float = 60) -> int:
        """The newest process of a role, waited for where the last one has just ended."""
        deadline = time.monotonic() + limit_s
        while (pid := self._process(who)) is None:
            assert time.monotonic() < deadline, f"there is no process of {who}"
            time.sleep(0.02)
        return pid

    def _process(self, who: str) -> int | None:
        below = processes_below(os.getpid())
        if who in COMMANDS:
            of_role = [pid for pid, (_, command) in below.items() if any(text in command for text in COMMANDS[who])]
            return of_role[-1] if of_role else None
        if who in OF_ENGINE:
            started = engine_processes(os.getpid())
            return dict(zip(OF_ENGINE, started, strict=False)).get(who)
        name, _, rank = who.partition("-")
        group = self.groups.get(GROUPS.get(name, name))
        members = group.members if group is not None else []
        identity = members[int(rank or 0)].identity if members else None
        return identity.pid if identity is not None else None

    def watch_start(self) -> None:
        """A fault of the start: as soon as the process is there; of the driver, as soon as Ray is."""
        who = self.left[0][1]["who"]
        self.process("node" if who == "driver" else who, limit_s=600)
        self.play()


def _main() -> None:
    from nemo_rl.algorithms.loop import Trainer
    from nemo_rl.distributed.worker_groups import RayWorkerGroup
    from nemo_rl.utils.console import RunConsole

    # Commands in the background of a shell ignore it, and so do all processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faults = _Faults(Path(os.environ["FAULTS_FOLDER"]))
    show_phase, finish_step = RunConsole.phase, RunConsole.finish_step
    spawn, resume = RayWorkerGroup._spawn, Trainer.resume

    @contextmanager
    def phase(self: RunConsole, name: str) -> Iterator[None]:
        with show_phase(self, name):
            faults.begin(name)
            yield

    def finish(self: RunConsole, step: int, metrics: Mapping[str, float], max_disagreement: float | None) -> None:
        finish_step(self, step, metrics, max_disagreement)
        faults.finish_step()

    def spawned(self: RayWorkerGroup, *args: Any, **kwargs: Any) -> None:
        spawn(self, *args, **kwargs)
        faults.groups[self.name_prefix] = self

    def resumed(self: Trainer) -> bool:
        checkpoints = list(Path.cwd().glob("results/*/step_*"))
        is_cut = faults.next is not None and faults.next["what"] == "truncated"
        if faults.is_young and len(checkpoints) > is_cut:  # a sound one is left
            faults.begin("resume")
        return resume(self)

    RunConsole.phase, RunConsole.finish_step, RayWorkerGroup._spawn = phase, finish, spawned
    Trainer.resume = resumed
    if faults.next is not None and faults.next["when"] == "start-up":
        threading.Thread(target=faults.watch_start, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()

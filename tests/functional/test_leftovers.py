"""No process that a test run started is alive 10 s after the test run has ended, however it ended."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.functional.cli import ROOT
from tests.processes import one_at_a_time

LEFTOVERS = Path(__file__).with_name("leftovers.py")


def processes_of(folder: Path) -> dict[int, bytes]:
    """Processes that were started with the variable of a test run: id -> command."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is of another user
            command = (entry / "cmdline").read_bytes()
            is_agent = command.startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))  # they lose the variable
            files = [os.readlink(file) for file in (entry / "fd").iterdir()] if is_agent else []
            is_ours = f"LEFTOVERS={folder}\0".encode() in (entry / "environ").read_bytes()
            if command and (is_ours or any(str(folder) in file for file in files)):
                found[int(entry.name)] = command
    return found


def take_interruptions() -> None:
    """Commands in the background of a shell ignore SIGINT, and so do all processes that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# Tests of leftovers.py, what they tell when they wait, lanes, and the signal that pytest gets.
ENDS: list[tuple[str, set[str], str, int | None]] = [
    ("test_a_cluster or test_a_world", {"cluster", "rank0", "rank1"}, "2", signal.SIGKILL),
    ("without_a_limit", {"process"}, "0", signal.SIGINT),
    ("without_a_limit", {"process"}, "0", signal.SIGTERM),
    ("test_a_process and not without_a_limit", {"process"}, "0", None),
]


def begin(tests: str, lanes: str) -> tuple[Path, subprocess.Popen[bytes]]:
    """A test run, and the folder in which it tells that it waits."""
    folder = Path(tempfile.mkdtemp(prefix="left_", dir="/tmp"))  # sockets: short paths
    options = ("-q", "-p", "no:cacheprovider", "-p", "xdist", "-p", "timeout", "-n", lanes, "-k", tests)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"LEFTOVERS": str(folder), "RAY_TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with (folder / "out.log").open("w") as log:
        how: dict[str, Any] = {"cwd": ROOT, "env": own, "stdout": log, "stderr": subprocess.STDOUT}
        command = [sys.executable, "-m", "pytest", *options, str(LEFTOVERS)]
        return folder, subprocess.Popen(command, start_new_session=True, preexec_fn=take_interruptions, **how)


def test_nothing_is_left_of_a_test_run_however_it_ends() -> None:
    """Killed with its lanes, with a cluster and a world; interrupted; terminated; at the limit of a test."""
    with one_at_a_time("start"), ExitStack() as stack:
        runs = [begin(tests, lanes) for tests, _, lanes, _ in ENDS]
        for folder, run in runs:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.callback(run.kill)
        deadline = time.monotonic() + 600
        for (folder, run), (_, ready, _, number) in zip(runs, ENDS, strict=True):
            while not ready <= {file.name for file in folder.iterdir()}:
                assert time.monotonic() < deadline and run.poll() in (None, 1), (folder / "out.log").read_text()
                time.sleep(0.1)
            if number is not None:
                assert len(processes_of(folder)) >= 1 + len(ready)
                os.kill(run.pid, number)
        for (folder, run), (tests, _, _, number) in zip(runs, ENDS, strict=True):
            status = run.wait(60)
            ended = time.monotonic()
            while left := processes_of(folder):
                assert time.monotonic() < ended + 10, (tests, number, left)
                time.sleep(0.2)
            assert status == {None: 1, signal.SIGINT: 2}.get(number, -(number or 0)), (folder / "out.log").read_text()

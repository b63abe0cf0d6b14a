"""No process that a test run started is alive 10 s after the test run has ended, however it ended."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("tests", "ready", "lanes", "number"),
    [
        ("test_a_cluster or test_a_world", {"cluster", "rank0", "rank1"}, "2", signal.SIGKILL),
        ("limit", {"process"}, "0", signal.SIGKILL),
        ("limit", {"process"}, "0", signal.SIGINT),
        ("limit", {"process"}, "0", signal.SIGTERM),
        ("test_a_process and not limit", {"process"}, "0", None),
    ],
    ids=["lanes-kill", "kill", "interrupt", "terminate", "limit of a test"],
)
def test_nothing_is_left_of_a_test_run(tmp_path: Path, tests: str, ready: set[str], lanes: str, number: int | None):
    command = [sys.executable, "-m", "pytest", "-n", lanes, "-q", "-p", "no:cacheprovider", "-k", tests, str(LEFTOVERS)]
    temporary = Path("/tmp", f"left_{os.getpid()}_{time.monotonic_ns()}")  # sockets: short paths
    temporary.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "LEFTOVERS": str(temporary), "RAY_TMPDIR": str(temporary)}
    with one_at_a_time("start"), (tmp_path / "out.log").open("w") as log:
        how = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True, "preexec_fn": take_interruptions}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, **how)
        deadline = time.monotonic() + 240
        while not ready <= {file.name for file in temporary.iterdir()}:
            assert time.monotonic() < deadline and run.poll() is None, (tmp_path / "out.log").read_text()
            time.sleep(0.1)
    assert len(processes_of(temporary)) >= 1 + len(ready)
    if number is not None:
        os.kill(run.pid, number)
    status = run.wait(60)
    ended = time.monotonic()
    while left := processes_of(temporary):
        assert time.monotonic() < ended + 10, left
        time.sleep(0.2)
    assert status == {None: 1, signal.SIGINT: 2}.get(number, -(number or 0))
    subprocess.run(["rm", "-r", str(temporary)], check=True)

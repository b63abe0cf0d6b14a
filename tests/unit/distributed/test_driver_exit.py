"""However the driver ends, nothing that it started goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found: set[int] = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    left = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return left


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_driver(tmp_path: Path, sign: signal.Signals) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.distributed.driver", str(tmp_path)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started: set[int] = set()
    try:
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        started = descendants(driver.pid) | set(pids)
        assert len(pids) == 4 and alive(set(pids)) == set(pids)
        assert list((tmp_path / "ray").glob("worker-*")), "the log folder links to the logs of the workers"
        driver.send_signal(sign)
        _, errors = driver.communicate(timeout=120)
        assert driver.returncode != 0
        if sign == signal.SIGINT:
            assert errors.rstrip().endswith("KeyboardInterrupt")
        else:
            started = set(pids)  # Ray's own agents notice within a minute that their node is gone
        deadline = time.monotonic() + 30
        while alive(started) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive(started)
    finally:
        driver.kill()
        driver.wait()
        for pid in alive(started):
            os.kill(pid, signal.SIGKILL)

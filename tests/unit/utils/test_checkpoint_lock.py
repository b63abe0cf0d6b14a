"""Two runs in one checkpoint folder: one of them ends before it writes, and a dead one stops nobody."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nemo_rl.utils.checkpoint.lock import LOCK_NAME, FolderLock, FolderLost, FolderTaken, Holder
from tests.unit.utils.test_checkpoint import manager_in, save, steps_in

HOLDS = """
import sys
from pathlib import Path
from nemo_rl.utils.checkpoint.lock import FolderLock
FolderLock(Path(sys.argv[1]), "logs/exp_007").take()
print("taken", flush=True)
sys.stdin.read()
"""
ELSEWHERE = Holder(host="node-7", pid=4242, started="12", machine="other boot", log_dir="logs/exp_003")


def hold(folder: Path, holder: Holder, *, renewed_s_ago: float = 0.0) -> Path:
    """The lock as `holder` left it."""
    path = folder / LOCK_NAME
    path.write_text(json.dumps(asdict(holder)))
    renewed = time.time() - renewed_s_ago
    os.utime(path, (renewed, renewed))
    return path


def test_a_run_that_finds_another_one_ends_and_one_that_finds_a_dead_one_goes_on(tmp_path, caplog):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "taken\n"
    found = rf"{tmp_path} is in use by a run on \S+, process {other.pid}, whose log folder is logs/exp_007: wait for"
    other.send_signal(signal.SIGSTOP)  # Ctrl-Z
    with pytest.raises(FolderTaken, match=found), manager_in(tmp_path).held("logs/exp_008"):
        pass
    (tmp_path / "tmp_step_1").mkdir()
    other.kill()
    other.communicate()
    with manager_in(tmp_path).held("logs/exp_008") as manager:
        assert "is taken over from a run on" in caplog.text and steps_in(tmp_path) == [LOCK_NAME]
        save(manager, 2)
    assert steps_in(tmp_path) == ["step_2"]


def test_a_run_on_another_machine_lives_while_it_renews_its_lock(tmp_path):
    path = hold(tmp_path, ELSEWHERE, renewed_s_ago=20)
    waits: list[float] = []

    def renew(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            path.touch()

    with pytest.raises(FolderTaken, match="in use by a run on node-7, process 4242"):
        FolderLock(tmp_path, "mine", sleep=renew).take()
    assert len(waits) == 3

    hold(tmp_path, ELSEWHERE, renewed_s_ago=20)
    lock = FolderLock(tmp_path, "mine", sleep=lambda _: path.unlink())  # it ends while this run waits
    lock.take()
    lock.release()

    hold(tmp_path, ELSEWHERE, renewed_s_ago=59.5)
    lock = FolderLock(tmp_path, "mine")
    lock.take()
    lock.check()
    lock.release()
    path.write_text("")  # its disk was full
    os.utime(path, (0, 0))
    FolderLock(tmp_path, "mine").take()


def test_of_two_that_find_a_lock_dead_one_gets_it(tmp_path):
    hold(tmp_path, ELSEWHERE, renewed_s_ago=59.5)

    def other_is_faster(_: float) -> None:
        hold(tmp_path, faster)

    faster = replace(ELSEWHERE, pid=4243)
    lock = FolderLock(tmp_path, "mine", sleep=other_is_faster)
    with pytest.raises(FolderTaken, match="process 4243"):
        lock.take()
    assert not lock._remove(ELSEWHERE) and lock._holder() == faster


def test_a_run_that_lost_its_folder_writes_nothing_more_and_a_removed_lock_comes_back(tmp_path):
    with manager_in(tmp_path).held("mine") as manager:
        save(manager, 1)
        (tmp_path / LOCK_NAME).unlink()
        pending = manager.start_save(2, lambda _: None, {}, "", {})
        hold(tmp_path, ELSEWHERE)
        lost = "was taken over by a run on node-7, process 4242, whose log folder is logs/exp_003, because this run did"
        with pytest.raises(FolderLost, match=lost):
            pending.finish()
        with pytest.raises(FolderLost):
            manager.start_save(3, lambda _: None, {}, "", {})
        assert steps_in(tmp_path) == [LOCK_NAME, "step_1"]
    assert (tmp_path / LOCK_NAME).is_file(), "it is the other run's"


def test_a_lock_is_renewed_until_it_is_released(tmp_path):
    lock = FolderLock(tmp_path, "mine", beat_s=0.01)
    lock.take()
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 600
    while lock.path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.time() - lock.path.stat().st_mtime < 60
    lock.release()
    assert steps_in(tmp_path) == []

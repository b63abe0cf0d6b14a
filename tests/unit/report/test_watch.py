"""The terminal view, from files alone."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.report.run_files import find_run
from nemo_rl.report.watch import Watch
from tests.unit.report.runs import append, write_run

ROOT = Path(__file__).parents[3]


def drawn(watch: Watch, now: float | None = None) -> str:
    watch.update()
    console = Console(file=io.StringIO(), width=110)
    console.print(watch.view(width=110, now=now))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_is_drawn_and_new_lines_are_read(tmp_path):
    folder = write_run(tmp_path / "exp_000", 4)
    watch = Watch(folder)
    first = drawn(watch)
    assert "step 4 of 4" in first and "reward" in first and "generation" in first and "62%" in first
    append(folder / "metrics.jsonl", **{"step": 5, "train/reward": 0.125})
    append(folder / "events.jsonl", time=1.0, step=5, kind="warning", text="entropy_collapse: \x1b[31mlook")
    append(folder / "events.jsonl", time=2.0, step=5, kind="info", text="not of interest")
    later = drawn(watch)
    assert "step 5" in later and "0.125" in later and "not of interest" not in later
    assert "entropy_collapse" in later and "\x1b[31mlook" not in later  # model output cannot steer the terminal


def test_a_curve_takes_one_line_of_80_columns_and_kl_without_a_reference_none(tmp_path):
    folder = write_run(tmp_path / "exp_000")
    for step in range(4, 90):
        values = {"train/loss": 1.2345e-5 * (-1) ** step, "validation/val_loss": 0.36150391, "train/kl_penalty": 0.0}
        append(folder / "metrics.jsonl", **{"step": step, "train/mean_gen_tokens_per_sample": 12345.678, **values})
    console = Console(width=80, file=io.StringIO(), record=True)
    watch = Watch(folder)
    watch.update()
    console.print(watch.view(width=80))
    lines = console.export_text().splitlines()
    [loss] = [line for line in lines if "-0.03 to 1.234e-05" in line]
    assert loss.startswith("│ loss ") and loss.endswith(" │") and max(map(len, lines)) <= 80
    assert not any("KL" in line for line in lines)


def test_a_dead_run_is_called_dead_and_its_last_samples_are_shown_turn_by_turn(tmp_path):
    folder = write_run(tmp_path / "exp_000")
    (folder / "run.json").write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "pid_started": "1"}))
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "x" * 5000 + "THE END"}]
    sample = {"step": 3, "id": "3/0/p:1/0", "reward": 1.0, "messages": messages}
    (folder / "samples").mkdir()
    (folder / "samples" / "policy-0_000003.js").write_text(f"nemo_rl_sample({json.dumps(sample)});\n")
    watch = Watch(folder)
    text = drawn(watch, now=watch.run.written_at + 180)
    assert "dead: its process is gone; last line 3 min ago" in text
    assert "3/0/p:1/0" in text and "2+2" in text and "[…]" in text and "THE END" in text


def test_the_newest_run_of_a_folder_is_taken(tmp_path):
    for name in ("exp_009", "exp_999", "exp_1000", "notes"):
        write_run(tmp_path / name)
    assert find_run(tmp_path).name == "exp_1000"
    with pytest.raises(FileNotFoundError, match="name the log folder of a run"):
        find_run(tmp_path / "exp_009" / "nothing")


def test_q_ends_the_view_on_a_terminal(tmp_path):
    folder = write_run(tmp_path / "exp_000")
    command = [sys.executable, str(ROOT / "examples" / "watch.py"), str(folder), "--every", "0.1"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        seen, deadline = b"", time.monotonic() + 600
        with suppress(OSError):  # at the end, when the other end is closed
            while process.poll() is None:
                assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen[-2000:]
                seen += os.read(ours, 65536)
                if b"phases of the last step" in seen:
                    os.write(ours, b"q")
        assert b"phases of the last step" in seen and process.wait(20) == 0
    finally:
        process.kill()
        os.close(ours)

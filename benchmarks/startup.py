"""Where the time from a command to its first step goes, per process.

Runs the quick start (or another `--config` of GRPO) for one step and reads Linux's counters of every process that it
starts. Prints when each process began, and the seconds of CPU it took until step 1 was logged. On a busy machine the
CPU seconds count.

    uv run --extra cpu benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
MIN_CPU_S = 0.1  # of a process with a line of its own


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/configs/grpo_math_cpu.yaml")
    return parser.parse_args()


def processes(root: int) -> dict[int, tuple[float, float, str]]:
    """Every process below `root` and itself: process id -> (began at, CPU seconds, name)."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    booted = time.time() - uptime_s
    found, children = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it ended meanwhile
            continue
        number = int(folder.name)
        children.setdefault(int(fields[1]), []).append(number)
        found[number] = (booted + int(fields[19]) / TICKS, (int(fields[11]) + int(fields[12])) / TICKS, name)
    below, waiting = {}, [root]
    while waiting:
        number = waiting.pop()
        if number in found:
            below[number] = found[number]
        waiting += children.get(number, [])
    return below


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/run_grpo_math.py", "--config", args.config, "grpo.max_num_steps=1"]
        command += [f"logger.log_dir={folder}", f"checkpointing.checkpoint_dir={folder}/checkpoints"]
        command += ["grpo.val_at_start=false"]
        began = time.time()
        seen: dict[int, tuple[float, float, str]] = {}
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            while run.poll() is None:
                seen |= processes(run.pid)
                if any(file.stat().st_size for file in Path(folder).glob("exp_*/metrics.jsonl")):
                    break
                time.sleep(0.1)
            elapsed_s = time.time() - began
            if run.wait() != 0:
                sys.exit(f"the run failed with status {run.returncode}: {' '.join(command)}")
    sys.stdout.write("began at   CPU s   process\n")
    for start, cpu_s, name in sorted(seen.values()):
        if cpu_s >= MIN_CPU_S:
            sys.stdout.write(f"{start - began:8.1f} {cpu_s:7.1f}   {name[:90]}\n")
    total = sum(cpu_s for _, cpu_s, _ in seen.values())
    sys.stdout.write(f"step 1 was logged after {elapsed_s:.1f} s; CPU of all processes {total:.1f} s\n")


if __name__ == "__main__":
    main()

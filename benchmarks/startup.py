"""Where the time from a command to its first step goes, per process.

Runs the quick start (or another `--config` of GRPO) for one step and reads Linux's counters of every process that it
starts. Prints when each process began, and the seconds of CPU it took until step 1 was logged. On a busy machine the
CPU seconds count.

    uv run --extra cpu benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processor_time import MIN_CPU_S, Process, processes  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/configs/grpo_math_cpu.yaml")
    return parser.parse_args()


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/run_grpo_math.py", "--config", args.config, "grpo.max_num_steps=1"]
        command += [f"logger.log_dir={folder}", f"checkpointing.checkpoint_dir={folder}/checkpoints"]
        command += ["grpo.val_at_start=false"]
        began = time.time()
        seen: dict[int, Process] = {}
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
    for process in sorted(seen.values(), key=lambda process: process.began):
        if process.cpu_s >= MIN_CPU_S:
            sys.stdout.write(f"{process.began - began:8.1f} {process.cpu_s:7.1f}   {process.command[:90]}\n")
    total = sum(process.cpu_s for process in seen.values())
    sys.stdout.write(f"step 1 was logged after {elapsed_s:.1f} s; CPU of all processes {total:.1f} s\n")


if __name__ == "__main__":
    main()

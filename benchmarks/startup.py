"""The time from a command to its first step, per process, against the imports that no run can do without.

Runs the quick start (or another `--config` of GRPO) for one step, twice, and reads Linux's counters of every process
that it starts. Prints when each process of the second run began, and its seconds of CPU until step 1 was logged. The
ratio is of the CPU seconds of all processes to those of one Python that imports torch, vllm, transformers and ray, both
warm. On a busy machine the CPU seconds count.

    uv run --extra cpu benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import torch, vllm, transformers, ray"
sys.path.insert(0, str(ROOT))

from benchmarks.processor_time import MIN_CPU_S, Process, processes  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/configs/grpo_math_cpu.yaml")
    return parser.parse_args()


def import_cpu_s() -> float:
    """CPU seconds of the imports, the least of three times."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def start(config: str) -> tuple[float, float, list[Process]]:
    """The time at which a run began, the seconds until step 1 was logged, and its processes at that time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/run_grpo_math.py", "--config", config, "grpo.max_num_steps=1"]
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
    return began, elapsed_s, list(seen.values())


def main() -> None:
    args = parse()
    start(args.config)
    began, elapsed_s, seen = start(args.config)
    sys.stdout.write("began at   CPU s   process\n")
    for process in sorted(seen, key=lambda process: process.began):
        if process.cpu_s >= MIN_CPU_S:
            sys.stdout.write(f"{process.began - began:8.1f} {process.cpu_s:7.1f}   {process.command[:90]}\n")
    total, imports = sum(process.cpu_s for process in seen), import_cpu_s()
    sys.stdout.write(f"step 1 was logged after {elapsed_s:.1f} s; CPU of all processes {total:.1f} s\n")
    sys.stdout.write(f"python -c '{IMPORTS}': {imports:.1f} s of CPU; ratio {total / imports:.2f}\n")


if __name__ == "__main__":
    main()

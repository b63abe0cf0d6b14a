"""Seconds of a whole evaluation, start-up included: 1,000 generated problems x 8 samples on the tiny model.

Then the same command is killed with SIGKILL half way and repeated: it does not sample again what it wrote before, and
its samples and numbers equal those of the uninterrupted run. The last line: seconds and their ratio to the limit.

    uv run --extra cpu benchmarks/eval_throughput.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="engines, one thread each")
    parser.add_argument(
        "--kill-at", type=float, default=0.5, help="share of the samples that the killed run has written"
    )
    return parser.parse_args()


def start(args: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        str(ROOT / "examples" / "run_eval.py"),
        "--config",
        str(ROOT / "examples" / "configs" / "evals" / "eval_cpu.yaml"),
        f"eval.save_path={folder}",
        f"eval.num_tests_per_prompt={args.samples}",
        f"data.kwargs.num_samples={args.problems}",
        f"cluster.cpu_workers_per_node={args.workers}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status != 0:
        raise SystemExit(f"the evaluation ended with status {status}")


def num_samples(folder: Path) -> int:
    path = folder / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def samples(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["prompt_id"], line["sample_index"]))


def kill_half_way(args: argparse.Namespace, folder: Path) -> int:
    """Samples on disk when the run was killed."""
    process = start(args, folder)
    while num_samples(folder) < args.kill_at * args.problems * args.samples:
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed; raise --problems")
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return num_samples(folder)


def main() -> None:
    args = parse()
    total = args.problems * args.samples
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed = Path(temporary) / "whole", Path(temporary) / "killed"
        started = time.perf_counter()
        finish(start(args, whole))
        seconds = time.perf_counter() - started
        before = kill_half_way(args, killed)
        started = time.perf_counter()
        finish(start(args, killed))
        resumed_s = time.perf_counter() - started
        if samples(killed) != samples(whole) or len(samples(whole)) != total:
            raise SystemExit("the killed and resumed run has other samples than the uninterrupted one")
        results = [json.loads((folder / "results.json").read_text())["overall"] for folder in (whole, killed)]
        if results[0] != results[1]:
            raise SystemExit("the killed and resumed run has other numbers than the uninterrupted one")
        tokens = sum(sample["num_tokens"] for sample in samples(whole))
    sys.stdout.write(
        f"{total:,} samples, {tokens:,} tokens, mean reward {results[0]['mean']:.4f}\n"
        f"killed with {before:,} samples on disk; resumed in {resumed_s:.1f} s with the same samples and numbers\n"
        f"whole command {seconds:.1f} s; of the limit of {LIMIT_S:.0f} s: {seconds / LIMIT_S:.2f}\n"
    )


if __name__ == "__main__":
    main()

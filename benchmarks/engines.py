"""A step of the quick start with engines of SGLang, beside the same step with engines of vLLM.

Runs examples/configs/grpo_math_cpu.yaml and examples/configs/grpo_math_sglang_cpu.yaml in turn, without validation and
checkpoints, and prints medians over the steps after the first one, of the whole step and of its parts. The seeds are
the same, and the samples are other ones: each engine draws in its own way.

    uv run --extra cpu benchmarks/engines.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"vllm": "grpo_math_cpu.yaml", "sglang": "grpo_math_sglang_cpu.yaml"}
QUIET = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.enabled=false")
STEP = "timing/train/total_step_time"
PARTS = ("generation", "policy_training", "weight_sync")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each run; the first one is not counted")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each engine")
    return parser.parse_args()


def steps_of(engine: str, num_steps: int) -> list[dict[str, float]]:
    """The metrics of a run's steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        config = ROOT / "examples" / "configs" / CONFIGS[engine]
        command = [sys.executable, "examples/run_grpo_math.py", "--config", str(config), *QUIET]
        command += [f"grpo.max_num_steps={num_steps}", "checkpointing.metric_name=null", f"logger.log_dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        [file] = Path(folder).glob("exp_*/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if STEP in row][1:]


def main() -> None:
    args = parse()
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in CONFIGS}
    for _ in range(args.pairs):
        for engine, rows in found.items():
            rows += steps_of(engine, args.steps)
    medians = {}
    for engine, rows in found.items():
        medians[engine] = statistics.median(row[STEP] for row in rows)
        parts = {part: statistics.median(row[f"timing/train/{part}"] for row in rows) for part in PARTS}
        told = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
        sys.stdout.write(f"{engine:<8} step {medians[engine]:.2f} s ({told}), {len(rows)} steps\n")
    sys.stdout.write(f"ratio sglang / vllm: {medians['sglang'] / medians['vllm']:.2f}\n")


if __name__ == "__main__":
    main()

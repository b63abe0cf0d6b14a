"""The same run trained with PyTorch and with Megatron Core: how far apart are their curves?

Runs two command lines that differ only in the training backend, and prints the largest difference of every metric
over the steps.

    uv run --extra cpu --extra mcore benchmarks/megatron_curve.py --steps 20
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS = {"dtensor": "grpo_math_cpu.yaml", "megatron": "grpo_math_megatron_cpu.yaml"}
METRICS = ("train/reward", "train/loss", "train/grad_norm", "train/token_mult_prob_error", "validation/accuracy")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a temporary one")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for both runs")
    return parser.parse_args()


def run(folder: Path, config: str, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Metrics of every step of a run of `steps` steps."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(ROOT / "examples" / "run_grpo_math.py")]
    command += ["--config", str(ROOT / "examples" / "configs" / config), f"grpo.max_num_steps={steps}"]
    command += ["checkpointing.enabled=false", "logger.num_val_samples_to_print=0", *overrides]
    with (folder / "out.log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=True, env=environment)
    (file,) = folder.glob("logs/exp_*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """The largest absolute difference of each of `METRICS` over the steps."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    return {
        name: max(abs(a[name] - b[name]) for a, b in zip(one, other, strict=True) if name in a or name in b)
        for name in METRICS
    }


def main() -> None:
    arguments = parse()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="megatron_curve_"))
    rows = {name: run(folder / name, config, arguments.steps, arguments.overrides) for name, config in CONFIGS.items()}
    for name, found in rows.items():
        rewards = [row["train/reward"] for row in found if "train/reward" in row]
        print(f"{name}: reward {rewards[0]:.4f} -> {rewards[-1]:.4f}")
    for name, difference in differences(rows["dtensor"], rows["megatron"]).items():
        print(f"largest difference of {name}: {difference:.3g}")


if __name__ == "__main__":
    main()

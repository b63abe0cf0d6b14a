"""Plot metrics of a run over its steps, in the style of the pictures in the guides.

uv run --group docs tools/plot_curves.py logs/exp_000/metrics.jsonl docs/images/sft_cpu.svg \
    "loss of training=train/loss" "loss of validation=validation/val_loss"
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path


def read_curve(path: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where a line of metrics.jsonl has it as a finite number.

    Raises:
        ValueError: if no line has it.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        raise ValueError(f"{path} has no {metric}; it has {', '.join(sorted(rows[-1]))}")
    return [step for step, _ in points], [value for _, value in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("picture", type=Path, help="file to write, e.g. curve.svg")
    parser.add_argument("curves", nargs="+", metavar="NAME=METRIC", help="one panel each")
    arguments = parser.parse_args()
    import matplotlib.pyplot as plt

    # The same data gives the same bytes.
    plt.rcParams.update({"svg.hashsalt": "nemo_rl", "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False})
    number = len(arguments.curves)
    figure, panels = plt.subplots(1, number, figsize=(4.5 * number, 2.8), squeeze=False)
    for panel, curve in zip(panels[0], arguments.curves, strict=True):
        name, _, metric = curve.partition("=")
        panel.plot(*read_curve(arguments.metrics, metric), marker=".", color="#2b6cb0")
        panel.set_title(name)
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(arguments.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()

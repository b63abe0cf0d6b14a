"""Our losses and their gradients against TRL's on the same batch, float32 on the CPU: the table of docs/parity.md.

The batch is eight ragged sequences with masked tokens among them, the model a tiny Qwen2 with random weights. TRL runs
`compute_loss` of its trainer on the whole batch, padded; we run packed micro-batches of two sequences. The error of a
gradient is that of the whole vector, in the Euclidean norm. Prints the largest error on the last line.

    uv run --extra cpu --group test --group bench benchmarks/trl_parity.py
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", module="trl")
    sys.path.insert(0, str(ROOT))
    from tests.parity.cases import CASES, COLUMNS, compare, row

    results = {name: compare(case) for name, case in CASES.items()}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [row(name, case, results[name]) for name, case in CASES.items()]
    worst = max(
        max(parity.gradient_error, parity.loss_error if CASES[name].is_same_value else 0.0)
        for name, parity in results.items()
    )
    sys.stdout.write("\n".join([*lines, f"largest relative error: {worst:.1e}"]) + "\n")


if __name__ == "__main__":
    main()

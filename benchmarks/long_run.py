"""Whether a step of the controller costs the same after thousands of steps, and whether its memory stays flat.

Engines and policy are simulated and take no time, so a step is the controller's own work: trainer, collector, rollout
worker, metrics and report are real. Prints the median step and the driver's resident memory of each tenth of the run.
The last line is the median of the last tenth over the median of the second: the first warms up.

    uv run --extra cpu benchmarks/long_run.py [--steps 2000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from benchmarks.simulated_run import Times, simulate  # noqa: E402
from nemo_rl.distributed.virtual_cluster import init_ray  # noqa: E402

TENTHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    init_ray()
    memory: list[float] = []

    def look() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    with tempfile.TemporaryDirectory() as folder:
        overrides = (f"grpo.max_num_steps={steps}", "grpo.max_num_epochs=1000000", "logger.report.enabled=true")
        rows = simulate(Path(folder), Times(training_s=0.0, generation_s=0.0), overrides, each_step=look)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    seconds = [row["timing/train/total_step_time"] for row in rows]
    width = len(seconds) // TENTHS
    medians = [statistics.median(seconds[k * width : (k + 1) * width]) for k in range(TENTHS)]
    for k, median in enumerate(medians):
        first, last = k * width + 1, (k + 1) * width
        print(f"steps {first:>5} to {last:>5}: {1e3 * median:6.1f} ms, {memory[last - 1]:6.0f} MB")
    print(f"files of the run: {size / 1e6 / len(seconds) * 1000:.1f} MB in 1,000 steps")
    growth = (memory[-1] - memory[width]) / (len(seconds) - width) * 1000
    print(f"memory of the driver grows by {growth:.1f} MB in 1,000 steps")
    print(f"last tenth over second tenth: {medians[-1] / medians[1]:.3f}")


if __name__ == "__main__":
    main()

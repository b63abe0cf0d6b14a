"""Steps per hour of asynchronous GRPO against synchronous GRPO, and the cost of stragglers.

Engines and policy are simulated: they take time and compute nothing. Trainer, collector, rollout worker and replay
buffer are real. The phases are balanced: training takes as long as the slowest sample of a step, so the limit of the
ratio is 2. In the second part one sample of each group takes ten times as long, first with a time limit for episodes,
then with a window that is deep enough to wait for it. The last line is the ratio.

    uv run --extra cpu benchmarks/async_vs_sync.py [--seconds 1.0] [--steps 24]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from benchmarks.simulated_run import Times, steps_per_hour  # noqa: E402
from nemo_rl.distributed.virtual_cluster import init_ray  # noqa: E402

ASYNC = (
    "grpo.async_grpo.enabled=true",
    "cluster.cpu_workers_per_node=2",
    "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}",
)
IN_FLIGHT = (*ASYNC, "grpo.async_grpo.in_flight_weight_updates=true")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the two phases")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--straggler", type=float, default=10.0, help="times as long as it would take")
    return parser.parse_args()


def main() -> None:
    args = parse()
    init_ray()
    balanced = Times(training_s=args.seconds, generation_s=args.seconds)
    straggling = Times(training_s=args.seconds, generation_s=args.seconds, straggler_factor=args.straggler)
    limit = f"grpo.episode_timeout_s={1.5 * args.seconds}"
    depth = int(args.straggler) + 1
    runs = {
        "synchronous": (balanced, ()),
        "one step off": (balanced, ASYNC),
        "two steps off, weights in flight": (balanced, (*IN_FLIGHT, "grpo.async_grpo.max_trajectory_age_steps=2")),
        "the same with stragglers and a time limit": (
            straggling,
            (*IN_FLIGHT, "grpo.async_grpo.max_trajectory_age_steps=2", limit),
        ),
        f"{depth} steps off, weights in flight, with stragglers and no limit": (
            straggling,
            (*IN_FLIGHT, f"grpo.async_grpo.max_trajectory_age_steps={depth}"),
        ),
    }
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (times, overrides)) in enumerate(runs.items()):
            steps = (f"grpo.max_num_steps={args.steps}",)
            rates[name] = steps_per_hour(Path(folder) / str(number), times, (*steps, *overrides))
            print(f"{name}: {rates[name]:,.0f} steps per hour", flush=True)
    sync, one_off, two_off, limited, deep = rates.values()
    print(f"with one straggler per group, time limit: {limited / two_off:.3f}; deep window: {deep / two_off:.3f}")
    print(f"asynchronous against synchronous: {max(one_off, two_off) / sync:.3f} (one step off {one_off / sync:.3f})")


if __name__ == "__main__":
    main()

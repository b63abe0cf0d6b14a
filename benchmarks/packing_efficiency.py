"""How full packers make their bins and how fast, and how evenly a plan loads data-parallel ranks.

    python benchmarks/packing_efficiency.py [--sequences 100000] [--capacity 8192] [--ranks 8]

Packers: lengths up to the capacity of one bin, the hardest case. Log-normal lengths have a mean of about 0.3 of the
longest, as completions of reasoning models have. Plans: log-normal lengths, bins of `--sequences-per-bin` longest
sequences, work with squared lengths at `--quadratic-weight`; the naive plan gives each rank a contiguous part of the
samples. "Waiting" is the loss of ranks that wait for each other at every micro-batch: the work of the costliest rank,
summed over micro-batches, over the mean. The last line has the best packer on log-normal lengths and the worst packed
plan.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize, PackedTokens, PaddedTokens
from nemo_rl.algorithms.trainers.metrics import measure_packing
from nemo_rl.distributed.packing import PackingAlgorithm, get_packer, sequence_cost
from nemo_rl.types import GroupHandle, SampleMeta, SampleStatus

BEST = PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING
Draw = Callable[[np.random.Generator, int], np.ndarray]


def long_tailed(generator: np.random.Generator, number: int) -> np.ndarray:
    return generator.lognormal(math.log(0.25), 0.6, number)


def uniform(generator: np.random.Generator, number: int) -> np.ndarray:
    return generator.uniform(0, 1, number)


def bimodal(generator: np.random.Generator, number: int) -> np.ndarray:
    is_long = generator.random(number) < 0.2
    return np.where(is_long, generator.normal(0.7, 0.15, number), generator.normal(0.15, 0.05, number))


DISTRIBUTIONS: dict[str, Draw] = {"log-normal": long_tailed, "uniform": uniform, "bimodal": bimodal}


def lengths_of(draw: Draw, number: int, longest: int, seed: int) -> list[int]:
    """Lengths from 1 to `longest`; `draw` gives parts of it."""
    return (draw(np.random.default_rng(seed), number) * longest).astype(int).clip(1, longest).tolist()


def measure_packers(number: int, capacity: int) -> tuple[float, float]:
    """Prints a row for each packer and distribution. Returns fill and seconds of the best one, log-normal lengths."""
    best = (0.0, math.inf)
    print(f"{number} sequences into bins of {capacity} tokens")
    print(f"  {'lengths':<12}{'mean/max':<10}{'algorithm':<32}{'full':>9}{'bound':>9}{'seconds':>9}")
    for name, draw in DISTRIBUTIONS.items():
        lengths = lengths_of(draw, number, capacity, seed=0)
        # No packing has fewer bins: tokens, and sequences of more than half a bin, which cannot share one.
        fewest = max(-(-sum(lengths) // capacity), sum(2 * length > capacity for length in lengths))
        for algorithm in PackingAlgorithm:
            packer = get_packer(algorithm, capacity)
            started = time.perf_counter()
            bins = packer.pack(lengths)
            seconds = time.perf_counter() - started
            fill, bound = (sum(lengths) / (count * capacity) for count in (len(bins), fewest))
            spread = sum(lengths) / len(lengths) / max(lengths)
            print(f"  {name:<12}{spread:<10.2f}{algorithm.value:<32}{fill:>9.2%}{bound:>9.2%}{seconds:>9.3f}")
            if name == "log-normal" and algorithm is BEST:
                best = (fill, seconds)
    return best


def handles(lengths: list[int]) -> list[GroupHandle]:
    samples = [
        SampleMeta(
            sample_id=str(i),
            status=SampleStatus.COMPLETED,
            length=length,
            num_prompt_tokens=1,
            num_generated_tokens=length - 1,
            num_turns=1,
            reward=0.0,
            weight_version=0,
        )
        for i, length in enumerate(lengths)
    ]
    return [GroupHandle(group_id="0", prompt_id="0", task_name="", ref=None, samples=samples)]


def contiguous_imbalance(lengths: list[int], num_ranks: int, quadratic_weight: float) -> float:
    costs = [sequence_cost(length, quadratic_weight=quadratic_weight) for length in lengths]
    work = np.array(costs).reshape(num_ranks, -1).sum(axis=1)
    return float(work.max() / work.mean()) - 1


def measure_plans(
    sizes: list[int], num_ranks: int, capacity: int, sequences_per_bin: int, weight: float, seeds: int
) -> tuple[float, float]:
    """Prints a row for each way and number of samples. Returns the largest imbalance of packed plans, and of naive."""
    tokens = capacity * sequences_per_bin
    packed = PackedTokens(tokens=tokens, algorithm=BEST)
    dynamic = PaddedTokens(tokens=tokens, length_round=64)
    ways = {"packed": packed, "dynamic": dynamic, "fixed": FixedSize(sequences_per_bin)}
    print(
        f"plans over {num_ranks} ranks, log-normal lengths, {seeds} draws; imbalance is the largest over the mean - 1"
    )
    print(f"  {'samples':<9}{'way':<9}{'naive':>9}{'work':>9}{'waiting':>9}{'full':>9}{'batches':>9}{'seconds':>9}")
    worst, worst_naive = 0.0, 0.0
    for number in sizes:
        draws = [lengths_of(long_tailed, number, capacity, seed) for seed in range(seeds)]
        naive = max(contiguous_imbalance(lengths, num_ranks, weight) for lengths in draws)
        for name, rule in ways.items():
            batching = Batching(train=rule, logprobs=rule, quadratic_weight=weight)
            metrics, seconds = [], 0.0
            for lengths in draws:
                groups, zeros = handles(lengths), [[0.0] * number]
                started = time.perf_counter()
                plan = plan_batch(
                    groups, zeros, zeros, num_ranks=num_ranks, global_batch_size=number, batching=batching
                )
                seconds += (time.perf_counter() - started) / seeds
                metrics.append(measure_packing(plan, batching).metrics())
            work, wait = (max(m[f"packing/{key}_imbalance"] for m in metrics) - 1 for key in ("work", "wait"))
            fill, batches = (np.mean([m[f"packing/{key}"] for m in metrics]) for key in ("fill", "num_micro_batches"))
            row = f"{naive:>9.2%}{work:>9.2%}{wait:>9.2%}{fill:>9.2%}{batches:>9.1f}{seconds:>9.3f}"
            print(f"  {number:<9}{name:<9}{row}")
            if name == "packed":
                worst, worst_naive = max(worst, work), max(worst_naive, naive)
    return worst, worst_naive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a bin, and of the longest sequence")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 1024, 2048], help="of one optimizer step")
    parser.add_argument("--sequences-per-bin", type=int, default=2, help="longest sequences that a micro-batch holds")
    parser.add_argument("--quadratic-weight", type=float, default=4e-5, help="of a squared token; 3B parameters")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    if any(number % args.ranks for number in args.samples):
        parser.error(f"--samples must be multiples of --ranks={args.ranks}")
    fill, seconds = measure_packers(args.sequences, args.capacity)
    worst, naive = measure_plans(
        args.samples, args.ranks, args.capacity, args.sequences_per_bin, args.quadratic_weight, args.seeds
    )
    print(
        f"{BEST.value}: {fill:.2%} full in {seconds:.2f} s; imbalance over {args.ranks} ranks at most {worst:.2%} "
        f"(naive split: {naive:.2%})"
    )


if __name__ == "__main__":
    main()

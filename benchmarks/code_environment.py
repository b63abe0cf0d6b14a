"""Samples per second of the code environment, with all limits and isolation mechanisms.

    python benchmarks/code_environment.py [--samples 400] [--workers 2] [--hang 0.02]

Each sample is one conversation whose program reads its input, computes a little and prints; its row has one test. A
fraction `--hang` of the programs never ends and costs its time limit. The last line has the samples per second without
and with hanging programs.
"""

from __future__ import annotations

import argparse
import json
import logging
import time

from nemo_rl.environments.code.environment import CodeEnvironment
from nemo_rl.environments.config import CodeEnvironmentConfig
from nemo_rl.environments.section_parts import SandboxConfig

PROGRAM = """<code>
from collections import Counter
import re
n = int(input())
primes = [p for p in range(2, n) if all(p % q for q in range(2, int(p**0.5) + 1))]
print(sum(primes), Counter(re.sub("[^0-9]", "", str(primes))).most_common(1)[0][1])
</code>"""
EXPECTED = "76127 78"
HANGING = "<code>while True: pass</code>"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hang", type=float, default=0.02, help="part of the programs that never end")
    parser.add_argument("--cpu-limit-s", type=int, default=1)
    return parser.parse_args()


def rate(environment: CodeEnvironment, texts: list[str]) -> tuple[float, float]:
    """(samples per second, mean reward)."""
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]
    started = time.perf_counter()
    result = environment.step(logs, [{"tests": [{"input": "1000", "output": EXPECTED}]} for _ in texts])
    return len(texts) / (time.perf_counter() - started), result.rewards.mean().item()


def main() -> None:
    args = parse()
    logging.basicConfig(
        level=logging.INFO, format="%(message)s"
    )  # the isolation that the sandbox found on this machine
    sandbox = SandboxConfig(cpu_limit_s=args.cpu_limit_s, time_limit_s=2.0 * args.cpu_limit_s, memory_mib=256)
    environment = CodeEnvironment(CodeEnvironmentConfig(num_workers=args.workers, sandbox=sandbox))
    try:
        rate(environment, [PROGRAM] * args.workers)
        clean, reward = rate(environment, [PROGRAM] * args.samples)
        num_hanging = round(args.hang * args.samples)
        texts = [HANGING] * num_hanging + [PROGRAM] * (args.samples - num_hanging)
        mixed, mixed_reward = rate(environment, texts)
    finally:
        environment.shutdown()
    expected = 1 - num_hanging / args.samples
    if reward != 1 or abs(mixed_reward - expected) > 1e-6:
        raise SystemExit(f"rewards of {reward} and {mixed_reward} where 1 and {expected} are right")
    print(json.dumps({"samples_per_s": round(clean, 1), "samples_per_s_with_hanging": round(mixed, 1)}))


if __name__ == "__main__":
    main()

"""Does a change keep every number? Run the CPU configurations before and after it, and compare their metrics.

    python tools/compare_runs.py record /tmp/before                    # in the tree before the change
    python tools/compare_runs.py record /tmp/after                     # in the tree after it
    python tools/compare_runs.py compare /tmp/before /tmp/after        # exit status 1 if a number differs

`record` runs each `examples/configs/**/*_cpu*.yaml` and leaves one folder per configuration. `--only` takes the
names of configurations, `--set` further overrides: `--set max_num_steps=4` shortens every run that has such a key.
`compare` reads `metrics.jsonl` of training runs and `samples.jsonl` of evaluations and compares the values as text, bit
for bit. It leaves out times and metrics that depend on them (`TIMED`).

An asynchronous run depends on the clock when weights change in flight, so `record` switches that off.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.utils.venvs import venv_path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "examples" / "configs"
SCRIPTS = {
    "grpo_sliding_puzzle": "run_grpo_sliding_puzzle.py",
    "grpo": "run_grpo.py",
    "ppo": "run_ppo.py",
    "distillation": "run_distillation.py",
    "sft": "run_sft.py",
    "dpo": "run_dpo.py",
    "rm": "run_rm.py",
    "eval": "run_eval.py",
}
EXTRA_OVERRIDES = {"grpo_math_async_cpu": ["grpo.async_grpo.in_flight_weight_updates=false"]}
# Times, and what a machine's load changes: how many requests share a call, how long something waited, memory in use.
TIMED = re.compile(
    r"^(timing|performance|ray|system)/|_s$|second|time|per_sec|per_second|throughput|memory|utili[sz]ation|mfu|flops|busy"
)
EXACT_PERFORMANCE = {"performance/controller_token_bytes"}


def script_of(name: str) -> Path:
    """The script of a configuration, by the longest prefix of its name."""
    prefix = max((prefix for prefix in SCRIPTS if name.startswith(prefix)), key=len)
    return ROOT / "examples" / SCRIPTS[prefix]


def configurations(only: list[str]) -> dict[str, Path]:
    found = {path.stem: path for path in sorted(CONFIGS.glob("**/*_cpu*.yaml"))}
    unknown = sorted(set(only) - set(found))
    if unknown:
        raise SystemExit(f"error: no configuration {', '.join(unknown)}; there are {', '.join(found)}")
    if not venv_path("sglang", ROOT).is_dir():
        for name in [name for name in found if "sglang" in name and name not in only]:
            print(f"{name}: left out, as SGLang is not installed; a run of it installs SGLang", flush=True)
            del found[name]
    return {name: found[name] for name in only} if only else found


@contextmanager
def environment_server(name: str, folder: Path) -> Iterator[None]:
    """The server that `grpo_remote_cpu.yaml` talks to; nothing for other configurations."""
    if name != "grpo_remote_cpu":
        yield
        return
    command = [sys.executable, str(ROOT / "examples" / "environment_server.py"), "--environment", "math"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--options", "{num_workers: 1}"], stdout=log, stderr=subprocess.STDOUT, env=environment()
        )
    try:
        time.sleep(30)  # it imports the package first, and the run looks for it when it starts
        yield
    finally:
        server.terminate()
        server.wait(timeout=30)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def record(folder: Path, only: list[str], overrides: list[str]) -> int:
    """Run the configurations one after another; returns how many failed."""
    failures = 0
    for name, config in configurations(only).items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(script_of(name)), "--config", str(config), *EXTRA_OVERRIDES.get(name, [])]
        if name.startswith("eval"):
            command.append(f"eval.save_path={target}")
        else:
            command += [f"logger.log_dir={target}/logs", f"checkpointing.checkpoint_dir={target}/checkpoints"]
            command += [f"{section_of(name)}.{override}" for override in overrides]
        start = time.monotonic()
        with environment_server(name, target), (target / "output.log").open("w") as log:
            done = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment(), check=False
            )
        failures += done.returncode != 0
        print(f"{name}: exit status {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    return failures


def section_of(name: str) -> str:
    return name.split("_")[0]


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Lines of metrics or results as text by name, without what is timed."""
    files = sorted([*folder.glob("logs/exp_*/metrics.jsonl"), *folder.glob("samples.jsonl")])
    if not files:
        raise SystemExit(f"error: {folder} holds neither metrics.jsonl nor samples.jsonl: did the run start?")
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()]
    if files[-1].name == "samples.jsonl":  # in the order in which the samples ended
        rows.sort(key=lambda row: (row["prompt_id"], row["sample_index"]))
    return [{key: json.dumps(value) for key, value in row.items() if is_exact(key)} for row in rows]


def is_exact(metric: str) -> bool:
    return metric in EXACT_PERFORMANCE or not TIMED.search(metric)


def compare(before: Path, after: Path) -> int:
    """Print the first differences of each configuration; returns how many configurations differ."""
    names = sorted(path.name for path in before.iterdir() if path.is_dir())
    missing = [name for name in names if not (after / name).is_dir()]
    failures = len(missing)
    for name in missing:
        print(f"{name}: not in {after}")
    for name in [name for name in names if name not in missing]:
        old, new = rows_of(before / name), rows_of(after / name)
        differences = [] if len(old) == len(new) else [f"{len(old)} lines before, {len(new)} after"]
        for number, (left, right) in enumerate(zip(old, new, strict=False), start=1):
            for key in sorted(left.keys() | right.keys()):
                if left.get(key) != right.get(key):
                    differences.append(f"line {number}: {key} {left.get(key)} -> {right.get(key)}")
        num_values = sum(len(row) for row in old)
        verdict = f"{len(differences)} of {num_values} values differ" if differences else f"{num_values} values equal"
        print(f"{name}: {verdict}")
        for difference in differences[:5]:
            print(f"    {difference}")
        failures += bool(differences)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the CPU configurations, and compare the metrics of two trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("record", help="run the configurations of this tree")
    run.add_argument("folder", type=Path, help="where each run leaves its files")
    run.add_argument("--only", nargs="+", default=[], help="names of configurations, such as grpo_math_cpu")
    run.add_argument("--set", nargs="+", default=[], dest="overrides", help="keys of the algorithm's section")
    both = commands.add_parser("compare", help="compare two recorded folders")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        return min(record(args.folder.absolute(), args.only, args.overrides), 1)
    return min(compare(args.before, args.after), 1)


if __name__ == "__main__":
    sys.exit(main())

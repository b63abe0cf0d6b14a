"""Run one rank of a recipe at full size on a machine without a GPU, over the stand-in for CUDA's libraries.

    uv run tools/trace_recipe.py --config examples/configs/recipes/llm/grpo-qwen3-32b-4n8g.yaml --rank 5

No GPU computes: kernels do nothing, and memory, operations and messages are real. See docs/guides/gpu-without-a-gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nemo_rl.config.cli import Parser  # noqa: E402
from nemo_rl.config.loader import load_config  # noqa: E402
from nemo_rl.config.sources import load_tree  # noqa: E402
from nemo_rl.config.terminal import visible  # noqa: E402
from nemo_rl.utils.folders import cache_root  # noqa: E402
from nemo_rl.utils.registry import import_object  # noqa: E402
from tools.config_cli import MODELS as MASTERS  # noqa: E402

GPUS = ("h100", "a100", "b200", "h200")
OTHER_PROCESSES = ("CUDA context", "asleep beside it", "engine's weights", "KV cache")
"""Parts of a prediction that are not in the trace: it is of the training process, as torch's allocator sees it."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="of a run with GPUs")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="its memory and its compute capability")
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("overrides", nargs="*", help="key=value")
    return parser.parse_intermixed_args(argv)


def section_of(path: Path) -> str:
    """The kind of run that a configuration describes: the name of its algorithm's section."""
    found = load_tree(path).values.keys() & MASTERS.keys()
    if len(found) != 1 or found == {"eval"}:
        raise ValueError(f"{path} describes no training run")
    return found.pop()


def standin_environment(gpu: str) -> dict[str, str]:
    lib = os.environ["LIB"]
    names = ("libfakegpu.so", "libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13",
             "libnvidia-ml.so.1", "libnccl.so.2")
    copies = [str(p) for p in [*Path(lib).glob("libcudart.*.so.13"), *Path(lib).glob("libcudart-*.so*")]]
    return {"LD_PRELOAD": " ".join([*(f"{lib}/{n}" for n in names), *copies]), "LD_LIBRARY_PATH": lib}


def trace(config_path: Path, overrides: Sequence[str], *, rank: int, gpu: str) -> dict[str, Any]:
    """Trace one rank in a process of its own."""
    from tools.standin.shapes import MODELS, published
    from tools.standin.trace.folder import disk_bytes, sparse_folder
    from tools.standin.trace.samples import batch_overrides

    section = section_of(config_path)
    master = import_object(MASTERS[section], "model")
    config = load_config(master, config_path, list(overrides))
    size = config.training_cluster.num_workers
    if not 0 <= rank < size:
        raise ValueError(f"--rank {rank}: the training ranks are 0 to {size - 1}")
    models = {"policy": config.policy}
    if hasattr(config, "further_models"):
        models |= {further.key: further.config for further in config.further_models}
    replaced, folders = [], {}
    for key, policy in models.items():
        name = published(policy.model_name)
        folder = cache_root() / "standin" / "models" / name.replace("/", "_")
        folders[name] = sparse_folder(MODELS[name], folder)
        replaced += [f"{key}.model_name={folder}", f"++{key}.tokenizer.name={folder}"]
    steps = [f"++{section}.val_period=0", f"++{section}.max_num_steps=2"]
    steps += [f"++{section}.val_at_start=false", f"++{section}.val_at_end=false"]
    given = [*overrides, *replaced, *batch_overrides(config), *steps, "++checkpointing.enabled=false"]
    with tempfile.TemporaryDirectory() as work:
        task, out = Path(work, "task.json"), Path(work, "out.json")
        asked = {"config": str(config_path), "section": section, "overrides": given, "rank": rank, "out": str(out)}
        task.write_text(json.dumps(asked), encoding="utf-8")
        environment = {**os.environ, **standin_environment(gpu), **(config.policy.backend_cfg.env_vars or {})}
        command = [sys.executable, "-m", "tools.standin.trace.rank", str(task)]
        done = subprocess.run(command, cwd=ROOT, env=environment)
        if done.returncode or not out.exists():
            raise ValueError(f"the process of rank {rank} ended with status {done.returncode}")
        report = json.loads(out.read_text(encoding="utf-8"))
    report["disk"] = sum(disk_bytes(folder) for folder in folders.values())
    return report


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report as it is printed."""
    lines = [f"{'phase':<46}{'CPU s':>7}{'peak':>8}{'reserv.':>8}{'after':>8}{'TFLOP':>9}{'waits':>7}{'h2d':>7}{'d2h':>7}"]
    for name, row in report["phases"].items():
        lines.append(
            f"{name:<46}{row['cpu_s']:>7.1f}{gb(row['peak']):>8}{gb(row['reserved']):>8}{gb(row['after']):>8}"
            f"{row['tflop']:>9.2f}{row['waits']:>7}{gb(row['to_device']):>7}{gb(row['to_host']):>7}"
        )
        for kind, calls in row["collectives"].items():
            lines.append(f"    {kind:<36}{calls:>7} calls {gb(row['collective_bytes'][kind]):>8} GB")
    for phase in report["predicted"]:
        own = {p["name"]: p["num_bytes"] for p in phase["parts"] if p["name"] not in OTHER_PROCESSES}
        lines.append(f"predicted {phase['name']:<20}{gb(sum(own.values())):>8}  {({k: gb(v) for k, v in own.items()})}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        report = trace(arguments.config, arguments.overrides, rank=arguments.rank, gpu=arguments.gpu)
    except (ValueError, OSError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report), encoding="utf-8")
    print("\n".join(lines_of(report)))
    if report["stop"] is not None:
        print(f"STOP rank {report['rank']}: {report['stop']['error']} at {report['stop']['at']}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

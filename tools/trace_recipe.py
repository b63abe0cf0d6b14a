"""Run one rank of a recipe at full size on a machine without a GPU, over the stand-in for CUDA's libraries.

    uv run tools/trace_recipe.py --config examples/configs/recipes/llm/grpo-qwen3-32b-4n8g.yaml --rank 5

No GPU computes: kernels do nothing, and memory, operations and messages are real. See docs/guides/gpu-without-a-gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig  # noqa: E402
from nemo_rl.config.cli import Parser  # noqa: E402
from nemo_rl.config.loader import load_config  # noqa: E402
from nemo_rl.config.sources import load_tree  # noqa: E402
from nemo_rl.config.terminal import visible  # noqa: E402
from nemo_rl.models.policy.memory import CONTEXT_BYTES  # noqa: E402
from nemo_rl.utils.folders import cache_root  # noqa: E402
from nemo_rl.utils.registry import import_object  # noqa: E402
from tools.config_cli import MODELS as MASTERS  # noqa: E402
from tools.standin.build import GPUS, build, environment, site_packages_of_torch  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--config", type=Path, help="of a run with GPUs")
    asked.add_argument("--table", type=Path, nargs="+", metavar="CONFIG", help="print the table of docs/gpu.md of them")
    parser.add_argument("--rank", type=rank_numbers, default=[0], help="whose work is done; 0,2: compared")
    parser.add_argument("--all-ranks", action="store_true", help="of every rank, one after the other, and compare them")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="its memory and its compute capability")
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("overrides", nargs="*", help="key=value")
    given = parser.parse_intermixed_args(argv)
    if given.table and (given.overrides or given.json or given.all_ranks or given.rank != [0]):
        parser.error("--table takes rank 0 of configurations as they are; --config takes the other options")
    return given


def rank_numbers(text: str) -> list[int]:
    """Of the option --rank."""
    parts = text.split(",")
    if not all(map(str.isdecimal, parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks; write 0, or 0,2 for two of them")
    return list(map(int, parts))


def section_of(path: Path) -> str:
    """The kind of run that a configuration describes: the name of its algorithm's section."""
    found = load_tree(path).values.keys() & MASTERS.keys()
    if len(found) != 1 or found == {"eval"}:
        raise ValueError(f"{path} describes no training run")
    return found.pop()


WITHOUT_ENGINE = {
    "transformer_impl": "local",
    "moe_permute_fusion": "false",
    "moe_grouped_gemm": "false",
    "optimizer.use_precision_aware_optimizer": "false",
    "optimizer.optimizer_cpu_offload": "false",
}
"""Keys of `megatron_cfg` where Transformer Engine is not installed."""


@dataclass(frozen=True)
class Recipe:
    """A configuration with small steps, whose models are folders of holes."""

    path: Path
    section: str
    num_ranks: int
    overrides: list[str]
    variables: dict[str, str]  # that the configuration sets for its workers
    compiles: bool
    has_indices: bool  # the host reads integers that are computed on the device
    disk: int  # bytes of the models' folders

    @classmethod
    def prepare(cls, path: Path, overrides: Sequence[str]) -> Recipe:
        """Raises ValueError: it is no training run, or the shape of a model is not known."""
        from nemo_rl.models.policy.vision.families import sees_images
        from tools.standin.shapes import published, shape
        from tools.standin.trace.folder import disk_bytes, sparse_folder
        from tools.standin.trace.samples import batch_overrides

        section = section_of(path)
        config: Any = load_config(import_object(MASTERS[section], "model"), path, list(overrides))
        models = {"policy": config.policy}
        if isinstance(config, RolloutMasterConfig):
            models |= {further.key: further.config for further in config.further_models}
        replaced, folders = [], set()
        is_local = config.policy.megatron_cfg.enabled and importlib.util.find_spec("transformer_engine") is None
        if is_local and config.policy.megatron_cfg.transformer_impl != "local":
            used = {key: policy.megatron_cfg.optimizer for key, policy in models.items() if policy.megatron_cfg.enabled}
            stays = any(optimizer.optimizer_cpu_offload for optimizer in used.values())
            more = ", and its optimizer stays on the GPU" if stays else ""
            print(f"Transformer Engine is not installed: layers are Megatron's own{more}")
            given = [f"++{key}.megatron_cfg.{name}={value}" for key in used for name, value in WITHOUT_ENGINE.items()]
            return cls.prepare(path, [*overrides, *given])
        has_images = False
        for key, policy in models.items():
            name = published(policy.model_name)
            has_images |= sees_images(shape(name))
            folder = sparse_folder(shape(name), cache_root() / "standin" / "models" / name.replace("/", "_"))
            folders.add(folder)
            replaced += [f"{key}.model_name={folder}", f"++{key}.tokenizer.name={folder}"]
            if policy.dtensor_cfg.enabled and policy.dtensor_cfg.cpu_offload:
                # Gradients do not arrive on the host, which computes with whatever lies in their place.
                replaced.append(f"++{key}.nonfinite_action=skip")
        compiles = any(policy.dtensor_cfg.enabled and policy.dtensor_cfg.torch_compile for policy in models.values())
        steps = ["val_period=0", f"max_num_steps={2 + compiles}", "val_at_start=false", "val_at_end=false"]
        return cls(
            path=path,
            section=section,
            num_ranks=config.training_cluster.num_workers,
            overrides=[
                *overrides,
                *replaced,
                *batch_overrides(config),
                *(f"++{section}.{step}" for step in steps),
                "++checkpointing.enabled=false",
            ],
            variables=dict(config.policy.backend_cfg.env_vars or {}),
            compiles=compiles,
            has_indices=has_images or config.policy.megatron_cfg.enabled or section == "distillation",
            disk=sum(disk_bytes(folder) for folder in folders),
        )

    def trace_all(self, gpu: str) -> Iterator[dict[str, Any]]:
        """What each rank did. First all of them start, and each leaves what the others need to know of it."""
        with tempfile.TemporaryDirectory() as folder:
            tasks = [
                self.task(rank, objects=folder, only_starts=only_starts)
                for only_starts in (True, False)
                for rank in range(self.num_ranks)
            ]
            yield from islice(reports(tasks, gpu, self.variables), self.num_ranks, None)

    def task(
        self, rank: int, *, objects: str | None = None, only_starts: bool = False, most_buckets: int | None = None
    ) -> dict[str, Any]:
        """`objects`: see `neighbours.join`. `only_starts`: the rank takes no training step."""
        from tools.standin.trace.index_values import WRITES

        return {
            "config": str(self.path.absolute()),
            "section": self.section,
            "overrides": self.overrides,
            "rank": rank,
            "observed_from": 3 if self.compiles else 0,
            "has_indices": self.has_indices,
            "objects": objects,
            "only_starts": only_starts,
            "most_buckets": most_buckets,
            "writes": WRITES if self.has_indices else 0,
        }


def traces(
    cases: Sequence[tuple[Recipe, int]], gpu: str, *, most_buckets: int | None = None
) -> Iterator[dict[str, Any]]:
    """What one rank of each recipe did, as `tools/standin/trace/rank.py` reports it, as they end.

    Recipes that set the same variables share a process that has imported everything, and each rank has a fork of it.
    `most_buckets`: of the weight sync; None: all of it.
    """
    for _, group in groupby(cases, lambda case: case[0].variables):
        same = list(group)
        tasks = [recipe.task(rank, most_buckets=most_buckets) for recipe, rank in same]
        yield from reports(tasks, gpu, same[0][0].variables)


def reports(tasks: Sequence[Mapping[str, Any]], gpu: str, variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What the ranks of `tasks` did, as they end, one after the other. ValueError where one ends without a report.

    `variables`: those that the configuration sets for its workers.
    """
    standin = build(site_packages_of_torch(), cache_root() / "standin")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.json") for number, _ in enumerate(tasks)]
        for path, task in zip(paths, tasks, strict=True):
            path.write_text(json.dumps(task), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "tools.standin.trace.rank", *map(str, paths)]
        given = environment(standin, gpu=gpu) | dict(variables)
        with subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for path, task in zip(paths, tasks, strict=True):
                for line in process.stdout:
                    if line == f"{path}\n":
                        break
                    sys.stdout.write(line)
                else:
                    raise ValueError(f"the process of rank {task['rank']} ended with status {process.wait()}")
                yield json.loads(path.read_text(encoding="utf-8"))


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def predicted_of(phase: str, predicted: Mapping[str, Mapping[str, float]]) -> Mapping[str, float] | None:
    """The prediction for a worker's call, such as `value train`: of the highest moment that it contains."""
    model, _, method = phase.partition(" ")
    kinds = {"train": ("train", "update"), "pack": ("weight sync",)}
    names = kinds.get(method, ("logprobs",) if method.startswith("compute") else ())
    prefix = "" if model == "policy" else f"{model.replace('teacher-', 'teachers.')} "
    found = [predicted[prefix + name] for name in names if prefix + name in predicted]
    return max(found, key=lambda one: one["peak"], default=None)


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """What a rank did, as it is printed: its last training step, and before the first one."""
    titles = ("CPU s", "peak", "predicted", "reserved", "predicted", "TFLOP", "waits", "to GPU", "to host")
    lines = [f"rank {report['rank']} of {report['world_size']}, {report['gpu']}; GB without the CUDA context"]
    lines.append(f"{'phase':<44}" + "".join(f"{title:>10}" for title in titles))
    if not report["syncs"]:
        lines.append("without weight syncs, which need the tables of all ranks: see --all-ranks")
    last = max((int(key.rpartition("|")[2]) for key in report["phases"]), default=0)
    for key, row in report["phases"].items():
        name, _, step = key.rpartition("|")
        if int(step) not in (0, last):
            continue
        foreseen = predicted_of(name, report["predicted"])
        compiled = report["phases"].get(f"{name}|{int(step) - 1}", row) if report["compiles"] else row
        memory = [n for kind in ("peak", "reserved") for n in (compiled[kind], foreseen[kind] if foreseen else None)]
        cells = [f"{row['cpu_s']:.1f}", *("" if number is None else gb(number) for number in memory)]
        cells += [f"{row['tflop']:.2f}", str(row["waits"]), gb(row["to_device"]), gb(row["to_host"])]
        where = name if int(step) else f"{name} (before the first step)"
        lines.append(f"{where:<44}" + "".join(f"{cell:>10}" for cell in cells))
        for kind, calls in row["collectives"].items():
            lines.append(f"    {kind:<36}{calls:>6} calls{gb(row['collective_bytes'][kind]):>10} GB")
    return lines


def problems_of(report: Mapping[str, Any]) -> list[str]:
    """Why a rank cannot run as it is: it stopped, or has too much memory."""
    found = []
    if (stop := report["stop"]) is not None:
        found.append(f"rank {report['rank']} stopped at {stop['at']}: {stop['error']}")
    reserved = max((row["reserved"] for row in report["phases"].values()), default=0) + CONTEXT_BYTES
    if reserved > report["memory"]:
        found.append(f"rank {report['rank']} needs {gb(reserved)} GB, and its GPU has {gb(report['memory'])} GB")
    return found


ON_A_CPU = {
    ("grpo", "dtensor", False): "grpo_math_cpu",
    ("grpo", "dtensor", True): "grpo_vlm_cpu",
    ("grpo", "megatron", False): "grpo_math_megatron_cpu",
    ("ppo", "dtensor", False): "ppo_math_cpu",
    ("distillation", "dtensor", False): "distillation_math_cpu",
    ("distillation", "megatron", False): "distillation_math_megatron_cpu",
    ("sft", "dtensor", False): "sft_cpu",
    ("sft", "dtensor", True): "sft_vlm_cpu",
    ("sft", "megatron", False): "sft_megatron_cpu",
    ("dpo", "dtensor", False): "dpo_cpu",
    ("dpo", "megatron", False): "dpo_megatron_cpu",
    ("rm", "dtensor", False): "rm_cpu",
}
"""By algorithm, backend, and whether the model sees images: the configuration whose tiny run a CPU has done."""


def kind_of(path: Path) -> tuple[str, str, bool]:
    """The key in `ON_A_CPU` of a configuration whose model `tools/standin/shapes.py` knows."""
    from nemo_rl.models.policy.vision.families import sees_images
    from tools.standin.shapes import published, shape

    section = section_of(path)
    config: Any = load_config(import_object(MASTERS[section], "model"), path, [])
    backend = "megatron" if config.policy.megatron_cfg.enabled else "dtensor"
    return section, backend, sees_images(shape(published(config.policy.model_name)))


FIRST_BUCKETS = 8  # of as many as a thousand, which need the same memory

TABLE = """\
| configuration | on a GPU | over the stand-in | on a CPU | peak | predicted | reserved | predicted |
|---|---|---|---|---|---|---|---|"""


def row_of(path: Path, report: Mapping[str, Any]) -> str:
    """A configuration's row of `TABLE`: GB of the phase that needs most, without the CUDA context."""
    where = f"rank {report['rank']} of {report['world_size']}"
    if report["stop"] is not None:
        where += f", stops: {report['stop']['error'].splitlines()[0][:80]}"
    rows = {key.partition("|")[0]: row for key, row in report["phases"].items()}
    name, row = max(rows.items(), key=lambda item: item[1]["peak"], default=("", {"peak": 0, "reserved": 0}))
    foreseen = predicted_of(name, report["predicted"]) or {"peak": 0.0, "reserved": 0.0}
    cells = [gb(number) for kind in ("peak", "reserved") for number in (row[kind], foreseen[kind])]
    return f"| {path.stem} | no | {where} | {ON_A_CPU[kind_of(path)]} | {' | '.join(cells)} |"


def print_table(paths: Sequence[Path], gpu: str) -> int:
    """Rows of rank 0 of each configuration, with the beginning of its weight sync. 1 if one cannot run as it is."""
    recipes = [Recipe.prepare(path, []) for path in paths]
    recipes.sort(key=lambda recipe: sorted(recipe.variables.items()))  # which share a process
    found = traces([(recipe, 0) for recipe in recipes], gpu, most_buckets=FIRST_BUCKETS)
    print(TABLE)
    problems = []
    for recipe, report in zip(recipes, found, strict=True):
        print(row_of(recipe.path, report), flush=True)
        problems += [f"{recipe.path.stem}: {problem}" for problem in problems_of(report)]
        if not any(key.startswith("policy train") for key in report["phases"]):
            problems.append(f"{recipe.path.stem}: took no training step")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if arguments.table is not None:
            return print_table(arguments.table, arguments.gpu)
        recipe = Recipe.prepare(arguments.config, arguments.overrides)
        if unknown := [rank for rank in arguments.rank if not 0 <= rank < recipe.num_ranks]:
            raise ValueError(f"--rank {unknown[0]}: the training ranks are 0 to {recipe.num_ranks - 1}")
        reports, problems = [], []
        if arguments.all_ranks:
            found = recipe.trace_all(arguments.gpu)
        else:
            found = traces([(recipe, rank) for rank in arguments.rank], arguments.gpu)
        for report in found:
            reports.append(report | {"compiles": recipe.compiles})
            problems += problems_of(reports[-1])
            print("\n".join(lines_of(reports[-1])), flush=True)
    except (ValueError, OSError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    if len(reports) > 1:
        from tools.standin.trace.compare import differences

        messages = {r["rank"]: {tuple(ranks): found for ranks, found in r["messages"]} for r in reports}
        groups = {group for of_rank in messages.values() for group in of_rank}
        calls = sum(len(found) for of_rank in messages.values() for found in of_rank.values())
        different = differences(messages)
        print(f"{len(reports)} ranks, {len(groups)} groups, {calls} calls: {len(different) or 'no'} differences")
        problems += different
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(reports), encoding="utf-8")
    print(f"the models' folders take {recipe.disk / 1e6:.1f} MB of disk; no GPU computed anything")
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "no problem found")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random layouts of published models, traced over the stand-in for CUDA, beside the memory that was predicted for them.

    python tools/standin/layouts.py --seed 7 --number 20

Each layout has two of the ways to divide or save memory, on up to 64 GPUs, and a model of true widths with few layers.
Of a pipeline, the first and the last rank are traced. The exit status is 1 where a rank stops, or where its memory is
further than 15% from the prediction. No GPU computes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nemo_rl.config.errors import ConfigError  # noqa: E402
from nemo_rl.config.loader import load_config  # noqa: E402
from nemo_rl.models.policy.dtensor.checks import check_layout  # noqa: E402
from nemo_rl.utils.registry import import_object  # noqa: E402
from tools.config_cli import MODELS as MASTERS  # noqa: E402
from tools.standin.shapes import shape  # noqa: E402
from tools.trace_recipe import Recipe, predicted_of, problems_of, section_of, traces  # noqa: E402

TOLERANCE = 0.15

DENSE = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
)
EXPERTS = ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "unsloth/DeepSeek-V3-bf16")

FEATURES: dict[str, tuple[str, ...]] = {
    "TP": ("tensor_parallel_size={size}",),
    "SP": ("tensor_parallel_size={size}", "sequence_parallel=true"),
    "CP": ("context_parallel_size={size}",),
    "PP": ("pipeline_parallel_size={size}",),
    "EP": ("expert_parallel_size={wide}",),
    "HSDP": ("dp_replicate_size=2",),
    "offload": ("cpu_offload=true",),
    "full": ("activation_checkpointing=full",),
    "selective": ("activation_checkpointing=selective",),
    "LoRA": ("lora_cfg={{enabled: true, match_all_linear: true, dim: 32}}",),
    "compiled": ("torch_compile=true",),
}
"""Overrides below `policy.dtensor_cfg`."""


@dataclass(frozen=True)
class Layout:
    """A configuration in examples/configs with overrides."""

    config: str
    overrides: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT / "examples" / "configs" / f"{self.config}.yaml"

    def __str__(self) -> str:
        return f"{self.config} {' '.join(self.overrides)}"


def drawn(draw: random.Random) -> Layout:
    """A layout that may be refused."""
    pair = draw.sample(list(FEATURES), 2)
    model = draw.choice(EXPERTS if "EP" in pair else DENSE + EXPERTS)
    layers = draw.choice((4, 6, 8))
    sizes = {"size": draw.choice((2, 4)), "wide": draw.choice((4, 8))}
    length = draw.choice((2048, 4096, 8192))
    keys = [key.format(**sizes) for name in pair for key in FEATURES[name]]
    given = [
        f"policy.model_name={model}@{layers}",
        f"cluster.gpus_per_node={draw.choice((8, 16, 32, 64))}",
        f"policy.max_total_sequence_length={length}",
        f"policy.sequence_packing.train_mb_tokens={length * draw.choice((1, 2))}",
        *dict.fromkeys(f"policy.dtensor_cfg.{key}" for key in keys),
    ]
    config = draw.choice(("sft", "dpo", "grpo_math_8B"))
    if config == "grpo_math_8B":
        # The recipe recomputes, which not every layout should.
        given.insert(0, "policy.dtensor_cfg.activation_checkpointing=false")
        given += [f"data.max_input_seq_length={length // 4}", f"policy.sequence_packing.logprob_mb_tokens={2 * length}"]
    if config == "dpo":
        given[3] = f"policy.sequence_packing.train_mb_tokens={2 * length}"
    return Layout(config, tuple(given))


def random_layouts(seed: int) -> Iterator[Layout]:
    """Layouts that the configuration accepts, and whose model can be divided so. The same of a seed each time."""
    draw = random.Random(seed)
    while True:
        layout = drawn(draw)
        try:
            config: Any = load_config(
                import_object(MASTERS[section_of(layout.path)], "model"), layout.path, list(layout.overrides)
            )
            check_layout(config.policy, shape(config.policy.model_name))
        except (ConfigError, ValueError):
            continue
        yield layout


@dataclass(frozen=True)
class Comparison:
    """Bytes of a phase as a rank had them, beside the prediction for the rank."""

    phase: str
    rank: int
    seen: dict[str, float]
    predicted: dict[str, float]

    @property
    def off(self) -> dict[str, float]:
        """The prediction's deviation from what was seen, relative to this."""
        return {name: self.predicted[name] / self.seen[name] - 1 for name in ("peak", "reserved")}

    def __str__(self) -> str:
        cells = (
            f"{name} {self.seen[name] / 1e9:.2f} predicted {self.predicted[name] / 1e9:.2f} ({self.off[name]:+.0%})"
            for name in ("peak", "reserved")
        )
        return f"rank {self.rank} {self.phase:<8} {', '.join(cells)}"


def compared(report: dict[str, Any]) -> Comparison | None:
    """The phase with the highest peak; None if the rank stopped before it."""
    rows = {key.partition("|")[0]: row for key, row in report["phases"].items() if key.startswith("policy train")}
    if not rows:
        return None
    # A compiled model is observed without it in its last step.
    last = max(int(key.rpartition("|")[2]) for key in report["phases"] if key.startswith("policy train"))
    row = report["phases"][f"policy train|{last - report['compiles']}"]
    predicted = predicted_of("policy train", report["predicted"])
    assert predicted is not None
    return Comparison("train", report["rank"], row, dict(predicted))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--json", type=Path, help="write the reports there, one a line")
    chosen = parser.parse_args(arguments)
    wrong = 0
    cases: list[tuple[int, Layout, Recipe, int]] = []
    for number, layout in zip(range(chosen.number), random_layouts(chosen.seed), strict=False):
        if number < chosen.first:
            continue
        recipe = Recipe.prepare(layout.path, layout.overrides)
        is_pipeline = any("pipeline_parallel_size" in key for key in layout.overrides)
        cases += [(number, layout, recipe, rank) for rank in (0, recipe.num_ranks - 1)[: 1 + is_pipeline]]
    traced = traces([(recipe, rank) for _, _, recipe, rank in cases], "h200")
    for (number, layout, recipe, _), report in zip(cases, traced, strict=True):
        found = compared(report | {"compiles": recipe.compiles})
        problems = problems_of(report)
        is_off = found is None or any(abs(off) > TOLERANCE for off in found.off.values())
        wrong += bool(problems) or is_off
        lines = [f"{number}: {layout}", f"{found}{'  OFF' if is_off else ''}", *problems]
        print("\n    ".join(lines), flush=True)
        if chosen.json is not None:
            with chosen.json.open("a", encoding="utf-8") as file:
                told = {"config": layout.config, "overrides": layout.overrides, "compiles": recipe.compiles}
                file.write(json.dumps(report | told) + "\n")
    print(f"{wrong} beyond {TOLERANCE:.0%}; no GPU computed anything")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

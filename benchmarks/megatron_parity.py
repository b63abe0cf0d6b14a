"""Logprobs and one optimizer step of Megatron against the PyTorch backend on one rank, in every layout of few ranks.

    python benchmarks/megatron_parity.py [--ranks 1 2 4] [--models deep qwen2-tied qwen3-moe]

Ranks are processes of one gloo world on the CPU, all in float32, one step of plain gradient descent with rate 0.1 over
16 samples in micro-batches of another kind for every layout. A layout is tensor (with sequence), pipeline, virtual
pipeline, context, expert and expert-tensor parallelism; the rest of the ranks are data-parallel. One line per layout:
the largest absolute difference of any logprob and of any weight after the step. The last line is the worst of all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from nemo_rl.models.policy.config import DynamicBatchingConfig, SequencePackingConfig
from tests.unit.policy.megatron.parity import Layout, distances, steps_in_one_world, torch_step
from tests.unit.policy.models import save_model

LAYERS = {"deep": 4, "qwen2-tied": 2, "qwen3-moe": 2}
SHORT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
BATCHINGS: list[dict[str, Any]] = [
    {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=48, logprob_mb_tokens=80)},
    {"train_micro_batch_size": 1, "logprob_batch_size": 1},
    {
        "dynamic_batching": DynamicBatchingConfig(
            enabled=True, train_mb_tokens=72, logprob_mb_tokens=96, sequence_length_round=8
        )
    },
    {"train_micro_batch_size": 8},
]
ONE_STEP = {"train_global_batch_size": 16}


def cuts(model: str, world: int) -> Iterator[dict[str, int]]:
    """Sizes above 1 of every layout of `world` ranks that divides the model."""
    powers = (1, 2, 4)
    for tensor, stages, pieces, context in product(powers, powers, (1, 2), powers):
        if world % (tensor * stages * context) or LAYERS[model] % (stages * pieces) or (pieces > 1 and stages == 1):
            continue
        for experts, expert_tensor in product(powers, powers) if model == "qwen3-moe" else [(1, 1)]:
            if (world // stages) % (experts * expert_tensor) == 0:
                sizes = zip(SHORT, (tensor, stages, pieces, context, experts, expert_tensor), strict=True)
                yield {key: size for key, size in sizes if size > 1}


def layouts(model: str, world: int) -> list[Layout]:
    """With micro-batches of every kind in turn."""
    found = []
    for number, sizes in enumerate(cuts(model, world)):
        sequence = {"sequence_parallel": True} if "tensor_model_parallel_size" in sizes else {}
        batching = BATCHINGS[number % len(BATCHINGS)]
        found.append(Layout(world=world, megatron=sizes | sequence, policy=ONE_STEP, batching=batching))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=[1, 2, 4], default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    args = parser.parse_args()
    worst_logprob = worst_weight = 0.0
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            path = Path(folder) / model
            save_model(model, path)
            want = torch_step(path, Layout(world=1, policy=ONE_STEP))
            for world in args.ranks:
                cases = layouts(model, world)
                for layout, ranks in zip(cases, steps_in_one_world(path, cases, timeout=600), strict=True):
                    found = distances(ranks, want)
                    sizes = " ".join(f"{SHORT[key]}={size}" for key, size in layout.megatron.items() if key in SHORT)
                    print(
                        f"{model:<10} ranks={world} {sizes or 'data-parallel alone':<32} "
                        f"logprobs {found.logprobs:.1e} weights {found.weights:.1e}",
                        flush=True,
                    )
                    worst_logprob = max(worst_logprob, found.logprobs)
                    worst_weight = max(worst_weight, found.weights)
                    count += 1
    print(f"worst of {count} layouts: logprobs {worst_logprob:.1e}, weights {worst_weight:.1e} (limit 1e-5)")


if __name__ == "__main__":
    main()

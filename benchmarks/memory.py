"""Predicted memory of training against measured resident memory, on the CPU: four model shapes in three layouts.

    python benchmarks/memory.py                # all of them
    python benchmarks/memory.py wide 2-fsdp    # one shape, one layout

Each rank takes two optimizer steps of one micro-batch. Measured is the peak of a rank's resident memory over the value
before the model was built, and predicted the largest of its phases: the libraries are in both or in neither.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, OptimizerConfig, PolicyConfig, TokenizerConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.memory import Machine, ModelShape, training_phases
from nemo_rl.models.policy.settings import PolicyWorkerSettings
from nemo_rl.types import PlannedSample, RankPlan, RolloutGroup, Sample, SampleMeta, SampleStatus, SamplingParams
from tests.worlds import run_world

LENGTH = 512
SAMPLES = 4  # of a rank, one micro-batch
SHAPES: dict[str, Any] = {
    "deep": (LlamaConfig, {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 16}, (6, 2)),
    "wide": (Qwen2Config, {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}, (16, 4)),
    "vocabulary": (
        Qwen2Config,
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 65536},
        (8, 2),
    ),
    "even": (
        Qwen3Config,
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64},
        (12, 4),
    ),
}
LAYOUTS = {
    "1": (1, {}),
    "2-fsdp": (2, {}),
    "2-tensor": (2, {"tensor_parallel_size": 2}),
}


def model_config(shape: str) -> PretrainedConfig:
    kind, changes, (heads, key_values) = SHAPES[shape]
    fixed = {"vocab_size": 8192, "max_position_embeddings": 2 * LENGTH, "tie_word_embeddings": False}
    return kind(**{**fixed, **changes}, num_attention_heads=heads, num_key_value_heads=key_values)


def policy_config(layout: str, num_ranks: int) -> PolicyConfig:
    return PolicyConfig(
        model_name="unused",
        tokenizer=TokenizerConfig(name="unused"),
        train_global_batch_size=SAMPLES * (1 if "tensor" in layout else num_ranks),
        train_micro_batch_size=SAMPLES,
        logprob_batch_size=SAMPLES,
        max_total_sequence_length=LENGTH,
        precision="float32",
        optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-5}),
        dtensor_cfg=DTensorConfig(**LAYOUTS[layout][1]),
    )


def samples(vocab_size: int) -> RolloutGroup:
    generator = np.random.default_rng(0)
    found = []
    for number in range(SAMPLES):
        meta = SampleMeta(
            sample_id=str(number),
            status=SampleStatus.COMPLETED,
            length=LENGTH,
            num_prompt_tokens=LENGTH // 4,
            num_generated_tokens=LENGTH - LENGTH // 4,
            num_turns=1,
            reward=1.0,
            weight_version=0,
        )
        found.append(
            Sample(
                meta=meta,
                token_ids=generator.integers(2, vocab_size, LENGTH),
                token_mask=np.arange(LENGTH) >= LENGTH // 4,
                generation_logprobs=np.full(LENGTH, -4.0, dtype=np.float32),
            )
        )
    return RolloutGroup(group_id="0", prompt_id="0", samples=found)


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def peak_of_rank(rank: int, world: int, path: str, layout: str) -> tuple[int, float]:
    """(peak over the start, the part of it that is there at rest) in bytes."""
    torch.ones(64, 64) @ torch.ones(64, 64)  # the libraries' own buffers
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    start = status("VmRSS")
    settings = PolicyWorkerSettings(
        model_path=path,
        sampling=SamplingParams(max_new_tokens=1),
        use_gpu=False,
        workers_per_node=world,
        init_reference_model=False,
        init_optimizer=True,
        seed=0,
    )
    worker = DTensorPolicyWorker(policy_config(layout, world), settings)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: files are read while loading
    planned = [
        PlannedSample(group=0, index=number, lengths=(LENGTH,), advantage=1.0, mask=1.0) for number in range(SAMPLES)
    ]
    group = samples(worker.parts[0].config.vocab_size)
    loss = ClippedPGLoss(ClippedPGLossConfig())
    for _ in range(2):
        worker.load(RankPlan(train=[[planned]], logprobs=[planned]), {0: (0, 0)}, [group])
        worker.train(loss, Logprobs())
    return status("VmHWM") - start, status("VmRSS") - start


def predicted(shape: str, layout: str) -> float:
    """Bytes of the largest phase of a rank."""
    num_ranks = LAYOUTS[layout][0]
    policy = policy_config(layout, num_ranks)
    machine = Machine(is_gpu=False, memory=float(host_memory() // num_ranks))
    model = ModelShape.of(model_config(shape))
    phases = training_phases(policy, model, machine, num_ranks=num_ranks)
    for name, parts in phases.items() if VERBOSE else ():
        sys.stdout.write(f"  {name}: " + ", ".join(f"{p.name} {p.num_bytes / 1e6:.0f}" for p in parts) + "\n")
    return max(sum(part.num_bytes for part in phases[name]) for name in ("train", "update"))


def host_memory() -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )


VERBOSE = False


def compare(shape: str, layout: str) -> tuple[float, float]:
    """(predicted, measured) bytes of the first rank."""
    with tempfile.TemporaryDirectory() as path:
        AutoModelForCausalLM.from_config(model_config(shape)).save_pretrained(path)
        measured = run_world(peak_of_rank, LAYOUTS[layout][0], path, layout, timeout=600)
    return predicted(shape, layout), float(max(peak for peak, _ in measured))


def main(argv: list[str]) -> Iterator[str]:
    wanted_shapes = [shape for shape in SHAPES if shape in argv] or list(SHAPES)
    wanted_layouts = [layout for layout in LAYOUTS if layout in argv] or list(LAYOUTS)
    yield f"{'shape':<12}{'layout':<10}{'predicted':>11}{'measured':>11}{'ratio':>8}"
    for shape, layout in product(wanted_shapes, wanted_layouts):
        guess, peak = compare(shape, layout)
        yield f"{shape:<12}{layout:<10}{guess / 1e6:>8.0f} MB{peak / 1e6:>8.0f} MB{guess / peak:>8.2f}"


if __name__ == "__main__":
    VERBOSE = "-v" in sys.argv
    for line in main(sys.argv[1:]):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

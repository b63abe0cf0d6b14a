"""Peak memory of a logprob pass: Megatron's worker over the PyTorch backend's, of the same model and tokens.

    python benchmarks/megatron_logprob_memory.py [--vocabulary 65536] [--tokens 4096] [--hidden 256] [--layers 4]

Each side runs in its own process, one rank on the CPU in float32. Memory is the peak of the resident set beyond its
size before the pass, with the model loaded; a short pass before it allocates the buffers that stay. The last line is
the ratio of the peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig, TokenizerConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker
from nemo_rl.models.policy.worker import PolicyWorkerSettings
from nemo_rl.types import SamplingParams

SIDES = ("pytorch", "megatron")
SEQUENCES = 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=4096, help="of the one micro-batch, in 4 sequences")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def save_model(args: argparse.Namespace, path: str) -> None:
    """A random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.tokens,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


def worker_of(args: argparse.Namespace) -> Any:
    """A worker of `args.side` for logprobs only."""
    backends: dict[str, Any] = {"dtensor_cfg": DTensorConfig(), "padding_free": True}
    if args.side == "megatron":
        backends = {"dtensor_cfg": DTensorConfig(enabled=False), "megatron_cfg": MegatronConfig(enabled=True)}
    config = PolicyConfig(
        model_name=args.model,
        tokenizer=TokenizerConfig(name=args.model),
        precision="float32",
        train_global_batch_size=SEQUENCES,
        logprob_batch_size=SEQUENCES,
        max_total_sequence_length=args.tokens,
        **backends,
    )
    settings = PolicyWorkerSettings(
        model_path=args.model,
        sampling=SamplingParams(max_new_tokens=args.tokens),
        use_gpu=False,
        workers_per_node=1,
        init_reference_model=False,
        init_optimizer=False,
        seed=0,
    )
    return (MegatronPolicyWorker if args.side == "megatron" else DTensorPolicyWorker)(config, settings)


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def scored(worker: Any, lengths: list[int], vocabulary: int) -> torch.Tensor:
    """Logprobs [B, S] of random tokens."""
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocabulary, (length,), generator=random) for length in lengths]
    batch = worker.layout.build([(row, torch.ones(len(row), dtype=torch.bool)) for row in ids], {})
    (values,) = worker.runner.forward([batch], Logprobs())
    return values


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Peak bytes beyond the loaded model, seconds, and the mean logprob."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        worker = worker_of(args)
        torch.set_num_threads(args.threads)
        scored(worker, [8] * SEQUENCES, args.vocabulary)
        Path("/proc/self/clear_refs").write_text("5")
        before, started = status("VmRSS"), time.perf_counter()
        values = scored(worker, [args.tokens // SEQUENCES] * SEQUENCES, args.vocabulary)
        seconds = time.perf_counter() - started
        return {"peak": status("VmHWM") - before, "seconds": seconds, "logprob": values[:, 1:].mean().item()}


def main() -> None:
    args = parse()
    if args.side is not None:
        sys.stdout.write(json.dumps(measure(args)) + "\n")
        return
    # With a fixed threshold, freed memory returns to the system immediately and does not count as memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(args, folder)
        for side in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--model", folder]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            found[side] = json.loads(out.splitlines()[-1])
            print(
                f"{side:<9} peak {found[side]['peak'] / 2**20:7.1f} MiB, {found[side]['seconds']:6.2f} s, "
                f"mean logprob {found[side]['logprob']:.6f}",
                flush=True,
            )
    logits = args.tokens * args.vocabulary * 4 / 2**20
    print(f"float32 logits of all tokens would be {logits:.0f} MiB")
    print(f"peak memory ratio, megatron over pytorch: {found['megatron']['peak'] / found['pytorch']['peak']:.3f}")


if __name__ == "__main__":
    main()

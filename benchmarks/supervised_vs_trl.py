"""Tokens per second of SFT against TRL's SFTTrainer, or pairs per second of DPO against its DPOTrainer, in one run.

Same random Qwen2 model in float32, rows, tokens of a micro-batch, rows of an optimizer step, optimizer and threads;
SFT packs on both sides. Both are whole training runs, ours from the command line with Ray; a step is timed from end to
end, data included. Start-up and the first steps are left out on both sides. Prints the ratio on the last line.

    uv run --extra cpu --group bench benchmarks/supervised_vs_trl.py sft
    uv run --extra cpu --group bench benchmarks/supervised_vs_trl.py dpo --hidden 128 --vocab 2048
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_WARMUP_STEPS = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=["sft", "dpo"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--median-length", type=int, default=160, help="bytes of a text, which are tokens here")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=4, help="of an optimizer step")
    parser.add_argument("--steps", type=int, default=12, help="counted steps, after the first three")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=["both", "trl"], default="both", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


MAX_LENGTH = 1024


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """The model, and rows of random text: half of a conversation is the prompt, lengths are log-normal."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from nemo_rl.data.tiny_model import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 128),
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)

    def text() -> str:
        length = min(MAX_LENGTH // 2 - 8, max(8, round(rng.lognormvariate(0, 0.6) * args.median_length)))
        return "".join(rng.choices("abcdefgh ", k=length))

    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(rows_per_step(args) * (args.steps + NUM_WARMUP_STEPS) * 2):
            prompt, chosen, rejected = ([{"role": role, "content": text()}] for role in ("user", *["assistant"] * 2))
            row = {"prompt": prompt, "completion": chosen} if args.algorithm == "sft" else {}
            row |= {"messages": prompt + chosen} if args.algorithm == "sft" else {}
            row |= {} if args.algorithm == "sft" else {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")


def rows_per_step(args: argparse.Namespace) -> int:
    """As many as fill the micro-batches of a step, or a little fewer."""
    tokens = args.micro_batch_tokens * args.micro_batches
    mean_text = 1.2 * args.median_length  # of a log-normal with deviation 0.6
    per_row = 2 * mean_text if args.algorithm == "sft" else 4 * mean_text
    return max(args.micro_batches, round(tokens / per_row) // args.micro_batches * args.micro_batches)


def run_ours(args: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    """(tokens or pairs, seconds) of each counted step, from the run's own metrics.jsonl."""
    name = args.algorithm
    command = [
        sys.executable,
        str(ROOT / "examples" / f"run_{name}.py"),
        "--config",
        str(ROOT / "examples" / "configs" / f"{name}_cpu.yaml"),
        f"policy.model_name={folder / 'model'}",
        "data.train.dataset_name=null",
        f"++data.train.data_path={folder / 'rows.jsonl'}",
        f"{name}.max_num_steps={args.steps + NUM_WARMUP_STEPS}",
        f"{name}.val_period=0",
        f"{name}.val_at_start=false",
        "checkpointing.enabled=false",
        f"policy.train_global_batch_size={rows_per_step(args)}",
        f"policy.max_total_sequence_length={MAX_LENGTH}",
        f"policy.sequence_packing.train_mb_tokens={args.micro_batch_tokens}",
        f"policy.sequence_packing.logprob_mb_tokens={args.micro_batch_tokens}",
        "policy.train_micro_batch_size=1",
        "data.cache_tokens=false",
        f"logger.log_dir={folder}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"our run ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    (metrics,) = folder.glob("exp_*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    count = {"sft": lambda row: row["train/total_num_tokens"], "dpo": lambda row: rows_per_step(args)}[name]
    return [(count(row), row["timing/train/total_step_time"]) for row in rows[NUM_WARMUP_STEPS:]]


def run_trl(args: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    """Run one side in its own process, so that neither side warms the other's caches."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--side", "trl", "--folder", str(folder)]
    out = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return [tuple(pair) for pair in json.loads(out.splitlines()[-1])]


def trl_main(args: argparse.Namespace) -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    rows = load_dataset("json", data_files=str(args.folder / "rows.jsonl"), split="train")
    seconds: list[float] = []
    total_tokens: list[float] = []

    class Clock(TrainerCallback):
        last = 0.0

        def on_step_end(self, *_: object, **__: object) -> None:
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            if "num_tokens" in logs:
                total_tokens.append(logs["num_tokens"])

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": args.steps + NUM_WARMUP_STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    made: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [Clock()]}
    if args.algorithm == "sft":
        settings = SFTConfig(
            **common,
            packing=True,
            max_length=args.micro_batch_tokens,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=args.micro_batches,
        )
        SFTTrainer(args=settings, train_dataset=rows.remove_columns("messages"), **made).train()
        counts = [b - a for a, b in zip([0.0, *total_tokens], total_tokens, strict=False)]
    else:
        settings = DPOConfig(
            **common,
            max_length=MAX_LENGTH,
            per_device_train_batch_size=rows_per_step(args) // args.micro_batches,
            gradient_accumulation_steps=args.micro_batches,
        )
        DPOTrainer(args=settings, train_dataset=rows, **made).train()
        counts = [float(rows_per_step(args))] * len(seconds)
    pairs = list(zip(counts, seconds, strict=False))[NUM_WARMUP_STEPS:]
    sys.stdout.write("\n" + json.dumps(pairs) + "\n")


def report(name: str, unit: str, pairs: list[tuple[float, float]]) -> float:
    rates = [count / duration for count, duration in pairs]
    median = statistics.median(rates)
    step = statistics.median(duration for _, duration in pairs)
    size = statistics.median(count for count, _ in pairs)
    sys.stdout.write(
        f"{name:<6} median {median:9,.1f} {unit}/s (min {min(rates):,.1f}, max {max(rates):,.1f}), "
        f"step of {size:,.0f} {unit} {step:.3f} s, {len(pairs)} steps\n"
    )
    return median


def main() -> None:
    args = parse()
    if args.side == "trl":
        trl_main(args)
        return
    unit = {"sft": "tokens", "dpo": "pairs"}[args.algorithm]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(args, folder)
        trl = report("TRL", unit, run_trl(args, folder))
        ours = report("ours", unit, run_ours(args, folder))
    sys.stdout.write(f"ratio ours / TRL: {ours / trl:.2f}\n")


if __name__ == "__main__":
    main()

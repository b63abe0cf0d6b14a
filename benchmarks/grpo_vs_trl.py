"""Completion tokens per second of a whole GRPO step, against TRL's GRPOTrainer, in one run.

Both sides have the same model, prompts, samples per step, micro-batch, completion limit, optimizer and threads, verify
answers and update the weights. They run in turn `--repeats` times; start-up and the first steps are not counted. Prints
the rates of each pair, and the median of the paired ratios on the last line.

    uv run --extra cpu --group bench benchmarks/grpo_vs_trl.py [OPTIONS]

    (none)                                                                          trained, 4 tokens
    --untrained --max-new-tokens 64                                                 0.36M parameters, 64 tokens
    --hidden 512 --layers 8 --prompts 8 --max-new-tokens 192                        18M parameters, 192 tokens
    --hidden 512 --layers 8 --prompts 8 --max-new-tokens 1024 --mean-tokens 128     a long tail
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_WARMUP_STEPS = 2
ENGINE_MEMORY = 0.4  # of a GPU, on both sides


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="counted steps, after the first two")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="our training ranks and engines, one thread each")
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="small, so that lengths stay the same")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="the tiny model before its warm-up: it hardly ever stops, so completions reach the limit",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: vLLM on both sides, bfloat16")
    parser.add_argument("--hidden", type=int, help="an untrained model of this width")
    parser.add_argument("--layers", type=int, default=2, help="layers of an untrained model")
    parser.add_argument(
        "--mean-tokens", type=int, help="an untrained model that ends with probability 1 / MEAN_TOKENS at each token"
    )
    parser.add_argument("--side", choices=["both", "trl"], default="both", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a folder; default: the tiny model")
    return parser.parse_args()


def model_directory(args: argparse.Namespace, folder: Path) -> str:
    """The model both sides load."""
    from nemo_rl.data.tiny_model import RECIPES, build_tiny_tokenizer, build_untrained_model, resolve_model

    if args.model is not None:
        return args.model
    if not args.untrained and args.hidden is None and args.mean_tokens is None:
        return str(resolve_model("tiny:arithmetic"))
    tokenizer = build_tiny_tokenizer()
    recipe = replace(RECIPES["arithmetic"], hidden_size=args.hidden or 128, num_layers=args.layers)
    model = build_untrained_model(recipe, tokenizer)
    if args.mean_tokens is not None:
        model = with_end_bias(model, args.mean_tokens)
    path = folder / "untrained"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def devices_of(args: argparse.Namespace) -> list[str]:
    """Our keys for the devices, and for micro-batches on them."""
    if args.device == "cpu":
        return [
            f"cluster.cpu_workers_per_node={args.workers}",
            f"policy.train_micro_batch_size={args.micro_batch // args.workers}",
        ]
    return [
        "cluster.gpus_per_node=1",
        "policy.precision=bfloat16",
        f"policy.train_micro_batch_size={args.micro_batch}",
        "+policy.sequence_packing={enabled: true, train_mb_tokens: 8192}",
        f"policy.generation.vllm_cfg.gpu_memory_utilization={ENGINE_MEMORY}",
        "policy.generation.vllm_cfg.enforce_eager=false",
    ]


def with_end_bias(model: Any, mean_tokens: int) -> Any:
    """The untrained `model` with another head, in which the end token has probability 1 / `mean_tokens` everywhere.

    The head has no bias. The first hidden dimension takes its place: the embedding writes the same number for each
    token, no layer writes to it, and only the end token's row of the head reads it.
    """
    import torch

    config, embedding = model.config, model.model.embed_tokens.weight
    config.tie_word_embeddings = False
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    with torch.no_grad():
        embedding[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head.weight.normal_(std=0.1 / config.hidden_size**0.5)
        head.weight[:, 0] = 0.0
        hidden = model.model(torch.arange(config.vocab_size)[None]).last_hidden_state[0, :, 0].mean()
        head.weight[config.eos_token_id] = 0.0
        head.weight[config.eos_token_id, 0] = math.log((config.vocab_size - 1) / (mean_tokens - 1)) / hidden
    model.lm_head = head
    return model


def run_ours(args: argparse.Namespace, folder: Path, model: str) -> list[tuple[float, float]]:
    """(completion tokens, seconds) of each counted step, from the run's own metrics.jsonl."""
    command = [
        sys.executable,
        str(ROOT / "examples" / "run_grpo_math.py"),
        "--config",
        str(ROOT / "examples" / "configs" / "grpo_math_cpu.yaml"),
        f"policy.model_name={model}",
        *devices_of(args),
        f"grpo.num_prompts_per_step={args.prompts}",
        f"grpo.num_generations_per_prompt={args.generations}",
        f"grpo.max_num_steps={args.steps + NUM_WARMUP_STEPS}",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        f"policy.train_global_batch_size={args.prompts * args.generations}",
        f"policy.generation.max_new_tokens={args.max_new_tokens}",
        f"policy.max_total_sequence_length={args.max_new_tokens + 48}",
        f"policy.optimizer.kwargs.lr={args.learning_rate}",
        "checkpointing.enabled=false",
        f"logger.log_dir={folder}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (metrics,) = folder.glob("exp_*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    samples = args.prompts * args.generations
    return [
        (row["train/mean_gen_tokens_per_sample"] * samples, row["timing/train/total_step_time"])
        for row in rows[NUM_WARMUP_STEPS:]
    ]


def run_trl(args: argparse.Namespace, model: str) -> list[tuple[float, float]]:
    """Run one side in its own process, so that neither side warms the other's caches."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--side", "trl", "--model", model]
    out = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return [tuple(pair) for pair in json.loads(out.splitlines()[-1])]


def trl_main(args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from math_verify import parse as parse_answer
    from math_verify import verify
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    path = args.model
    tokenizer = AutoTokenizer.from_pretrained(path)
    samples = args.prompts * args.generations
    problems = [(a, b) for a in range(30) for b in range(30)]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in problems]
    )
    tokens: list[float] = []
    seconds: list[float] = []

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [
            float(verify(parse_answer(a), parse_answer(c[0]["content"], parsing_timeout=None), timeout_seconds=None))
            for c, a in zip(completions, answer, strict=True)
        ]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - self.started)

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            if "completions/mean_length" in logs:
                tokens.append(logs["completions/mean_length"] * samples)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=args.device == "cpu",
        bf16=args.device == "cuda",
        use_vllm=args.device == "cuda",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=ENGINE_MEMORY,
        vllm_enable_sleep_mode=args.device == "cuda",
        vllm_max_model_length=args.max_new_tokens + 48,
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=samples // args.micro_batch,
        num_generations=args.generations,
        max_completion_length=args.max_new_tokens,
        max_steps=args.steps + NUM_WARMUP_STEPS,
        learning_rate=args.learning_rate,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    pairs = list(zip(tokens, seconds, strict=False))[NUM_WARMUP_STEPS:]
    sys.stdout.write("\n" + json.dumps(pairs) + "\n")


def rate(name: str, pairs: list[tuple[float, float]]) -> float:
    median = statistics.median(count / duration for count, duration in pairs)
    step, count = (statistics.median(values) for values in zip(*[pair[::-1] for pair in pairs], strict=True))
    sys.stdout.write(f"{name:<5} {median:9,.0f} completion tokens/s, step {step:6.3f} s of {count:,.0f} tokens\n")
    sys.stdout.flush()
    return median


def main() -> None:
    args = parse()
    if args.side == "trl":
        trl_main(args)
        return
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(args, Path(folder))
        for number in range(args.repeats):
            ours = rate("ours", run_ours(args, Path(folder) / f"{number}", model))
            ratios.append(ours / rate("TRL", run_trl(args, model)))
            sys.stdout.write(f"ratio {ratios[-1]:.2f}\n")
    sys.stdout.write(f"ratio ours / TRL, median of {len(ratios)}: {statistics.median(ratios):.2f}\n")


if __name__ == "__main__":
    main()

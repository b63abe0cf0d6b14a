"""Completion tokens per second of a whole GRPO step, against TRL's GRPOTrainer, in one run.

Both sides have the same model, prompts, samples per step, micro-batch, completion limit, optimizer and threads, verify
answers and update the weights. A micro-batch of TRL is `--micro-batch` padded rows; ours is packed, with the tokens of
as many rows of the greatest length. Both sides run in turn `--repeats` times; start-up and the first steps are not
counted. Prints for each run the tokens per second and the seconds of processor time of a step, of all its processes;
with `--processes` also that of each process of ours. On the last lines are the medians of the paired ratios, by the
clock and by processor time. On a machine that others use too, the second counts, with `--threads 1`: TRL's threads spin
while they wait.

With `--model` it also prints `ours / limit`, by phase: our seconds over those of the matrix products of the step alone,
each at the rate that this run measures for its number of rows, in as many processes of one thread as we have workers.
Generation: each prompt once, and each engine an equal share of the samples that have not ended. Training and logprobs:
the tokens that are packed, the head for sampled tokens alone, no backward pass for samples that teach nothing.

    uv run --extra cpu --group bench benchmarks/grpo_vs_trl.py [OPTIONS]

    (none)                                                                          trained, 4 tokens
    --untrained --max-new-tokens 64                                                 0.36M parameters, 64 tokens
    --hidden 512 --layers 8 --prompts 8 --max-new-tokens 192                        18M parameters, 192 tokens
    --hidden 512 --layers 8 --prompts 8 --max-new-tokens 1024 --mean-tokens 128     a long tail
    --model FOLDER --prompts 8 --max-new-tokens 96 --micro-batch 16 --steps 3 --warmup 2    a pretrained model
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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processor_time import MIN_CPU_S, Process, processes, spent  # noqa: E402
from nemo_rl.distributed.worker_template import HOST_ENVIRONMENT  # noqa: E402

POLL_S = 0.02
PHASES = ("generation", "policy_and_reference_logprobs", "policy_training", "weight_sync")
PRODUCT_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
MAX_PRODUCT_ROWS = PRODUCT_ROWS[-1]
PRODUCT_REPEATS = 3
ENGINE_MEMORY = 0.4  # of a GPU, on both sides


@dataclass(frozen=True)
class Run:
    """The counted steps of one side."""

    steps: list[tuple[float, float]]  # (completion tokens, seconds by the clock)
    cpu_s: float  # of one step, in all processes
    by_process: dict[str, float]  # the same by command, if it was asked for
    phases: dict[str, float] = field(default_factory=dict)  # seconds of a step by phase
    limits: dict[str, float] = field(default_factory=dict)  # of its matrix products alone

    def tokens_per_s(self) -> float:
        return statistics.median(tokens / seconds for tokens, seconds in self.steps)

    def tokens_per_cpu_s(self) -> float:
        return statistics.mean(tokens for tokens, _ in self.steps) / self.cpu_s


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="counted steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the counted ones")
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
    parser.add_argument("--processes", action="store_true", help="print the processor time of each process of ours")
    parser.add_argument("--side", choices=["both", "ours", "TRL"], default="both", help="run one side alone")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a folder; default: the tiny model")
    return parser.parse_args()


def model_directory(args: argparse.Namespace, folder: Path) -> str:
    """The model both sides load."""
    from nemo_rl.data.model_folder import resolve_model
    from nemo_rl.data.tiny_model import RECIPES, build_tiny_tokenizer, build_untrained_model

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
        "policy.sequence_packing={enabled: true, train_mb_tokens: 8192}",
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


CONFIG = ROOT / "examples" / "configs" / "grpo_math_cpu.yaml"


def overrides_of(args: argparse.Namespace, folder: Path, model: str) -> list[str]:
    """Our keys of the run, on top of CONFIG."""
    return [
        f"policy.model_name={model}",
        *devices_of(args),
        f"grpo.num_prompts_per_step={args.prompts}",
        f"grpo.num_generations_per_prompt={args.generations}",
        # One more than is counted: the processes have to be there when their time is read.
        f"grpo.max_num_steps={args.warmup + args.steps + 1}",
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


def run_ours(args: argparse.Namespace, folder: Path, model: str) -> Run:
    """The counted steps of a run of this library, from its metrics.jsonl."""
    script = ROOT / "examples" / "run_grpo_math.py"
    command = [sys.executable, str(script), "--config", str(CONFIG), *overrides_of(args, folder, model)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        before = at_step(run, folder, args.warmup)
        after = at_step(run, folder, args.warmup + args.steps)
        if run.wait() != 0:
            sys.exit(f"the run failed with status {run.returncode}: {' '.join(command)}")
    (metrics,) = folder.glob("exp_*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    samples = args.prompts * args.generations
    counted = rows[args.warmup : args.warmup + args.steps]
    by_process = {number: cpu_s / args.steps for number, cpu_s in spent(before, after).items()}
    return Run(
        [(row["train/mean_gen_tokens_per_sample"] * samples, row["timing/train/total_step_time"]) for row in counted],
        cpu_s=sum(by_process.values()),
        by_process={f"{number} {after[number].command}": cpu_s for number, cpu_s in by_process.items()}
        if args.processes
        else {},
        phases={phase: statistics.mean(row.get(f"timing/train/{phase}", 0.0) for row in counted) for phase in PHASES},
        limits={} if args.model is None else limits_of(args, model, counted, groups_of(folder, counted)),
    )


def groups_of(folder: Path, counted: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The groups of each counted step, as the report keeps them, with the sampled tokens of each sample."""
    steps = {int(row["step"]) for row in counted}
    (data,) = folder.glob("exp_*/report_data")
    pages = (
        json.loads(file.read_text().split(", ", 1)[1].rstrip(" );\n")) for file in sorted(data.glob("groups_*.js"))
    )
    return [step["groups"] for page in pages for step in page if step["step"] in steps]


def limits_of(
    args: argparse.Namespace, model: str, counted: list[dict[str, Any]], steps: list[list[dict[str, Any]]]
) -> dict[str, float]:
    """Seconds of a step's matrix products by phase, the mean of the counted steps."""
    layers, head = product_seconds(model, args.workers)
    totals = dict.fromkeys(PHASES, 0.0)
    for row, groups in zip(counted, steps, strict=True):
        lengths = [length for group in groups for length in group["lengths"]]
        shared = row.get("train/packing/shared_prompt_tokens", 0.0)
        packed, sampled = row["train/total_num_tokens"] - shared, sum(lengths)
        prompts = packed - sampled
        rows = MAX_PRODUCT_ROWS
        forward = (packed * layers(rows) + sampled * head(rows)) / rows / args.workers
        totals["generation"] += prompts * layers(rows) / rows / args.workers
        for number in range(max(lengths)):
            alive = -(-sum(length > number for length in lengths) // args.workers)
            totals["generation"] += layers(alive) + head(alive)
        # The backward pass takes twice the products of the forward pass. Samples that teach nothing have none.
        totals["policy_training"] += forward * (3 - 2 * row["train/packing/forward_only_share"])
        if "timing/train/policy_and_reference_logprobs" in row:
            totals["policy_and_reference_logprobs"] += forward
    return {phase: total / len(counted) for phase, total in totals.items()}


def product_seconds(model: str, num_processes: int) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Seconds of one pass of a number of rows through all layers, and through the head, by number of rows.

    Measured in `num_processes` processes at once, the slowest counts; linear between the measured numbers.
    """
    code = "import sys; from benchmarks.grpo_vs_trl import measure_products; measure_products(sys.argv[1])"
    environment = {**os.environ, **HOST_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, model]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(num_processes)]
    measured = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    worst = {
        part: [max(column) for column in zip(*(one[part] for one in measured), strict=True)] for part in measured[0]
    }
    return tuple(partial(np.interp, xp=PRODUCT_ROWS, fp=worst[part]) for part in ("layers", "head"))


def measure_products(model: str) -> None:
    """Print the seconds of the products of all layers and of the head for each of `PRODUCT_ROWS`, on one thread."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shapes: dict[str, list[tuple[int, int]]] = {"layers": [], "head": []}
    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):
            shapes["head" if "lm_head" in name else "layers"].append((module.out_features, module.in_features))
    seconds: dict[str, list[float]] = {}
    for part, sizes in shapes.items():
        weights = [torch.randn(size) for size in sizes]
        packed = [torch.ops.mkl._mkl_reorder_linear_weight(weight, 64) for weight in weights]
        seconds[part] = []
        for rows in PRODUCT_ROWS:
            states = {size: torch.randn(rows, size) for _, size in sizes}
            best = math.inf
            for _ in range(PRODUCT_REPEATS):
                for is_packed in (False, True):
                    started = time.perf_counter()
                    for weight, other in zip(weights, packed, strict=True):
                        x = states[weight.shape[1]]
                        if is_packed:
                            torch.ops.mkl._mkl_linear(x, other, weight, None, rows)
                        else:
                            torch.nn.functional.linear(x, weight)
                    best = min(best, time.perf_counter() - started)
            seconds[part].append(best)
    sys.stdout.write("\n" + json.dumps(seconds) + "\n")


def at_step(run: subprocess.Popen, folder: Path, number: int) -> dict[int, Process]:
    """The processes of `run` as soon as it has logged step `number`."""
    while sum(file.read_bytes().count(b"\n") for file in folder.glob("exp_*/metrics.jsonl")) < number:
        if run.poll() is not None:
            sys.exit(f"the run ended with status {run.returncode} before step {number}")
        time.sleep(POLL_S)
    return processes(run.pid)


def run_trl(args: argparse.Namespace, _folder: Path, model: str) -> Run:
    """Run one side in its own process, so that neither side warms the other's caches."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--child", "--model", model]
    out = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    steps, cpu_s = json.loads(out.splitlines()[-1])
    return Run([tuple(step) for step in steps], cpu_s, {})


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
    cpu_seconds: list[float] = []

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [
            float(verify(parse_answer(a), parse_answer(c[0]["content"], parsing_timeout=None), timeout_seconds=None))
            for c, a in zip(completions, answer, strict=True)
        ]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started, self.started_cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - self.started)
            cpu_seconds.append(time.process_time() - self.started_cpu)

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
        max_steps=args.steps + args.warmup,
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
    pairs = list(zip(tokens, seconds, strict=False))[args.warmup :]
    sys.stdout.write("\n" + json.dumps([pairs, statistics.mean(cpu_seconds[args.warmup :])]) + "\n")


def report(name: str, run: Run) -> None:
    """Print the medians of a run's steps, and the processes if their times are known."""
    step, count = (statistics.median(values) for values in zip(*[pair[::-1] for pair in run.steps], strict=True))
    sys.stdout.write(
        f"{name:<5} {run.tokens_per_s():9,.0f} completion tokens/s, step {step:6.3f} s of {count:,.0f} tokens, "
        f"processors {run.cpu_s:6.3f} s\n"
    )
    for command, cpu_s in sorted(run.by_process.items(), key=lambda item: -item[1]):
        if cpu_s * len(run.steps) >= MIN_CPU_S:
            sys.stdout.write(f"{cpu_s:9.3f} s  {command[:90]}\n")
    if run.limits:
        whole = statistics.mean(seconds for _, seconds in run.steps)
        seconds = {**run.phases, "step": whole}
        limits = {**run.limits, "step": sum(run.limits.values())}
        for phase, limit in limits.items():
            ratio = f"{seconds[phase] / limit:.2f}" if limit > 0 else "-"
            sys.stdout.write(f"  {phase:<30} {seconds[phase]:7.1f} s, limit {limit:6.1f} s, ours / limit {ratio}\n")
    sys.stdout.flush()


def main() -> None:
    args = parse()
    if args.child:
        trl_main(args)
        return
    sides = {"ours": run_ours, "TRL": run_trl}
    if args.side != "both":
        sides = {args.side: sides[args.side]}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(args, Path(folder))
        for number in range(args.repeats):
            for name, side in sides.items():
                runs[name].append(side(args, Path(folder) / f"{number}", model))
                report(name, runs[name][-1])
    if len(sides) < 2:
        return
    pairs = list(zip(*runs.values(), strict=True))
    by_cpu = [ours.tokens_per_cpu_s() / trl.tokens_per_cpu_s() for ours, trl in pairs]
    by_clock = [ours.tokens_per_s() / trl.tokens_per_s() for ours, trl in pairs]
    for name, ratios in (("by processor time", by_cpu), ("by the clock", by_clock)):
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        sys.stdout.write(f"ratio ours / TRL {name}, median of {each}: {statistics.median(ratios):.2f}\n")


if __name__ == "__main__":
    main()

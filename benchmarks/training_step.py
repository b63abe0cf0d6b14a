"""Seconds of a training step of the policy worker, against the same step written by hand, and packed against padded.

`--compare loop`: the worker against a plain PyTorch loop over the same model, batch and loss in the same process, steps
taken by turns; with `--ranks 2` both are FSDP2 over gloo. Every sequence has the greatest length, so that both compute
the same tokens. Prints worker / loop.

`--compare padding`: the worker with sequence packing against the worker with every row padded to the longest sequence
of the step, lengths log-normal. Prints tokens per second packed / padded, and against padding of micro-batches that
were sorted by length.

`--compare prompts`: the worker, in which the samples of a group compute their prompt once, against the same worker and
plan where each computes it. Prints seconds shared / not shared.

`--compare backends`: the worker of Megatron Core against that of PyTorch, rows end to end on both, every sequence of
the greatest length, steps taken by turns in one process. Then each alone, for the memory of its ranks: the peak of the
resident set in a step, after one step, beyond what it was before the worker was made - weights, gradients, optimizer
state and activations. Prints megatron / pytorch of both.

    uv run --extra cpu benchmarks/training_step.py --compare loop --ranks 1
    uv run --extra cpu benchmarks/training_step.py --compare padding
    uv run --extra cpu benchmarks/training_step.py --compare prompts --prompt-tokens 128 --group 8
    uv run --extra cpu --extra mcore benchmarks/training_step.py --compare backends --ranks 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.batch import plan_batch
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.models.policy.config import (
    DTensorConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronOptimizerConfig
from nemo_rl.models.policy.worker import PolicyWorkerSettings
from nemo_rl.types import (
    BatchPlan,
    GroupHandle,
    RankPlan,
    RolloutGroup,
    Sample,
    SampleMeta,
    SampleStatus,
    SamplingParams,
)

if TYPE_CHECKING:
    from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

    PolicyWorker = DTensorPolicyWorker | MegatronPolicyWorker

BACKENDS = ("megatron", "pytorch")
LEARNING_RATE = 1e-5
LOSS = ClippedPGLossConfig(reference_policy_kl_penalty=0.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", choices=["loop", "padding", "prompts", "backends"], required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="per rank; default: all cores shared out")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=64, help="per step, over all ranks")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=1, help="of each sequence")
    parser.add_argument("--group", type=int, default=1, help="samples of a prompt")
    parser.add_argument("--mean-over-max", type=float, default=0.3, help="of the log-normal lengths")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of the greatest length")
    parser.add_argument("--steps", type=int, default=7, help="counted steps of each side")
    return parser.parse_args()


def make_model(args: argparse.Namespace, path: Path) -> None:
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128),
        max_position_embeddings=args.max_length,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)


def lengths_of(args: argparse.Namespace) -> np.ndarray:
    """All of the greatest length, or log-normal (sigma 1) with the wanted mean, cut at the greatest length."""
    if args.compare != "padding":
        return np.full(args.samples, args.max_length)
    draw = np.random.default_rng(0).lognormal(0.0, 1.0, args.samples)
    low, high = 0.0, float(args.max_length)
    for _ in range(60):
        scale = (low + high) / 2
        mean = np.clip(draw * scale, 4, args.max_length).mean()
        low, high = (scale, high) if mean < args.mean_over_max * args.max_length else (low, scale)
    lengths = np.clip(draw * low, 4, args.max_length).astype(int)
    lengths[0] = args.max_length
    return lengths


def make_groups(args: argparse.Namespace) -> tuple[list[GroupHandle], list[RolloutGroup]]:
    generator = np.random.default_rng(1)
    lengths = lengths_of(args)
    handles, groups = [], []
    for number, own in enumerate(lengths[start : start + args.group] for start in range(0, len(lengths), args.group)):
        prompt = generator.integers(0, args.vocab, args.prompt_tokens)
        samples = [make_sample(f"{number}/{i}", prompt, int(n), generator, args.vocab) for i, n in enumerate(own)]
        groups.append(RolloutGroup(group_id=str(number), prompt_id="p", samples=samples))
        metas = [sample.meta for sample in samples]
        handles.append(GroupHandle(group_id=str(number), prompt_id="p", task_name="t", ref=number, samples=metas))
    return handles, groups


def make_sample(name: str, prompt: np.ndarray, length: int, generator: np.random.Generator, vocab: int) -> Sample:
    answer = generator.integers(0, vocab, length - len(prompt))
    mask = np.arange(length) >= len(prompt)
    return Sample(
        meta=SampleMeta(
            sample_id=name,
            status=SampleStatus.COMPLETED,
            length=length,
            num_prompt_tokens=len(prompt),
            num_generated_tokens=len(answer),
            num_turns=1,
            reward=0.0,
            weight_version=0,
        ),
        token_ids=np.concatenate([prompt, answer]),
        token_mask=mask,
        generation_logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
    )


def make_worker(args: argparse.Namespace, path: Path, **changes: object) -> DTensorPolicyWorker:
    worker = DTensorPolicyWorker(*arguments_of(args, path, **changes))
    torch.set_num_threads(args.threads)
    return worker


def make_backend(args: argparse.Namespace, path: Path, backend: str) -> PolicyWorker:
    """A worker of `pytorch` or `megatron`, with Adam of the same settings and rows without padding."""
    if backend == "pytorch":
        return DTensorPolicyWorker(*arguments_of(args, path, padding_free=True))
    from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

    optimizer = MegatronOptimizerConfig(lr=LEARNING_RATE)
    sections = {
        "dtensor_cfg": DTensorConfig(enabled=False),
        "megatron_cfg": MegatronConfig(enabled=True, optimizer=optimizer),
        "optimizer": None,
    }
    return MegatronPolicyWorker(*arguments_of(args, path, **sections))


def arguments_of(args: argparse.Namespace, path: Path, **changes: object) -> tuple[PolicyConfig, PolicyWorkerSettings]:
    settings = {
        "model_name": str(path),
        "tokenizer": TokenizerConfig(name=str(path)),
        "train_global_batch_size": args.samples,
        "train_micro_batch_size": args.micro_batch,
        "logprob_batch_size": args.micro_batch,
        "max_total_sequence_length": args.max_length,
        "precision": "float32",
        "optimizer": OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": LEARNING_RATE}),
    }
    return (
        PolicyConfig(**(settings | changes)),  # type: ignore[arg-type]
        PolicyWorkerSettings(
            model_path=str(path),
            sampling=SamplingParams(max_new_tokens=16),
            use_gpu=False,
            workers_per_node=args.ranks,
            init_reference_model=False,
            init_optimizer=True,
            seed=0,
        ),
    )


def sorted_plan(args: argparse.Namespace, worker: DTensorPolicyWorker, handles: list[GroupHandle]) -> BatchPlan:
    ones = [[1.0] * len(handle.samples) for handle in handles]
    weight = ModelFlops.of(worker.stages[0].hf.config).quadratic_weight
    batching = Batching.of(worker.config, quadratic_weight=weight, shares_prompts=worker.layout.shares_prompts)
    return plan_batch(handles, ones, ones, num_ranks=args.ranks, global_batch_size=args.samples, batching=batching)


def even_plan(args: argparse.Namespace, handles: list[GroupHandle]) -> BatchPlan:
    """A plan for samples of one length, for any worker."""
    ones = [[1.0] * len(handle.samples) for handle in handles]
    config, _ = arguments_of(args, Path("model"), padding_free=True)
    return plan_batch(
        handles,
        ones,
        ones,
        num_ranks=args.ranks,
        global_batch_size=args.samples,
        batching=Batching.of(config, quadratic_weight=0.0),
    )


def arrival_plan(args: argparse.Namespace, handles: list[GroupHandle], plan: BatchPlan) -> BatchPlan:
    """The same samples in micro-batches as they came."""
    by_group = {s.group: s for rank in plan.ranks for batch in rank.logprobs for s in batch}
    each = len(handles) // args.ranks
    ranks = []
    for rank in range(args.ranks):
        mine = [by_group[number] for number in range(rank * each, (rank + 1) * each)]
        batches = [mine[i : i + args.micro_batch] for i in range(0, each, args.micro_batch)]
        ranks.append(RankPlan(train=[batches], logprobs=batches))
    return BatchPlan(groups=plan.groups, ranks=ranks)


def worker_step(worker: PolicyWorker, plan: BatchPlan, groups: list[RolloutGroup]) -> Callable[[], float]:
    loss = ClippedPGLoss(LOSS)

    def step() -> float:
        worker.load(plan.ranks[worker.mesh.data_rank], {n: (0, n) for n in range(len(groups))}, groups)
        return worker.train(loss, Logprobs()).losses[0]

    return step


def hand_written_step(args: argparse.Namespace, path: Path, plan: RankPlan, groups: list[RolloutGroup]) -> Callable:
    """The step that one would write in a script: forward, log-softmax, clipped loss, backward, clip, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    if args.ranks > 1:
        mesh = init_device_mesh("cpu", (args.ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows = [np.stack([groups[s.group].samples[s.index].token_ids for s in batch]) for batch in plan.train[0]]
    batches = [torch.from_numpy(row) for row in rows]
    num_tokens = args.samples * (args.max_length - 1)

    def step() -> float:
        total = 0.0
        for number, ids in enumerate(batches):
            if args.ranks > 1:
                model.set_requires_gradient_sync(number == len(batches) - 1)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            surrogate = torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum()
            loss = -surrogate / num_tokens * args.ranks  # FSDP averages over ranks
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def peak_of(args: argparse.Namespace, folder: Path, backend: str) -> int:
    """Bytes of this rank in its second step, beyond those before it had a worker."""
    if backend == "megatron":  # what it imports is not the model's
        from nemo_rl.models.policy.megatron.worker import cpu_shim

        cpu_shim.install()
    handles, groups = make_groups(args)
    before = status("VmRSS")
    worker = make_backend(args, folder / "model", backend)
    plan = even_plan(args, handles)
    step = worker_step(worker, plan, groups)
    step()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return status("VmHWM") - before


def by_turns(args: argparse.Namespace, sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of `args.steps` steps of each side, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.steps + 1):
        for name, step in sides.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def join_world(rank: int, args: argparse.Namespace, folder: Path, name: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(folder / name), args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)


def run_memory_rank(rank: int, args: argparse.Namespace, folder: Path, backend: str) -> None:
    join_world(rank, args, folder, backend)
    peaks = [0] * args.ranks
    dist.all_gather_object(peaks, peak_of(args, folder, backend))
    if rank == 0:
        (folder / f"{backend}.json").write_text(json.dumps(max(peaks)))
    dist.barrier()
    dist.destroy_process_group()


def compare_memory(args: argparse.Namespace, folder: Path) -> None:
    # A fixed threshold: what is freed goes back to the system at once, and does not count as memory in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    peaks = {}
    for backend in BACKENDS:
        mp.start_processes(run_memory_rank, args=(args, folder, backend), nprocs=args.ranks, start_method="spawn")
        peaks[backend] = json.loads((folder / f"{backend}.json").read_text())
        print(f"{backend:<22} {peaks[backend] / 2**20:8.1f} MiB per rank")
    first, second = BACKENDS
    print(f"ratio of memory {first} / {second}: {peaks[first] / peaks[second]:.3f}")


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    join_world(rank, args, folder, "rendezvous")
    path = folder / "model"
    handles, groups = make_groups(args)
    if args.compare == "backends":
        plan = even_plan(args, handles)
        workers = {backend: make_backend(args, path, backend) for backend in BACKENDS}
        torch.set_num_threads(args.threads)
        seconds = by_turns(args, {name: worker_step(worker, plan, groups) for name, worker in workers.items()})
    elif args.compare == "loop":
        worker = make_worker(args, path)
        plan = sorted_plan(args, worker, handles)
        ours = worker_step(worker, plan, groups)
        seconds = by_turns(args, {"worker": ours, "loop": hand_written_step(args, path, plan.ranks[rank], groups)})
    elif args.compare == "prompts":
        shared, whole = make_worker(args, path), make_worker(args, path)
        whole.layout = replace(whole.layout, shares_prompts=False)
        plan = sorted_plan(args, shared, handles)
        sides = {"shared": worker_step(shared, plan, groups), "not shared": worker_step(whole, plan, groups)}
        seconds = by_turns(args, sides)
    else:
        packing = SequencePackingConfig(enabled=True)
        packed, padded = make_worker(args, path, sequence_packing=packing), make_worker(args, path, padding_free=False)
        padded_to_longest = make_worker(
            args, path, padding_free=False, make_sequence_length_divisible_by=args.max_length
        )
        plan = sorted_plan(args, padded, handles)
        seconds = by_turns(
            args,
            {
                "packed": worker_step(packed, sorted_plan(args, packed, handles), groups),
                "padded to the longest": worker_step(padded_to_longest, arrival_plan(args, handles, plan), groups),
                "sorted, padded": worker_step(padded, plan, groups),
            },
        )
    if rank == 0:
        report(args, seconds, num_tokens=sum(sample.length for handle in handles for sample in handle.samples))
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, seconds: dict[str, list[float]], num_tokens: int) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(
            f"{name:<22} {medians[name] * 1e3:8.1f} ms per step (min {min(values) * 1e3:.1f}, max "
            f"{max(values) * 1e3:.1f}), {num_tokens / medians[name]:,.0f} tokens/s"
        )
    first, *others = medians
    for other in others:
        if args.compare != "padding":
            print(f"ratio {first} / {other}: {medians[first] / medians[other]:.3f}")
        else:
            print(f"ratio of tokens per second {first} / {other}: {medians[other] / medians[first]:.2f}")


def main() -> None:
    args = parse()
    args.threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        make_model(args, Path(folder) / "model")
        mp.start_processes(run_rank, args=(args, Path(folder)), nprocs=args.ranks, start_method="spawn")
        if args.compare == "backends":
            compare_memory(args, Path(folder))


if __name__ == "__main__":
    main()

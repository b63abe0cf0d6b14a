"""Peak memory and time of distillation's terms over two distributions, against materialised float32 logits.

    python benchmarks/distillation_memory.py [--tokens 2048] [--vocabulary 151936] [--hidden 1024] [--device cpu]

`topk`: logprobs of the teacher's 64 largest tokens and the entropy, of the student. `kl`: forward and reverse KL of the
whole distributions of student and teacher. Forward and backward, gradients of the student's states and head included.
The other side of each makes the logits [tokens, vocabulary] and takes `log_softmax`. Each side runs in its own
process. Its memory is the peak of the resident set (of the CUDA allocator on a GPU) beyond states and heads. The last
line has the two ratios of peaks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from nemo_rl.models.policy.head.linear import linear_kl, linear_topk_logprobs
from nemo_rl.models.policy.head.logit_tiles import TILE_BYTES, OutputHead

WAYS = ("tiles", "materialised")
KINDS = ("topk", "kl")


def whole(weight: torch.Tensor, tile_bytes: int) -> OutputHead:
    return OutputHead(weight=weight, vocab_size=len(weight), tile_bytes=tile_bytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024, help="of the student")
    parser.add_argument("--teacher-hidden", type=int, default=2048)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of states and heads")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tile-mib", type=float, default=TILE_BYTES / 2**20)
    parser.add_argument("--side", choices=[f"{kind}-{way}" for kind in KINDS for way in WAYS], help=argparse.SUPPRESS)
    return parser.parse_args()


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def values_of(
    args: argparse.Namespace, student: list[torch.Tensor], teacher: list[torch.Tensor], indices: torch.Tensor
) -> torch.Tensor:
    """The mean over tokens, computed as `args.side` does. A side is [states, weight]."""
    kind, _, way = args.side.partition("-")
    tile_bytes = int(args.tile_mib * 2**20)
    if way == "tiles":
        head = whole(student[1], tile_bytes)
        if kind == "topk":
            values = linear_topk_logprobs(student[0], head, indices)
        else:
            other = whole(teacher[1], tile_bytes)
            values = linear_kl(student[0], head, teacher[0], other, vocab_size=len(student[1]))
    else:
        log_p = (student[0] @ student[1].t()).float().log_softmax(dim=-1)
        if kind == "topk":
            values = log_p.gather(-1, indices), -(log_p.exp() * log_p).sum(-1)
        else:
            log_q = (teacher[0] @ teacher[1].t()).float().log_softmax(dim=-1)
            values = (log_q.exp() * (log_q - log_p)).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
    return values[0].mean() + values[1].mean()


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Peak bytes beyond the inputs, seconds, and two numbers in which both sides must agree."""
    torch.set_num_threads(args.threads)
    random = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)

    def side(hidden: int) -> list[torch.Tensor]:
        states = torch.randn(args.tokens, hidden, generator=random).to(args.device, dtype)
        weight = torch.randn(args.vocabulary, hidden, generator=random).mul_(hidden**-0.5)
        return [states, weight.to(args.device, dtype)]

    student = [tensor.requires_grad_() for tensor in side(args.hidden)]
    teacher = side(args.teacher_hidden) if args.side.startswith("kl") else []
    indices = torch.randint(0, args.vocabulary, (args.tokens, args.k), generator=random).to(args.device)
    # Buffers of the matrix library and the threads' stacks belong to neither side.
    values_of(
        args, [tensor[:64] for tensor in student], [tensor[:64] for tensor in teacher], indices[:64] % 64
    ).backward()
    for tensor in student:
        tensor.grad = None
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
    started, cpu_started = time.perf_counter(), time.process_time()
    value = values_of(args, student, teacher, indices)
    value.backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    peak = (torch.cuda.max_memory_allocated() if on_gpu else status("VmHWM")) - before
    norms = [tensor.grad.float().norm().item() for tensor in student if tensor.grad is not None]
    return {
        "peak": peak,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "value": value.item(),
        "gradient": 1000 * sum(norms),
    }


def main() -> None:
    args = parse()
    if args.side is not None:
        sys.stdout.write(json.dumps(measure(args)) + "\n")
        return
    ratios = {}
    for kind in KINDS:
        found = {}
        for way in WAYS:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", f"{kind}-{way}"]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[way] = json.loads(out.splitlines()[-1])
            print(
                f"{kind:<4} {way:<13} peak {found[way]['peak'] / 2**30:6.2f} GiB, {found[way]['seconds']:7.2f} s "
                f"({found[way]['cpu_seconds']:.2f} s of CPU), value {found[way]['value']:.6f}, "
                f"1000 x gradient norm {found[way]['gradient']:.5f}",
                flush=True,
            )
        tiles, whole = (found[way] for way in WAYS)
        cpu_ratio = tiles["cpu_seconds"] / whole["cpu_seconds"]
        print(f"{kind:<4} time ratio: {tiles['seconds'] / whole['seconds']:.2f} (of CPU time: {cpu_ratio:.2f})")
        ratios[kind] = tiles["peak"] / whole["peak"]
    print("peak memory ratio: " + ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items()))


if __name__ == "__main__":
    main()

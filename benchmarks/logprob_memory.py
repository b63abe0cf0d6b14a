"""Peak memory and time of logprobs and their backward, against materialised float32 logits.

    python benchmarks/logprob_memory.py [--tokens 8192] [--vocabulary 151936] [--hidden 1024] [--device cpu]

Both sides get the same hidden states and head, and return logprobs and the gradients of both. The other side is
`log_softmax(logits.float()).gather(target)`. Each side runs in its own process. Its memory is the peak of the resident
set (of the CUDA allocator on a GPU) beyond states and head. The last line is the ratio of the peaks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from nemo_rl.models.policy.head.linear import linear_logprobs
from nemo_rl.models.policy.head.logit_tiles import TILE_BYTES, OutputHead

SIDES = ("tiles", "materialised")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of states and head")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tile-mib", type=float, default=TILE_BYTES / 2**20)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def logprobs_of(
    args: argparse.Namespace, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Logprobs [N], computed as `args.side` does."""
    if args.side == "tiles":
        head = OutputHead(weight=weight, vocab_size=len(weight), tile_bytes=int(args.tile_mib * 2**20))
        return linear_logprobs(states, head, targets)
    return (states @ weight.t()).float().log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Peak bytes beyond the inputs, seconds, and two sums in which both sides must agree."""
    torch.set_num_threads(args.threads)
    random = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    states = torch.randn(args.tokens, args.hidden, generator=random).to(args.device, dtype).requires_grad_()
    weight = torch.randn(args.vocabulary, args.hidden, generator=random).mul_(args.hidden**-0.5)
    weight = weight.to(args.device, dtype).requires_grad_()
    targets = torch.randint(0, args.vocabulary, (args.tokens,), generator=random).to(args.device)
    # Buffers of the matrix library and the threads' stacks belong to neither side.
    logprobs_of(args, states[:8], weight[:64], targets[:8] % 64).sum().backward()
    states.grad = weight.grad = None
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
    started, cpu_started = time.perf_counter(), time.process_time()
    logprobs = logprobs_of(args, states, weight, targets)
    logprobs.sum().backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    peak = (torch.cuda.max_memory_allocated() if on_gpu else status("VmHWM")) - before
    assert states.grad is not None and weight.grad is not None
    return {
        "peak": peak,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "logprob": logprobs.mean().item(),
        "gradient": states.grad.float().norm().item() + weight.grad.float().norm().item(),
    }


def main() -> None:
    args = parse()
    if args.side is not None:
        sys.stdout.write(json.dumps(measure(args)) + "\n")
        return
    found = {}
    for side in SIDES:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[side] = json.loads(out.splitlines()[-1])
        print(
            f"{side:<13} peak {found[side]['peak'] / 2**30:6.2f} GiB, {found[side]['seconds']:7.2f} s "
            f"({found[side]['cpu_seconds']:.2f} s of CPU), mean logprob {found[side]['logprob']:.6f}, "
            f"gradient norm {found[side]['gradient']:.5f}",
            flush=True,
        )
    tiles, whole = (found[side] for side in SIDES)
    cpu_ratio = tiles["cpu_seconds"] / whole["cpu_seconds"]
    print(f"time ratio: {tiles['seconds'] / whole['seconds']:.2f} (of CPU time: {cpu_ratio:.2f})")
    print(f"peak memory ratio: {tiles['peak'] / whole['peak']:.3f}")


if __name__ == "__main__":
    main()

"""How close a refit by collective comes to the bandwidth of its transport.

    python benchmarks/refit_collective.py [--gib 0.25 1.0] [--receivers 1] [--rounds 9]

One process sends and `--receivers` others receive, in one process group of gloo over loopback, all in the environment
of the workers (`HOST_ENVIRONMENT`). Measured in turns, in
the same processes and with the same group: a plain broadcast of the same number of bytes in buffers of the size of a
bucket, two on their way at a time; and a whole sync: each bucket gathered from its tensors, fingerprinted, broadcast,
checked and copied into the tensors of the receivers. The ratio is the fastest of the first over the fastest of the
second.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.refit_bandwidth import model_shapes
from nemo_rl.distributed.worker_template import HOST_ENVIRONMENT
from nemo_rl.refit.buffers import TransferBuffer, attach_buffer
from nemo_rl.refit.layout import NUM_HALVES, PackLayout, Rendezvous, Segment, exported
from nemo_rl.refit.sync import OPEN_BUCKETS
from nemo_rl.refit.transfer import WeightReceiver, WeightSender

CPU = torch.device("cpu")
TARGET = 0.70


class Broadcasts:
    """The buffer of one member, for plain broadcasts."""

    def __init__(self, buffer: TransferBuffer, layout: PackLayout) -> None:
        self.buffer = buffer
        self.layout = layout

    def send(self) -> None:
        for bucket in range(len(self.layout.buckets)):
            self.buffer.wait(bucket % NUM_HALVES)
            self.buffer.start(bucket % NUM_HALVES, self.layout.used_bytes(bucket))
        for half in range(NUM_HALVES):
            self.buffer.wait(half)

    def receive(self) -> None:
        for bucket in range(len(self.layout.buckets)):
            self.buffer.wait(bucket % NUM_HALVES)
            self.buffer.start(bucket % NUM_HALVES, self.layout.used_bytes(bucket))
        for half in range(NUM_HALVES):
            self.buffer.wait(half)


def serve(pipe: Connection, description: dict[str, Any], number: int) -> None:
    """A receiving process: answers "go" when it has carried out an order."""
    torch.set_num_threads(1)
    layout = PackLayout.from_dict(description["layout"])
    buffer = attach_buffer("packed_collective", description["endpoints"], CPU, number)
    receiver = WeightReceiver(layout, "packed_collective", buffer)
    own = [torch.zeros(meta.shape, dtype=meta.torch_dtype) for meta in layout.tensors]
    targets = [[Segment(tuple(tensor.shape), tensor.stride(), 0, tensor)] for tensor in own]
    while (order := pipe.recv()) is not None:
        if order == "broadcast":
            Broadcasts(buffer, layout).receive()
        else:
            bucket, fingerprints = order
            if bucket == 0:
                receiver.begin(0, targets=targets, load=None)
            receiver.receive(bucket, fingerprints)
            if bucket == len(layout.buckets) - 1:
                receiver.finish()
        pipe.send("done")


def sync(sender: WeightSender, pipes: Sequence[Connection]) -> None:
    """The protocol of `Refit.sync`: fingerprints follow their bucket, and a few buckets may be unanswered."""
    num_open = 0
    for bucket in range(len(sender.layout.buckets)):
        if num_open == OPEN_BUCKETS["packed_collective"]:
            answered(pipes)
            num_open -= 1
        fingerprints = sender.pack(bucket)["fingerprints"]
        for pipe in pipes:
            pipe.send((bucket, fingerprints))
        num_open += 1
    for _ in range(num_open):
        answered(pipes)


def broadcast(plain: Broadcasts, pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.send("broadcast")
    plain.send()
    answered(pipes)


def answered(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        assert pipe.recv() == "done"


def measure(gib: float, num_receivers: int, rounds: int) -> float:
    """Prints one line; returns the ratio of the fastest rounds."""
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in model_shapes(gib).items()}
    sender = WeightSender(
        [exported(name, lambda name=name: tensors[name]) for name in tensors],
        device=CPU,
        rank=0,
        local_rank=0,
        transport="packed_collective",
        wire_dtype="float32",
        rendezvous=Rendezvous(address="127.0.0.1", num_receivers=num_receivers, timeout_s=120.0),
    )
    description = sender.describe()
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for number in range(num_receivers):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, description, number), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    assert sender._buffer is not None
    plain = Broadcasts(sender._buffer, sender.layout)
    seconds: dict[str, list[float]] = {"broadcast": [], "sync": []}
    for round_number in range(rounds + 1):
        for kind in seconds:
            started = time.perf_counter()
            if kind == "sync":
                sync(sender, pipes)
            else:
                broadcast(plain, pipes)
            if round_number > 0:  # the first touches the memory
                seconds[kind].append(time.perf_counter() - started)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    sender.close()
    plain_s, sync_s = min(seconds["broadcast"]), min(seconds["sync"])
    size = sender.layout.total_bytes / 2**30
    print(
        f"{size:.2f} GiB in {len(sender.layout.buckets)} buckets to {num_receivers}: "
        f"broadcast {plain_s * 1e3:.0f} ms ({size / plain_s:.2f} GiB/s), "
        f"sync {sync_s * 1e3:.0f} ms ({size / sync_s:.2f} GiB/s), ratio {plain_s / sync_s:.2f}"
    )
    return plain_s / sync_s


def main() -> None:
    environment = HOST_ENVIRONMENT
    if not environment.items() <= os.environ.items():  # read when a process starts, so start again
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratios = [measure(gib, arguments.receivers, arguments.rounds) for gib in arguments.gib]
    print(f"worst ratio {min(ratios):.2f}, wanted {TARGET:.2f}")


if __name__ == "__main__":
    main()

"""Many small tensors, as in a mixture of experts: packed with metadata ahead of time, against one handle each.

    python benchmarks/refit_small_tensors.py [--tensors 45000]

Both sides use the same pipe to the same kind of process, which copies every tensor into its own memory. One
handle each: the sender puts every tensor into shared memory and sends torch's shared-memory handles, in messages of
1000; once with new segments for each sync, as gathered weights need them, and once with segments that are kept. Packed:
our refit, fingerprints included. The last line is how many times faster packing is than the better of the two.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import pickle
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as torch_mp

from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.layout import PackLayout, Segment, exported
from nemo_rl.refit.transfer import WeightReceiver, WeightSender

CPU = torch.device("cpu")
MESSAGE = 1000
SHAPES = [(16, 32), (64,), (8, 8), (32, 16)]


def seconds_of(run: Callable[[], Any], rounds: int) -> float:
    """Fastest of `rounds`, after one that does not count."""
    run()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def receive_handles(pipe: Connection, tensors: dict[str, torch.Tensor]) -> None:
    """Open every handle and copy its tensor."""
    torch.set_num_threads(1)
    torch_mp.set_sharing_strategy("file_system")
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    while message := pipe.recv_bytes():
        for name, tensor in pickle.loads(message):
            own[name].copy_(tensor)
        pipe.send(sum(len(name) for name in own))


def send_handles(pipe: Connection, tensors: dict[str, torch.Tensor], shared: dict[str, torch.Tensor] | None) -> None:
    """One handle per tensor; `shared` holds the segments that are kept, None makes new ones."""
    items, pending = [], 0
    for name, tensor in tensors.items():
        if shared is None:
            items.append((name, tensor.clone().share_memory_()))
        else:
            shared[name].copy_(tensor)
            items.append((name, shared[name]))
        if len(items) == MESSAGE:
            pipe.send_bytes(ForkingPickler.dumps(items))
            pending += 1
            if pending > 1:  # one message ahead of the receiver, as with our two halves
                pipe.recv()
                pending -= 1
            items = []
    if items:
        pipe.send_bytes(ForkingPickler.dumps(items))
        pending += 1
    for _ in range(pending):
        pipe.recv()


def receive_packed(pipe: Connection) -> None:
    """Our receiver, with its own memory."""
    torch.set_num_threads(1)
    description = pipe.recv()
    layout = PackLayout.from_dict(description["layout"])
    receiver = WeightReceiver(layout, "packed_shm", attach_buffer("packed_shm", description["endpoints"], CPU))
    own = [torch.zeros(meta.shape, dtype=meta.torch_dtype) for meta in layout.tensors]
    targets = [[Segment(tuple(tensor.shape), tensor.stride(), 0, tensor)] for tensor in own]
    while (message := pipe.recv()) is not None:
        bucket, fingerprints = message
        if bucket == 0:
            receiver.begin(1, targets=targets, load=None)
        receiver.receive(bucket, fingerprints)
        pipe.send(bucket)


def send_packed(pipe: Connection, sender: WeightSender) -> None:
    """One sync."""
    num_buckets = len(sender.layout.buckets)
    for bucket in range(num_buckets):
        if bucket >= 2:
            pipe.recv()
        pipe.send((bucket, sender.pack(bucket)["fingerprints"]))
    for _ in range(min(2, num_buckets)):
        pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=45_000)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    torch_mp.set_sharing_strategy("file_system")
    tensors = {f"model.layers.{i // 500}.experts.{i % 500}.w": torch.randn(SHAPES[i % 4]) for i in range(args.tensors)}
    context = mp.get_context("fork")

    ours, theirs = context.Pipe()
    process = context.Process(target=receive_packed, args=(theirs,), daemon=True)
    process.start()
    sender = WeightSender(
        [exported(name, lambda name=name: tensors[name]) for name in tensors],
        device=CPU,
        rank=0,
        local_rank=0,
        transport="packed_shm",
        wire_dtype="float32",
    )
    ours.send(sender.describe())
    packed = seconds_of(lambda: send_packed(ours, sender), 5)
    ours.send(None)
    process.join()
    print(f"{args.tensors} tensors packed, metadata ahead: {packed * 1e3:.0f} ms", flush=True)

    ours, theirs = context.Pipe()
    process = context.Process(target=receive_handles, args=(theirs, tensors), daemon=True)
    process.start()
    fresh = seconds_of(lambda: send_handles(ours, tensors, None), 1)
    print(f"one handle each, new segments: {fresh * 1e3:.0f} ms ({fresh / packed:.0f} times as long)", flush=True)
    shared = {name: tensor.clone().share_memory_() for name, tensor in tensors.items()}
    kept = seconds_of(lambda: send_handles(ours, tensors, shared), 1)
    print(f"one handle each, segments kept: {kept * 1e3:.0f} ms ({kept / packed:.0f} times as long)", flush=True)
    ours.send_bytes(b"")
    process.join()
    print(f"packed is {min(fresh, kept) / packed:.1f} times faster")


if __name__ == "__main__":
    main()
    os._exit(0)  # freeing tens of thousands of segments one by one is not part of the measurement

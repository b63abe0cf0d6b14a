"""How close a refit comes to the limit: two memcpys of the same bytes, one into the shared buffer and one out of it.

    python benchmarks/refit_bandwidth.py [--gib 1.0] [--engine]

Sender and receiver are two processes, started with the workers' environment (`HOST_ENVIRONMENT`); every byte is
fingerprinted on both sides; the receiver copies into its own parameters. `--engine` repeats it with vLLM as the
receiver, a model of about that size with random weights. The last line is the ratio (1.0: as long as two memcpys one
after the other in one process).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nemo_rl.distributed.worker_template import HOST_ENVIRONMENT
from nemo_rl.refit import transfer as weight_transfer
from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.fingerprint import host_fingerprint
from nemo_rl.refit.layout import PackLayout, Segment, exported
from nemo_rl.refit.transfer import WeightReceiver, WeightSender

CPU = torch.device("cpu")
NUM_ROUNDS = 7
HIDDEN, INTERMEDIATE, VOCAB = 1536, 4096, 16384


def model_shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen2-like model of about `gib` GiB in float32."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    per_layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.q_proj.bias": (HIDDEN,),
        "self_attn.k_proj.weight": (256, HIDDEN),
        "self_attn.k_proj.bias": (256,),
        "self_attn.v_proj.weight": (256, HIDDEN),
        "self_attn.v_proj.bias": (256,),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    for layer in range(num_layers(gib)):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes


def num_layers(gib: float) -> int:
    """Layers that fill `gib` GiB of float32 beside the embedding."""
    per_layer = 2 * HIDDEN * HIDDEN + 2 * 256 * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    return max(1, round((gib * 2**28 - VOCAB * HIDDEN) / per_layer))


def sender_of(gib: float) -> WeightSender:
    """A policy rank with random weights."""
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in model_shapes(gib).items()}
    return WeightSender(
        [exported(name, lambda name=name: tensors[name]) for name in tensors],
        device=CPU,
        rank=0,
        local_rank=0,
        transport="packed_shm",
        wire_dtype="float32",
    )


def best(run: Callable[[], Any], rounds: int = NUM_ROUNDS) -> float:
    """Seconds of the fastest round, after one that does not count."""
    run()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def memcpy_seconds(num_bytes: int) -> float:
    """One memcpy between warm pages, the fastest of C's memmove and torch's copy on one and all threads."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    candidates = [best(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes), 5)]
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        candidates.append(best(lambda: target.copy_(source), 5))
    torch.set_num_threads(threads)
    return min(candidates)


def receive_forever(pipe: Connection) -> None:
    """The receiving process: attach, then take buckets until told to stop. Answers each with the seconds it took."""
    description = pipe.recv()
    layout = PackLayout.from_dict(description["layout"])
    receiver = WeightReceiver(layout, "packed_shm", attach_buffer("packed_shm", description["endpoints"], CPU))
    own = [torch.zeros(meta.shape, dtype=meta.torch_dtype) for meta in layout.tensors]
    targets = [[Segment(tuple(tensor.shape), tensor.stride(), 0, tensor)] for tensor in own]
    while (message := pipe.recv()) is not None:
        version, bucket, fingerprints = message
        started = time.perf_counter()
        if bucket == 0:
            receiver.begin(version, targets=targets, load=None)
        receiver.receive(bucket, fingerprints)
        if bucket == len(layout.buckets) - 1:
            receiver.finish()
        pipe.send(time.perf_counter() - started)


def sync_over_pipe(sender: WeightSender, pipe: Connection, version: int) -> None:
    """The protocol of nemo_rl.refit.sync.Refit.sync over a pipe."""
    num_buckets = len(sender.layout.buckets)
    for bucket in range(num_buckets):
        if bucket >= 2:
            pipe.recv()
        pipe.send((version, bucket, sender.pack(bucket)["fingerprints"]))
    for _ in range(min(2, num_buckets)):
        pipe.recv()


def copy_only(source: int, target: int, nbytes: int) -> int:
    """Replaces `hash_and_copy`, to measure the cost of fingerprints."""
    ctypes.memmove(target, source, nbytes)
    return 0


def measure_processes(gib: float) -> float:
    """Two processes; returns the ratio."""
    seconds, sender = sync_seconds(gib)
    original, weight_transfer.hash_and_copy = weight_transfer.hash_and_copy, copy_only
    without, _ = sync_seconds(gib)
    weight_transfer.hash_and_copy = original
    ratio = report("two processes", sender, seconds)
    print(f"without fingerprints {without * 1e3:.0f} ms: they are {1 - without / seconds:.0%} of the refit")
    return ratio


def sync_seconds(gib: float) -> tuple[float, WeightSender]:
    """Seconds of a sync between two processes, and its sender."""
    context = mp.get_context("fork")
    torch.set_num_threads(1)
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_forever, args=(theirs,), daemon=True)
    process.start()
    sender = sender_of(gib)
    ours.send(sender.describe())
    seconds = best(lambda: sync_over_pipe(sender, ours, 1))
    ours.send(None)
    process.join()
    torch.set_num_threads(os.cpu_count() or 1)
    return seconds, sender


def report(name: str, sender: WeightSender, seconds: float) -> float:
    """Print one row against memcpy, measured now."""
    nbytes = sender.layout.total_bytes
    memcpy = memcpy_seconds(nbytes)
    data = torch.ones(nbytes, dtype=torch.uint8)
    hashing = best(lambda: host_fingerprint(data.data_ptr(), nbytes), 3)
    ratio = seconds / (2 * memcpy)
    gib = nbytes / 2**30
    print(
        f"{name}: {gib:.3f} GiB in {len(sender.layout.buckets)} buckets, {len(sender.layout.tensors)} tensors: "
        f"{seconds * 1e3:.0f} ms ({gib / seconds:.1f} GiB/s); one memcpy {memcpy * 1e3:.0f} ms "
        f"({gib / memcpy:.1f} GiB/s); hashing alone {hashing * 1e3:.0f} ms per side; ratio {ratio:.2f}",
        flush=True,
    )
    return ratio


def measure_engine(gib: float) -> float:
    """vLLM's asynchronous engine receives; returns the ratio."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0", "HF_HUB_OFFLINE": "1"}
    from transformers import Qwen2Config

    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=num_layers(gib),
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
        )
        config.save_pretrained(folder)
        return asyncio.run(_measure_engine(Path(folder), gib))


async def _measure_engine(folder: Path, gib: float) -> float:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            load_format="dummy",
            worker_extension_cls="nemo_rl.models.generation.vllm.weight_loader.WorkerExtension",
            weight_transfer_config={"backend": "packed_shm"},  # type: ignore[arg-type]
        )
    )
    sender = sender_of(gib)
    torch.set_num_threads(1)
    description = sender.describe()
    info = {"layout": description["layout"], "endpoints": description["endpoints"]}
    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def sync() -> None:
        loading: list[asyncio.Task[None]] = []
        await engine.start_weight_update()
        for bucket in range(len(sender.layout.buckets)):
            if bucket >= 2:
                await loading[bucket - 2]
            packed = await asyncio.to_thread(sender.pack, bucket)
            update = {"version": 1, "bucket": bucket, "fingerprints": packed["fingerprints"]}
            loading.append(asyncio.create_task(engine.update_weights(WeightTransferUpdateRequest(update_info=update))))
            await asyncio.sleep(0)
        await asyncio.gather(*loading)
        await engine.finish_weight_update()

    times = []
    for _ in range(NUM_ROUNDS):
        started = time.perf_counter()
        await sync()
        times.append(time.perf_counter() - started)
    engine.shutdown()
    torch.set_num_threads(os.cpu_count() or 1)
    return report("vLLM engine", sender, min(times[1:]))


def main() -> None:
    environment = HOST_ENVIRONMENT
    if not environment.items() <= os.environ.items():  # read when a process starts, so start again
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model in float32")
    parser.add_argument("--engine", action="store_true", help="also with vLLM as the receiver")
    args = parser.parse_args()
    if args.engine:
        measure_engine(args.gib)
    print(f"refit / two memcpys: {measure_processes(args.gib):.2f}")


if __name__ == "__main__":
    main()

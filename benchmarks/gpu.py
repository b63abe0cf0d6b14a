"""One GPU with the library, against its hardware or a bare program: one command, under 15 minutes.

    uv run --extra vllm benchmarks/gpu.py                       # every part, those that say most first
    uv run --extra vllm benchmarks/gpu.py --parts refit train
    python benchmarks/gpu.py --device cpu --size tiny           # the same functions; with --parts engines too

    ipc         the tests of memory that two processes share
    sleep       seconds in which an engine sleeps and wakes, memory that it leaves, whether it says the same after it
    grpo        steps of GRPO at tiny size by the command line, compiled, with a sleep, a wake and a refit in each:
                `token_mult_prob_error`, seconds of a step
    refit       seconds of a refit of random bfloat16 weights, over two copies of the same bytes one after the other
    train       tokens/s and MFU of optimizer steps on packed sequences; rate of offload and onload over that
                of a pinned copy; memory that is left when the policy is on the host
    head        seconds of logprobs and their gradients from hidden states, over those of the operations at peak
    generation  tokens/s of our engine over a bare `vllm.LLM` on the same requests; memory that is left asleep
    step        a whole step of GRPO against TRL's GRPOTrainer with a colocated vLLM, where TRL is installed
    tests       the other tests of one kernel or one worker each: `pytest -m gpu tests/unit`

Each part runs in its own process. A line has the measurement, what is asked of it, and whether it is reached. `--json`
writes all numbers, with the name of the GPU, anew after each of them, so that a kill leaves what was measured.
`--within-s` ends the part that runs at that time and leaves out the rest. The process ends with status 1 if something
asked for is not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "ipc": 90,
    "sleep": 180,
    "grpo": 240,
    "refit": 120,
    "train": 180,
    "head": 60,
    "generation": 300,
    "step": 300,
    "tests": 480,
}
"""The seconds after which a part is ended; those come first that say most about an unknown machine."""
WITHOUT_ENGINE = ("refit", "train", "head")
GPU_ALONE = ("ipc", "tests")
IPC_TESTS = ("tests/unit/refit/test_weight_transfer.py",)
END_S = 10.0  # in which a part that is ended ends its own processes
LEARNING_RATE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    refits: tuple[float, ...]  # parameters
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    pack_tokens: int  # of a micro-batch
    sequences: int  # of an optimizer step
    length: int
    head_tokens: int
    head_hidden: int
    head_vocabulary: int
    requests: int
    new_tokens: int
    rounds: int
    steps: int  # of GRPO


FULL = Size(
    refits=(1.3e9, 7e9), hidden=1536, layers=28, intermediate=8960, vocabulary=151936, pack_tokens=8192, sequences=128,
    length=1024, head_tokens=8192, head_hidden=3584, head_vocabulary=152064, requests=512, new_tokens=256, rounds=5,
    steps=4,
)  # fmt: skip
TINY = Size(
    refits=(4e5,), hidden=64, layers=2, intermediate=128, vocabulary=512, pack_tokens=128, sequences=8, length=32,
    head_tokens=64, head_hidden=32, head_vocabulary=512, requests=8, new_tokens=8, rounds=1, steps=1,
)  # fmt: skip
SIZES = {"full": FULL, "tiny": TINY}


@dataclass(frozen=True)
class Result:
    """A measurement. `asked` is the bound that `value` must keep, None if there is none."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_reached(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def asked(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"


# -- time and memory


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The fastest of `rounds`, after one that does not count."""
    run()
    found = []
    for _ in range(rounds):
        settle(device)
        started = time.perf_counter()
        run()
        settle(device)
        found.append(time.perf_counter() - started)
    return min(found)


def used_bytes() -> int:
    """Memory of the GPU in use, by any process; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_of(device: torch.device) -> float | None:
    """Operations per second of the device; None if they are not known."""
    from nemo_rl.models.policy.flops import find_gpu

    gpu = find_gpu(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return gpu.flops if gpu is not None else None


# -- tests


def passed(*tests: str) -> Iterator[Result]:
    """1 for each of the tests of these files and folders that need a GPU, 0 for one that fails."""
    options = ("-m", "gpu", "-n0", "-v", "--no-header", "--timeout=120", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            name, _, outcome = line.partition(" ")
            if "::" in name and (said := outcome.split()[:1]) and said[0] in ("PASSED", "FAILED", "ERROR"):
                yield Result(name.removeprefix("tests/unit/"), float(said[0] == "PASSED"), at_least=1.0)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {process.returncode}")


# -- a step of GRPO


def grpo(size: Size, device: str) -> Iterator[Result]:
    """The first whole run of `tests/gpu`."""
    from tests.functional.cli import run
    from tests.gpu.scenarios import LARGEST_ERROR, SCENARIOS

    scenario = SCENARIOS["bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        overrides = (*scenario.on("cuda" if device == "cuda" else "cpu"), f"grpo.max_num_steps={size.steps}")
        done = run(Path(folder), *overrides, timeout_s=PARTS["grpo"], **scenario.example)
    error = max(done.curve("train/token_mult_prob_error"))
    yield Result("token_mult_prob_error of GRPO", error, at_most=LARGEST_ERROR[scenario.precision])
    yield Result("norm of the gradient", max(done.curve("train/grad_norm")))
    yield Result("reward of the last step", done.curve("train/reward")[-1])
    yield Result("step of GRPO, tiny", min(done.curve("timing/train/total_step_time")), "s")


# -- refit


def random_weights(count: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Matrices and vectors of about `count` parameters in all, the largest of at most 64 million."""
    width = int(min(8192, max(64, count**0.5 / 8)))
    number = max(1, round(count / (width * width + width)))
    shapes = {f"layers.{i}.weight": (width, width) for i in range(number)}
    shapes |= {f"layers.{i}.norm": (width,) for i in range(number)}
    return {name: torch.randn(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()}


def take_buckets(pipe: Connection, device: torch.device) -> None:
    """The receiving process: attach, then load buckets into its own parameters until told to stop."""
    from nemo_rl.refit.buffers import attach_buffer
    from nemo_rl.refit.layout import PackLayout, Segment
    from nemo_rl.refit.transfer import WeightReceiver

    transport, description = pipe.recv()
    layout = PackLayout.from_dict(description["layout"])
    receiver = WeightReceiver(layout, transport, attach_buffer(transport, description["endpoints"], device))
    own = [torch.zeros(meta.shape, dtype=meta.torch_dtype, device=device) for meta in layout.tensors]
    targets = [[Segment(tuple(tensor.shape), tensor.stride(), 0, tensor)] for tensor in own]
    pipe.send("attached")
    while (message := pipe.recv()) is not None:
        version, bucket, fingerprints = message
        if bucket == 0:
            receiver.begin(version, targets=targets, load=None)
        receiver.receive(bucket, fingerprints)
        if bucket == len(layout.buckets) - 1:
            receiver.finish()
        settle(device)
        pipe.send(own[0].view(torch.int16).sum().item() if bucket == len(layout.buckets) - 1 else None)


def refit(size: Size, device: torch.device, bucket_bytes: int) -> Iterator[Result]:
    for count in size.refits:
        yield from refit_of(count, device, bucket_bytes, size.rounds)


def refit_of(count: float, device: torch.device, bucket_bytes: int, rounds: int) -> list[Result]:
    """Sender and receiver are two processes; two buckets are open at a time, as in a run."""
    from nemo_rl.refit.layout import exported
    from nemo_rl.refit.transfer import WeightSender

    transport = "packed_ipc" if device.type == "cuda" else "packed_shm"
    tensors = random_weights(count, device)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    settings = {"transport": transport, "wire_dtype": "bfloat16", "bucket_bytes": bucket_bytes}
    weights = [exported(name, lambda name=name: tensors[name]) for name in tensors]
    sender = WeightSender(weights, device=device, rank=0, local_rank=0, **settings)
    ours, theirs = mp.get_context("spawn").Pipe()
    receiver = mp.get_context("spawn").Process(target=take_buckets, args=(theirs, device))
    receiver.start()
    ours.send((transport, sender.describe()))
    assert ours.recv() == "attached"
    arrived = []

    def sync() -> None:
        for bucket in range(len(sender.layout.buckets)):
            if bucket >= 2:
                arrived.append(ours.recv())
            ours.send((1, bucket, sender.pack(bucket)["fingerprints"]))
        arrived.extend(ours.recv() for _ in range(min(2, len(sender.layout.buckets))))

    seconds = seconds_of(sync, device, rounds)
    first = next(iter(tensors.values()))
    assert arrived[-1] == first.view(torch.int16).sum().item(), "other weights arrived"
    ours.send(None)
    receiver.join()
    sender.close()
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = seconds_of(lambda: (target.copy_(source), source.copy_(target)), device, rounds)
    name = f"refit of {count:.2g} parameters"
    return [
        Result(f"{name} over two device copies", seconds / copies, at_most=2.0),
        Result(name, num_bytes / seconds / 1e9, "GB/s"),
    ]


# -- training, offload and onload


def save_model(size: Size, folder: Path, dtype: torch.dtype) -> Path:
    """A random Qwen2 with the tiny model's tokenizer."""
    from nemo_rl.data.tiny_model import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<eos>")
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.hidden // 128),
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    os.environ["LOCAL_RANK"] = "0"
    with tempfile.NamedTemporaryFile() as file:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def train(size: Size, device: torch.device) -> list[Result]:
    from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
    from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
    from nemo_rl.algorithms.plan.batch import plan_batch
    from nemo_rl.algorithms.plan.micro_batches import Batching
    from nemo_rl.models.policy.config import OptimizerConfig, PolicyConfig, SequencePackingConfig, TokenizerConfig
    from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
    from nemo_rl.models.policy.flops import ModelFlops
    from nemo_rl.models.policy.head.tasks import Logprobs
    from nemo_rl.models.policy.worker import PolicyWorkerSettings
    from nemo_rl.types import SamplingParams

    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder, world_of_one(device):
        path = str(save_model(size, Path(folder) / "model", torch.bfloat16))
        config = PolicyConfig(
            model_name=path,
            tokenizer=TokenizerConfig(name=path),
            train_global_batch_size=size.sequences,
            train_micro_batch_size=1,
            logprob_batch_size=1,
            max_total_sequence_length=size.length,
            sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=size.pack_tokens),
            precision="bfloat16" if on_gpu else "float32",
            optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE, "fused": on_gpu}),
        )
        settings = PolicyWorkerSettings(
            model_path=path,
            sampling=SamplingParams(max_new_tokens=size.length),
            use_gpu=on_gpu,
            workers_per_node=1,
            init_reference_model=False,
            init_optimizer=True,
            seed=0,
        )
        before = used_bytes() if on_gpu else 0
        worker = DTensorPolicyWorker(config, settings)
        flops = ModelFlops.of(worker.parts[0].config)
        handles, groups = sampled_groups(size)
        ones = [[1.0]] * len(handles)
        batching = Batching.of(config, quadratic_weight=flops.quadratic_weight)
        plan = plan_batch(handles, ones, ones, num_ranks=1, global_batch_size=size.sequences, batching=batching)
        loss = ClippedPGLoss(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))

        def step() -> None:
            worker.load(plan.ranks[0], {number: (0, number) for number in range(len(groups))}, groups)
            assert np.isfinite(worker.train(loss, Logprobs()).losses[0])

        seconds = seconds_of(step, device, size.rounds)
        lengths = [group.samples[0].meta.length for group in groups]
        results = [Result("training", sum(lengths) / seconds, "tokens/s")]
        if (peak := peak_of(device)) is not None:
            results.append(Result("training, MFU", flops.train(lengths) / seconds / peak, at_least=0.40))
        if on_gpu:
            results += moves(worker, device, size.rounds)
            worker.offload()
            results.append(Result("memory left with the policy on the host", (used_bytes() - before) / 1e9, "GB"))
    return results


def moves(worker: Any, device: torch.device, rounds: int) -> list[Result]:
    """Offload and onload against copies of as many bytes between the device and one pinned buffer."""
    held = torch.cuda.memory_allocated()
    worker.offload()
    num_bytes = held - torch.cuda.memory_allocated()
    worker.onload(with_optimizer=True)
    found: dict[str, list[float]] = {"offload": [], "onload": []}
    for _ in range(rounds):
        for name, move in (("offload", worker.offload), ("onload", lambda: worker.onload(with_optimizer=True))):
            settle(device)
            started = time.perf_counter()
            move()
            settle(device)
            found[name].append(time.perf_counter() - started)
    chunk = min(num_bytes, 4 << 30)
    pinned = torch.empty(chunk, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(chunk, dtype=torch.uint8, device=device)
    best = {
        "offload": chunk / seconds_of(lambda: pinned.copy_(on_device, non_blocking=True), device, rounds),
        "onload": chunk / seconds_of(lambda: on_device.copy_(pinned, non_blocking=True), device, rounds),
    }
    results = []
    for name, seconds in found.items():
        rate = num_bytes / min(seconds)
        results.append(Result(f"{name} of {num_bytes / 1e9:.1f} GB", min(seconds), "s"))
        results.append(Result(f"{name} over a pinned copy", rate / best[name], at_least=0.7))
    return results


def sampled_groups(size: Size) -> tuple[list[Any], list[Any]]:
    """Groups of one sample; lengths are spread evenly over the upper half of the greatest length."""
    from nemo_rl.types import GroupHandle, RolloutGroup, Sample, SampleMeta, SampleStatus

    rng = np.random.default_rng(0)
    handles, groups = [], []
    for number in range(size.sequences):
        length = size.length - number % (size.length // 2)
        mask = np.arange(length) >= 1
        meta = SampleMeta(
            sample_id=f"{number}/0",
            status=SampleStatus.COMPLETED,
            length=length,
            num_prompt_tokens=1,
            num_generated_tokens=length - 1,
            num_turns=1,
            reward=0.0,
            weight_version=0,
        )
        sample = Sample(
            meta=meta,
            token_ids=rng.integers(0, size.vocabulary, length),
            token_mask=mask,
            generation_logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
        )
        groups.append(RolloutGroup(group_id=str(number), prompt_id="p", samples=[sample]))
        handles.append(GroupHandle(group_id=str(number), prompt_id="p", task_name="t", ref=number, samples=[meta]))
    return handles, groups


# -- the head


def head(size: Size, device: torch.device) -> list[Result]:
    """Ideal with gradients: four products, as the backward pass computes the logits again."""
    from nemo_rl.models.policy.head.linear import linear_logprobs
    from nemo_rl.models.policy.head.logit_tiles import OutputHead

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n, h, v = size.head_tokens, size.head_hidden, size.head_vocabulary
    states = torch.randn(n, h, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(v, h, device=device, dtype=dtype).mul_(h**-0.5).requires_grad_()
    targets = torch.randint(v, (n,), device=device)

    def forward() -> torch.Tensor:
        return linear_logprobs(states, OutputHead(weight=weight, vocab_size=v), targets)

    with torch.no_grad():
        alone = seconds_of(forward, device, size.rounds)
    both = seconds_of(lambda: forward().sum().backward(), device, size.rounds)
    results = [Result("logprobs of a head", 1e3 * alone, "ms"), Result("with gradients", 1e3 * both, "ms")]
    if (peak := peak_of(device)) is not None:
        product = 2 * n * h * v / peak
        results.append(Result("logprobs of a head over ideal", alone / product))
        results.append(Result("with gradients over ideal", both / (4 * product)))
    return results


# -- generation


def prompts_of(size: Size) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(10, 100) for _ in range(rng.randrange(32, 128))] for _ in range(size.requests)]


def worker_of(size: Size, model: str, device: Any, *, eager: bool = False) -> Any:
    """The actor's class."""
    from nemo_rl.config.loader import build_section
    from nemo_rl.models.generation.config import LoneGenerationConfig
    from nemo_rl.models.generation.vllm.worker import EngineSettings, VllmWorker

    engine = {"precision": "bfloat16", "max_model_len": 2048, "enforce_eager": eager}
    values = {"max_new_tokens": size.new_tokens, "vllm_cfg": engine}
    cfg = build_section("generation", LoneGenerationConfig, values)
    return VllmWorker(EngineSettings(model=model, tokenizer=model, cfg=cfg, device=device, seed=0, load_format="auto"))


def sleeping_engine(size: Size, model: str, device: Any) -> dict[str, float]:
    """Sleep that keeps the weights, and the same greedy tokens before and after it."""
    from nemo_rl.types import GenerationRequest, SamplingParams

    before = used_bytes()
    worker = worker_of(size, model, device, eager=True)
    request = GenerationRequest(
        prompt_token_ids=prompts_of(size)[0], sampling=SamplingParams(max_new_tokens=16, temperature=0.0), seed=0
    )

    async def measure() -> dict[str, float]:
        first = await worker.generate(request)
        awake = used_bytes()
        began = time.perf_counter()
        await worker.offload(keep_weights=True)
        asleep_s, asleep = time.perf_counter() - began, used_bytes()
        began = time.perf_counter()
        await worker.onload()
        awake_s = time.perf_counter() - began
        same = (await worker.generate(request)).token_ids == first.token_ids
        found = {"same": float(same), "sleep_s": asleep_s, "wake_s": awake_s}
        return found | {"awake_gb": (awake - before) / 1e9, "asleep_gb": (asleep - before) / 1e9}

    return asyncio.run(measure())


def our_engine(size: Size, model: str, device: Any) -> dict[str, float]:
    """Tokens per second of the actor's class, and memory that is left asleep."""
    from nemo_rl.types import GenerationRequest, SamplingParams

    before = used_bytes()
    worker = worker_of(size, model, device)
    sampling = SamplingParams(max_new_tokens=size.new_tokens)

    async def measure() -> float:
        best = 0.0
        for _ in range(3):
            started = time.perf_counter()
            requests = (
                GenerationRequest(prompt_token_ids=prompt, sampling=sampling, seed=seed)
                for seed, prompt in enumerate(prompts_of(size))
            )
            done = await asyncio.gather(*map(worker.generate, requests))
            best = max(best, sum(len(one.token_ids) for one in done) / (time.perf_counter() - started))
        await worker.offload(keep_weights=False)  # as where a whole sync follows
        return best

    rate = asyncio.run(measure())
    return {"tokens_per_s": rate, "asleep_gb": (used_bytes() - before) / 1e9}


def bare_engine(size: Size, model: str, device: Any) -> dict[str, float]:
    """The same requests through `vllm.LLM`."""
    from vllm import LLM, SamplingParams

    memory: dict[str, Any] = {"gpu_memory_utilization": 0.6}
    if device != "cuda":
        memory = {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True}
    engine = LLM(model=model, dtype="bfloat16", max_model_len=2048, seed=0, **memory)
    prompts = prompts_of(size)
    sampling = [
        SamplingParams(max_tokens=size.new_tokens, temperature=1.0, seed=seed, logprobs=0, detokenize=False)
        for seed in range(len(prompts))
    ]
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        done = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        best = max(best, sum(len(one.outputs[0].token_ids) for one in done) / (time.perf_counter() - started))
    return {"tokens_per_s": best}


ENGINES = {"ours": our_engine, "bare": bare_engine, "sleeping": sleeping_engine}


@contextmanager
def engine_options(size: Size, size_name: str, device: str) -> Iterator[list[str]]:
    """A model on disk, and the options of a process that serves it, with the whole GPU."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_model(size, Path(folder), torch.bfloat16))
        torch.cuda.empty_cache()
        yield ["--size", size_name, "--device", device, "--model", model]


def sleep(size: Size, size_name: str, device: str) -> Iterator[Result]:
    with engine_options(size, size_name, device) as options:
        found = child(*options, "--engine", "sleeping")
    yield Result("an engine that woke says the same", found["same"], at_least=1.0)
    yield Result("an engine falls asleep", found["sleep_s"], "s")
    yield Result("an engine wakes", found["wake_s"], "s")
    yield Result("memory of an engine awake", found["awake_gb"], "GB")
    yield Result("memory of an engine asleep", found["asleep_gb"], "GB")


def generation(size: Size, size_name: str, device: str) -> Iterator[Result]:
    with engine_options(size, size_name, device) as options:
        ours = child(*options, "--engine", "ours")
        yield Result("generation", ours["tokens_per_s"], "tokens/s")
        yield Result("memory left with the engine asleep", ours["asleep_gb"], "GB")
        bare = child(*options, "--engine", "bare")
    yield Result("generation over a bare vllm.LLM", ours["tokens_per_s"] / bare["tokens_per_s"], at_least=0.95)


# -- a whole step


def step(size: Size, device: str) -> Iterator[Result]:
    if importlib.util.find_spec("trl") is None:
        sys.stderr.write("step: skipped, TRL is not installed; `uv run` takes it with --group bench\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_model(size, Path(folder), torch.bfloat16))
        torch.cuda.empty_cache()
        script = Path(__file__).with_name("grpo_vs_trl.py")
        # TRL keeps the activations and logits of a whole micro-batch.
        sizes = {"micro-batch": 8, "repeats": 1, "warmup": 1, "steps": 2, "max-new-tokens": 2 * size.new_tokens}
        sizes |= {"prompts": max(4, size.requests // 16), "generations": 8}
        options = [f"--{name}={value}" for name, value in ({"device": device, "model": model} | sizes).items()]
        command = [sys.executable, str(script), *options]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    yield Result("whole step over TRL's GRPOTrainer", float(out.split()[-1]), at_least=1.5)


# -- the command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, nargs="+", help="default: all that the device can run")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="end then, with what was measured")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--bucket-mib", type=int, default=512, help="of a refit")
    parser.add_argument("--json", type=Path, help="write the results there, after each of them")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def environment() -> dict[str, str]:
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}


def child(*arguments: str) -> Any:
    """The last line of this script in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout
    return json.loads(out.splitlines()[-1])


def results_of(part: str, options: Sequence[str], limit_s: float) -> Iterator[Result]:
    """The results of a part, as they come, from a process of its own. RuntimeError if that fails or is ended."""
    command = [sys.executable, __file__, *options, "--part", part]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    assert process.stdout is not None

    def end() -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(END_S)

    killer = threading.Timer(limit_s, end)
    killer.daemon = True
    killer.start()
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                yield Result(**json.loads(line.removeprefix(MARK)))
        status = process.wait()
    finally:
        killer.cancel()
    if status:
        raise RuntimeError(f"ended after {limit_s:.0f} s" if status < 0 else f"FAILED with status {status}")


MARK = "result of a part: "


def measure(args: argparse.Namespace) -> Iterable[Result]:
    size, device = SIZES[args.size], torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.part in GPU_ALONE:
        return passed(*(IPC_TESTS if args.part == "ipc" else ("tests/unit",)))
    if args.part == "refit":
        return refit(size, device, args.bucket_mib << 20)
    if args.part in ("train", "head"):
        return {"train": train, "head": head}[args.part](size, device)
    if args.part in ("grpo", "step"):
        return {"grpo": grpo, "step": step}[args.part](size, args.device)
    return {"sleep": sleep, "generation": generation}[args.part](size, args.size, args.device)


def machine(device: str) -> dict[str, str]:
    """What the numbers are of. Where the kernel is gVisor's (4.4.0), shared memory of a GPU may fail for its sake."""
    found = {"device": "CPU", "torch": torch.__version__, "python": platform.python_version()}
    found["kernel"] = platform.release()
    if device == "cuda":
        found["device"], found["cuda"] = torch.cuda.get_device_name(), str(torch.version.cuda)
    return found


def main() -> int:
    args = parse()
    if args.engine is not None:
        sys.stdout.write("\n" + json.dumps(ENGINES[args.engine](SIZES[args.size], args.model, args.device)) + "\n")
        return 0
    if args.part is not None:
        for result in measure(args):
            sys.stdout.write(f"\n{MARK}{json.dumps(vars(result))}\n")
            sys.stdout.flush()
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("error: no GPU is visible; `--device cpu --size tiny` runs the parts without engines\n")
        return 2
    deadline = time.monotonic() + args.within_s
    parts = args.parts or (list(PARTS) if args.device == "cuda" else WITHOUT_ENGINE)
    options = ["--device", args.device, "--size", args.size, "--bucket-mib", str(args.bucket_mib)]
    found: dict[str, Any] = {**machine(args.device), "seconds": {}, "failed": [], "left_out": [], "results": []}

    def write() -> None:
        if args.json is not None:
            whole = args.json.with_name(f".{args.json.name}")
            whole.write_text(json.dumps(found, indent=1))
            whole.replace(args.json)

    say(found["device"])
    results: list[Result] = []
    for part in parts:
        started = time.monotonic()
        if started > deadline:
            found["left_out"].append(part)
            continue
        try:
            for result in results_of(part, options, min(PARTS[part], deadline - started)):
                results.append(result)
                found["results"].append({"part": part, **vars(result)})
                verdict = "" if not result.asked else "reached" if result.is_reached else "NOT REACHED"
                say(f"{part:<11}{result.name:<44}{result.value:>12,.3g} {result.unit:<9}{result.asked:<14}{verdict}")
                write()
        except RuntimeError as error:  # its message is above; the other parts are worth their time
            say(f"{part:<11}{error}")
            found["failed"].append(part)
        found["seconds"][part] = round(time.monotonic() - started, 1)
        write()
    write()
    say(f"{sum(found['seconds'].values()):.0f} s{''.join(f'; no time for {part}' for part in found['left_out'])}")
    return 0 if not found["failed"] and all(result.is_reached for result in results) else 1


def say(line: str) -> None:
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

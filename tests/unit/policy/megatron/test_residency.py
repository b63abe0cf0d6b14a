"""Weights, gradients and optimizer state that leave their device come back as they were, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.distributed import DistributedDataParallel

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronOptimizerConfig
from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker
from nemo_rl.models.policy.residency import MovedStorages
from nemo_rl.types import SamplingParams
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import LOSS, load_step, policy_config, worker_settings
from tests.worlds import run_world

HOST = torch.device("cpu")


def test_views_of_a_storage_that_comes_back_are_views_still():
    whole = torch.arange(6.0)
    part, scratch = whole[2:4], torch.ones(3)
    moved = MovedStorages(HOST)
    moved.take([part, whole], keep=True)
    moved.take([scratch], keep=False)
    assert whole.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
    moved.put_back()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and len(scratch.zero_()) == 3
    part.fill_(7.0)
    assert whole.tolist() == [0.0, 1.0, 7.0, 7.0, 4.0, 5.0]


def test_what_is_elsewhere_stays_there():
    moved, tensor = MovedStorages(torch.device("cuda", 0)), torch.ones(3)
    moved.take([tensor], keep=True)
    moved.put_back()
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def make_worker(path: Path, precision: str, *, use_gpu: bool = False) -> MegatronPolicyWorker:
    optimizer = MegatronOptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0)
    config = policy_config(
        dtensor_cfg=DTensorConfig(enabled=False),
        optimizer=None,
        precision=precision,
        megatron_cfg=MegatronConfig(enabled=True, transformer_impl="local", optimizer=optimizer),
    )
    settings = worker_settings(
        path, sampling=SamplingParams(max_new_tokens=16), use_gpu=use_gpu, init_reference_model=True
    )
    worker = MegatronPolicyWorker(config, settings)
    load_step(worker)
    worker.compute_reference_logprobs()
    return worker


def train(worker: MegatronPolicyWorker) -> None:
    worker.compute(Logprobs(), "prev_logprobs")
    worker.train(ClippedPGLoss(LOSS), Logprobs())


def held_bytes(chunks: list[DistributedDataParallel]) -> int:
    return sum(parameter.untyped_storage().nbytes() for chunk in chunks for parameter in chunk.module.parameters())


def weights(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.gather(None).to("cpu", copy=True) for tensor in worker._export()}


def two_steps(rank: int, world_size: int, path: Path, precision: str, is_moved: bool) -> dict[str, torch.Tensor]:
    """Weights after two steps, between which everything left the device and came back piece by piece."""
    worker = make_worker(path, precision)
    train(worker)
    if is_moved:
        before = weights(worker)
        worker.residency.offload()
        assert held_bytes(worker.chunks) == 0
        worker.residency.onload(with_optimizer=False)
        after = weights(worker)
        assert all(torch.equal(before[name], after[name]) for name in before)
        worker.residency.offload()
        worker.residency.onload(with_optimizer=True)
        worker.residency.onload(with_optimizer=True)
    train(worker)
    return weights(worker)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_training_goes_on_after_an_absence_as_without(tmp_path, precision):
    save_model("qwen2-tied", tmp_path)
    stayed, moved = (run_world(two_steps, 1, tmp_path, precision, is_moved)[0] for is_moved in (False, True))
    assert stayed.keys() == moved.keys()
    assert all(torch.equal(stayed[name], moved[name]) for name in stayed)


def _on_a_gpu(rank: int, folder: str, path: str, is_moved: bool, results: Any) -> None:
    store = dist.FileStore(f"{folder}/rendezvous_{is_moved}", 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    worker = make_worker(Path(path), "bfloat16", use_gpu=True)
    train(worker)
    present = torch.cuda.memory_allocated()
    left = 0
    if is_moved:
        worker.offload()
        left = torch.cuda.memory_allocated()
        worker.onload(with_optimizer=True)
    train(worker)
    results.put(({name: tensor.float().numpy() for name, tensor in weights(worker).items()}, present, left))
    dist.destroy_process_group()


def on_a_gpu(folder: Path, path: Path, *, is_moved: bool) -> tuple[dict[str, np.ndarray], int, int]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_on_a_gpu, args=(0, str(folder), str(path), is_moved, results))
    process.start()
    found = results.get()
    process.join()
    return found


@pytest.mark.gpu
def test_a_gpu_is_left_and_taken_again(tmp_path):
    save_model("qwen2-tied", tmp_path / "model")
    stayed, _, _ = on_a_gpu(tmp_path, tmp_path / "model", is_moved=False)
    moved, present, left = on_a_gpu(tmp_path, tmp_path / "model", is_moved=True)
    assert left < 0.1 * present
    assert all(np.array_equal(stayed[name], moved[name]) for name in stayed)

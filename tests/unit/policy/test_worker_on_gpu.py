"""The worker on a CUDA device against the worker on the CPU: same step, and what only a device has."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import TrainResult
from tests.unit.policy.steps import LOSS, PACKED, load_step, make_worker, policy_config
from tests.worlds import in_new_process

pytestmark = pytest.mark.gpu


def two_steps(path: Path, use_gpu: bool, changes: dict[str, Any]) -> list[TrainResult]:
    config = policy_config(train_micro_batch_size=2, **PACKED, **changes)
    worker = make_worker(path, config, use_gpu=use_gpu, workers_per_node=1)
    steps = []
    for _ in range(2):
        load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        if use_gpu:
            torch.cuda.set_sync_debug_mode("error")  # the micro-batch loop waits for the device nowhere
            batches = worker._model_batches([list(worker.rows.values())[:2]] * 3, Logprobs())
            worker.runner.train(batches, lambda number, logprobs: logprobs.sum() * 0.0, Logprobs())
            torch.cuda.set_sync_debug_mode("default")
        steps.append(worker.train(ClippedPGLoss(LOSS), Logprobs()))
        if use_gpu:
            worker.offload()
            free = torch.cuda.memory_allocated()
            worker.onload(with_optimizer=True)
            assert free < torch.cuda.memory_allocated() or config.dtensor_cfg.cpu_offload
    return steps


def run(path: Path, *, use_gpu: bool, **changes: Any) -> list[TrainResult]:
    return in_new_process(two_steps, path, use_gpu, changes, backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo")


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-4),
        ({"precision": "bfloat16"}, 0.1),
        ({"dtensor_cfg": DTensorConfig(cpu_offload=True)}, 1e-4),
        ({"dtensor_cfg": DTensorConfig(activation_checkpointing="selective")}, 1e-4),
        ({"dtensor_cfg": DTensorConfig(torch_compile=True)}, 1e-4),
    ],
)
def test_a_step_on_the_device_is_the_step_on_the_host(llama: Path, changes: dict[str, Any], tolerance: float):
    on_host = run(llama, use_gpu=False)
    on_device = run(llama, use_gpu=True, **changes)
    for want, got in zip(on_host, on_device, strict=True):
        assert got.losses == pytest.approx(want.losses, rel=tolerance, abs=tolerance)
        assert got.grad_norms == pytest.approx(want.grad_norms, rel=tolerance)


def test_two_deterministic_runs_are_bitwise_equal(llama: Path) -> None:
    first = run(llama, use_gpu=True, deterministic=True, precision="bfloat16")
    second = run(llama, use_gpu=True, deterministic=True, precision="bfloat16")
    assert first == second

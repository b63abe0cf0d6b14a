"""Weights, optimizer state and reference weights of the PyTorch backend between device and host, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy import residency
from nemo_rl.models.policy.config import OptimizerConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.residency import HostMemory, MovedStorages
from nemo_rl.types import SamplingParams
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import LOSS, load_step, policy_config, worker_settings
from tests.worlds import run_world

HOST = torch.device("cpu")


def test_what_is_stored_comes_back_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "CHUNK_BYTES", 64)
    memory, tensors = HostMemory(HOST), [torch.arange(50.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0)]
    tensors.append(torch.arange(6.0).view(2, 3).t())
    starts = [memory.store(tensor) for tensor in tensors]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    for start, copy in zip(starts, copies, strict=True):
        memory.load(start, copy)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    chunks = [chunk.data_ptr() for chunk in memory._chunks]
    memory.clear()
    memory.store(torch.zeros(50))
    assert [chunk.data_ptr() for chunk in memory._chunks] == chunks, "memory of the host is kept"


def test_what_follows_a_part_that_has_left_comes_back_too() -> None:
    moved, first, second = MovedStorages(HOST), torch.ones(3), torch.full((2,), 5.0)
    moved.take([first], keep=True)
    moved.take([first, second], keep=True)
    moved.put_back()
    assert first.tolist() == [1, 1, 1] and second.tolist() == [5, 5]


def make_worker(path: Path, precision: str) -> DTensorPolicyWorker:
    adam = OptimizerConfig(kwargs={"lr": 1e-2})
    config = policy_config(precision=precision, optimizer=adam)
    settings = worker_settings(path, sampling=SamplingParams(max_new_tokens=16), init_reference_model=True)
    worker = DTensorPolicyWorker(config, settings)
    load_step(worker)
    return worker


def train(worker: DTensorPolicyWorker) -> None:
    worker.compute(Logprobs(), "prev_logprobs")
    worker.train(ClippedPGLoss(LOSS), Logprobs())


def held(worker: DTensorPolicyWorker) -> tuple[int, int]:
    """Bytes of weights and of optimizer state."""
    groups = worker._weights(), worker._optimizer_state()
    return tuple(sum(tensor.untyped_storage().nbytes() for tensor in group) for group in groups)  # type: ignore[return-value]


def two_steps(rank: int, world_size: int, path: Path, is_moved: bool) -> dict[str, torch.Tensor]:
    """Weights after two steps, between which the state left alone, then the weights, and both came back."""
    worker = make_worker(path, "float32")
    train(worker)
    if is_moved:
        weights, state = held(worker)
        assert weights > 0 and state > 0
        worker.residency.offload(with_weights=False)
        assert held(worker) == (weights, 0)
        exported = {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}
        worker.residency.offload()
        assert held(worker) == (0, 0)
        worker.residency.onload(with_optimizer=False)
        assert held(worker) == (weights, 0)
        assert all(torch.equal(tensor.gather(None), exported[tensor.name]) for tensor in worker._export())
        worker.residency.onload(with_optimizer=True)
        worker.residency.onload(with_optimizer=True)
        assert held(worker) == (weights, state)
    train(worker)
    return {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_after_an_absence_as_without(tmp_path: Path, world_size: int) -> None:
    save_model("llama", tmp_path)
    stayed, moved = (run_world(two_steps, world_size, tmp_path, is_moved)[0] for is_moved in (False, True))
    assert stayed.keys() == moved.keys() and all(torch.equal(stayed[name], moved[name]) for name in stayed)


def reference_logprobs(rank: int, world_size: int, path: Path, precision: str) -> tuple[bool, int, int]:
    worker = make_worker(path, precision)
    worker.compute(Logprobs(filtered=False), "first")
    train(worker)
    before = [weight.clone() for weight in worker._weights()]
    worker.compute_reference_logprobs()
    after = worker._weights()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    worker.compute(Logprobs(filtered=False), "later")
    rows = worker.rows.values()
    assert any(not torch.equal(row.columns["first"], row.columns["later"]) for row in rows), "the weights have moved"
    same = all(torch.equal(row.columns["first"], row.columns["reference_policy_logprobs"]) for row in rows)
    kept = worker.reference.__self__.initial._used  # type: ignore[union-attr]
    return same, kept, sum(shard.numel() for shard in worker._local_shards())


@pytest.mark.parametrize(("precision", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_reference_has_the_bits_of_the_first_weights(tmp_path: Path, precision: str, num_bytes: int) -> None:
    """In bfloat16 it is kept so, as the passes round the float32 weights to the same numbers."""
    save_model("llama", tmp_path)
    [(same, kept, number)] = run_world(reference_logprobs, 1, tmp_path, precision)
    assert same and kept == num_bytes * number

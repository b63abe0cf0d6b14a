"""Weights, gradients, optimizer state and reference weights between device and host come back as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.models.policy import residency
from nemo_rl.models.policy.config import OptimizerConfig, PolicyConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.residency import HostMemory, MovedStorages
from tests.unit.policy.steps import make_worker, megatron_policy, policy_config, train_step, whole_weights
from tests.worlds import in_new_process, run_world

Weights = dict[str, torch.Tensor]


def test_what_is_stored_comes_back_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "CHUNK_BYTES", 64)
    memory, tensors = HostMemory(torch.device("cpu")), [torch.arange(50.0), torch.ones(3, dtype=torch.bfloat16)]
    tensors += [torch.empty(0), torch.arange(6.0).view(2, 3).t()]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    for start, copy in zip([memory.store(tensor) for tensor in tensors], copies, strict=True):
        memory.load(start, copy)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    chunks = [chunk.data_ptr() for chunk in memory._chunks]
    memory.clear()
    memory.store(torch.zeros(50))
    assert [chunk.data_ptr() for chunk in memory._chunks] == chunks, "memory of the host is kept"
    MovedStorages(torch.device("cuda", 0)).take(tensors, keep=True)
    assert torch.equal(tensors[0], copies[0]), "nothing is taken from another device"


def config_of(backend: str, precision: str) -> PolicyConfig:
    if backend == "torch":
        return policy_config(precision=precision, optimizer=OptimizerConfig(kwargs={"lr": 1e-2}))
    return megatron_policy({"precision": precision}, transformer_impl="local", optimizer={"lr": 1e-3})


def held(worker: Any) -> tuple[int, int]:
    """Bytes of weights and, of the PyTorch backend, of optimizer state."""
    if worker.config.megatron_cfg.enabled:
        groups = [p for chunk in worker.chunks for p in chunk.module.parameters()], []
    else:
        groups = worker._weights(), worker._optimizer_state()
    weights, state = (sum(tensor.untyped_storage().nbytes() for tensor in group) for group in groups)
    return weights, state


def moved_about(worker: Any) -> None:
    """The state leaves alone, then the weights, and both come back piece by piece."""
    weights, state = held(worker)
    before = whole_weights(worker)
    if not worker.config.megatron_cfg.enabled:
        assert state > 0
        worker.residency.offload(with_weights=False)
        assert held(worker) == (weights, 0)
    worker.residency.offload()
    assert held(worker) == (0, 0)
    worker.residency.onload(with_optimizer=False)
    assert held(worker) == (weights, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_weights(worker).items())
    worker.residency.onload(with_optimizer=True)
    worker.residency.onload(with_optimizer=True)
    assert held(worker) == (weights, state)


@pytest.mark.parametrize(
    ("backend", "world_size", "precision"),
    [
        ("torch", 2, "float32"),
        ("megatron", 1, "float32"),
        pytest.param("megatron", 1, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_after_an_absence_as_without(models, backend, world_size, precision):
    path, config = models["llama" if backend == "torch" else "qwen2-tied"], config_of(backend, precision)

    def rank_main(rank: int, world: int) -> list[Weights]:
        found = []
        for is_moved in (False, True):
            worker = make_worker(path, config)
            train_step(worker)
            if is_moved:
                moved_about(worker)
            train_step(worker)
            found.append(whole_weights(worker))
            if backend == "megatron":
                worker.mesh.close()
        return found

    for stayed, moved in run_world(rank_main, world_size):
        assert stayed.keys() == moved.keys() and all(torch.equal(stayed[name], moved[name]) for name in stayed)


def test_the_reference_has_the_bits_of_the_first_weights(llama: Path) -> None:
    """In bfloat16 it is kept so, as the passes round the float32 weights to the same numbers."""

    def bytes_kept(precision: str) -> float:
        worker = make_worker(llama, config_of("torch", precision))
        train_step(worker)
        before = [weight.clone() for weight in worker._weights()]
        worker.compute_reference_logprobs()
        assert all(torch.equal(one, other) for one, other in zip(before, worker._weights(), strict=True))
        worker.compute(Logprobs(), "later")
        rows = [row.columns for row in worker.rows.values()]
        assert any(not torch.equal(row["prev_logprobs"], row["later"]) for row in rows), "the weights have moved"
        assert all(torch.equal(row["prev_logprobs"], row["reference_policy_logprobs"]) for row in rows)
        return worker.reference.__self__.initial._used / sum(s.numel() for s in worker._local_shards())

    assert run_world(lambda rank, world: [bytes_kept("float32"), bytes_kept("bfloat16")], 1) == [[4, 2]]


# -- on a GPU; that of the PyTorch backend is in test_policy_worker.py


def on_a_gpu(path: Path, is_moved: bool) -> Weights:
    """After two steps, on the host."""
    worker = make_worker(path, config_of("megatron", "bfloat16"), use_gpu=True)
    train_step(worker)
    if is_moved:
        present = torch.cuda.memory_allocated()
        worker.offload()
        assert torch.cuda.memory_allocated() < 0.1 * present
        worker.onload(with_optimizer=True)
    train_step(worker)
    return {name: tensor.cpu() for name, tensor in whole_weights(worker).items()}


@pytest.mark.gpu
def test_a_gpu_is_left_and_taken_again(qwen: Path) -> None:
    stayed, moved = (in_new_process(on_a_gpu, qwen, moves) for moves in (False, True))
    assert all(torch.equal(stayed[name], moved[name]) for name in stayed)

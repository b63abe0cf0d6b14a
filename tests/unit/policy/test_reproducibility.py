"""`policy.deterministic: true`: the same bits twice, and again after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import (
    DTensorConfig,
    LoRAConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
    SequencePackingConfig,
)
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.models import save_random_model
from tests.unit.policy.steps import LOSS, load_step, make_worker, policy_config, whole_weights
from tests.worlds import run_world

TP, SP, CP, PP = "tensor_parallel_size", "sequence_parallel", "context_parallel_size", "pipeline_parallel_size"
DROPPED = LoRAConfig(enabled=True, dim=4, alpha=8.0, dropout=0.2)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "cp-tp-sp": (4, {CP: 2, TP: 2, SP: True}),
    "lora with dropout": (2, {"lora_cfg": DROPPED}),
    "lora with dropout, pp-tp": (4, {PP: 2, TP: 2, "lora_cfg": DROPPED}),
}

Run = tuple[list[TrainResult], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_model("llama", path)
    return path


@pytest.fixture(autouse=True)
def determinism_ends_with_the_test() -> Iterator[None]:
    yield
    assert not torch.are_deterministic_algorithms_enabled(), "ranks are forked: nothing is left behind here"


def config_of(settings: dict[str, Any], **changes: Any) -> PolicyConfig:
    return policy_config(
        deterministic=True,
        dtensor_cfg=DTensorConfig(**settings),
        sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=70),
        optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 5e-4, "weight_decay": 0.1}),
        scheduler=[SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"total_iters": 6})],
        **changes,
    )


def train_once(worker: DTensorPolicyWorker) -> TrainResult:
    load_step(worker, worker.config)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    return worker.train(ClippedPGLoss(LOSS), Logprobs())


def goes_on(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path) -> Run:
    """Two optimizer steps, a checkpoint, and two more."""
    worker = make_worker(path, config)
    results = [train_once(worker)]
    worker.save_checkpoint(directory, SaveRequest(model_save_format="safetensors"))
    results.append(train_once(worker))
    return results, whole_weights(worker)


def resumes(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path) -> Run:
    worker = make_worker(path, config)
    worker.load_checkpoint(directory, load_optimizer=True)
    return [train_once(worker)], whole_weights(worker)


def assert_bitwise(got: Run, want: Run) -> None:
    assert got[0] == want[0], "losses, gradient norms and metrics"
    assert all(torch.equal(weight, want[1][name]) for name, weight in got[1].items())


SLOW = ("cp-tp-sp", "lora with dropout, pp-tp")


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_two_runs_and_a_resumed_one_are_bitwise_equal(llama: Path, tmp_path: Path, layout: str) -> None:
    world, settings = LAYOUTS[layout]
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = run_world(goes_on, world, llama, config_of(settings), tmp_path / "first")
    second = run_world(goes_on, world, llama, config_of(settings), tmp_path / "second")
    resumed = run_world(resumes, world, llama, config_of(settings), tmp_path / "first")
    for one, other, late in zip(first, second, resumed, strict=True):
        assert one[0][0].losses != one[0][1].losses
        assert_bitwise(other, one)
        assert_bitwise(late, (one[0][1:], one[1]))


def test_a_resume_without_the_optimizers_state_is_found(llama: Path, tmp_path: Path) -> None:
    def forgets(rank: int, world: int) -> TrainResult:
        worker = make_worker(llama, config_of({}))
        worker.load_checkpoint(tmp_path, load_optimizer=False)
        return train_once(worker)

    want = run_world(goes_on, 1, llama, config_of({}), tmp_path)[0][0][1]
    got = run_world(forgets, 1)[0]
    assert got.losses[0] == want.losses[0]
    assert abs(got.losses[1] - want.losses[1]) > 1e-4

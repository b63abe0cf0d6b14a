"""Compiled transformer blocks against the same blocks as they are, on the CPU: losses and weights of two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, SequencePackingConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import SamplingParams
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import LOSS, load_step, policy_config, worker_settings
from tests.worlds import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def two_steps(
    rank: int, world_size: int, path: Path, compiled: bool, recomputes: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = policy_config(
        dtensor_cfg=DTensorConfig(torch_compile=compiled, activation_checkpointing=recomputes),
        sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=70),
    )
    settings = worker_settings(path, sampling=SamplingParams(max_new_tokens=16, temperature=0.8))
    worker = DTensorPolicyWorker(config, settings)
    losses = []
    for _ in range(2):
        load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        result = worker.train(ClippedPGLoss(LOSS), Logprobs())
        losses += [*result.losses, *result.grad_norms]
    return losses, {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}


@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_blocks_give_the_same_numbers(tmp_path: Path, recomputes: bool) -> None:
    save_model("llama", tmp_path)
    [(plain, expected)] = run_world(two_steps, 1, tmp_path, False, recomputes)
    [(compiled, weights)] = run_world(two_steps, 1, tmp_path, True, recomputes, timeout=500)
    assert compiled == pytest.approx(plain, rel=1e-5, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)

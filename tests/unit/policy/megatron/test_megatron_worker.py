"""What a worker of the Megatron backend does with losses that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronOptimizerConfig
from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker
from nemo_rl.types import SamplingParams, TrainResult
from tests.unit.policy.steps import LOSS, load_step, make_groups, policy_config, save_model, worker_settings
from tests.unit.policy.test_policy_worker import NanLoss
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def make_worker(path: Path, layout: dict[str, Any]) -> MegatronPolicyWorker:
    optimizer = MegatronOptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0)
    config = policy_config(
        nonfinite_action="skip",
        train_micro_batch_size=1,
        train_global_batch_size=16,
        dtensor_cfg=DTensorConfig(enabled=False),
        optimizer=None,
        megatron_cfg=MegatronConfig(enabled=True, optimizer=optimizer, **layout),
    )
    settings = worker_settings(path, sampling=SamplingParams(max_new_tokens=16), init_reference_model=True)
    worker = MegatronPolicyWorker(config, settings)
    load_step(worker, config)
    worker.compute_reference_logprobs()
    return worker


def weights(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}


def trained(
    rank: int, world_size: int, path: Path, layout: dict[str, Any], comes_nan: bool
) -> tuple[TrainResult | None, dict[str, torch.Tensor]]:
    """A step, before which may come one with a loss that is not finite, which leaves no trace."""
    worker = make_worker(path, layout)
    bad = None
    if comes_nan:
        before = weights(worker)
        bad = worker.train(NanLoss(), Logprobs())
        after = weights(worker)
        assert all(torch.equal(before[name], after[name]) for name in before)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.train(ClippedPGLoss(LOSS), Logprobs())
    return bad, weights(worker)


@pytest.mark.parametrize(
    "layout", [name if name == "dp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_loss_that_is_not_finite_leaves_no_trace_and_names_its_samples(tmp_path, layout):
    save_model("llama", tmp_path)
    without = run_world(trained, 2, tmp_path, LAYOUTS[layout], False)
    with_it = run_world(trained, 2, tmp_path, LAYOUTS[layout], True)
    _, groups = make_groups()
    guilty = {s.meta.sample_id for group in groups for s in group.samples if (s.token_ids == 7).any()}
    results = [result for result, _ in with_it]
    assert 0 < len(guilty) < 16
    assert {name for result in results for name in result.nonfinite_samples} == guilty
    assert [result.num_skipped_steps for result in results] == [1, 1]
    for (_, want), (_, got) in zip(without, with_it, strict=True):
        assert all(torch.equal(want[name], got[name]) for name in want)

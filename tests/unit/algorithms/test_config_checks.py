"""The metric names that the configuration accepts are those that a run computes."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.batch import Batching, packing_metrics, plan_batch
from nemo_rl.algorithms.trainers.metrics import rollout_metrics, validation_metrics
from nemo_rl.types import GroupHandle, PolicyGradientInputs, SampleMeta, SampleStatus
from tests.unit.config.run_configs import build


def one_group(num_samples: int) -> GroupHandle:
    samples = [
        SampleMeta(
            sample_id=f"0/{index}",
            status=SampleStatus.COMPLETED,
            length=5,
            num_prompt_tokens=2,
            num_generated_tokens=3,
            num_turns=1,
            reward=float(index % 2),
            weight_version=0,
        )
        for index in range(num_samples)
    ]
    return GroupHandle(group_id="0", prompt_id="p", task_name="math", ref=None, samples=samples)


def test_validation_metrics() -> None:
    config = build("grpo.val_num_generations_per_prompt=6")
    computed = validation_metrics([one_group(6)], k_values=config.grpo.val_k_values)
    assert config.val_metrics == set(computed)


def test_rollout_metrics() -> None:
    assert set(rollout_metrics([one_group(2)], current_weight_version=0)) <= build().train_metrics


@pytest.mark.parametrize("section", [None, "sequence_packing", "dynamic_batching"])
def test_packing_metrics(section: str | None) -> None:
    switch = () if section is None else (f"policy.{section}.enabled=true",)
    batching = Batching.of(build(*switch).policy, quadratic_weight=1e-4)
    plan = plan_batch([one_group(4)], [[0.0] * 4], [[1.0] * 4], num_ranks=1, global_batch_size=4, batching=batching)
    assert set(packing_metrics(plan, batching)) <= build().train_metrics


def test_loss_metrics() -> None:
    ones = torch.ones(1, 3)
    inputs = PolicyGradientInputs(
        input_ids=torch.zeros(1, 3, dtype=torch.int64),
        token_mask=ones,
        sample_mask=torch.ones(1),
        advantages=ones,
        prev_logprobs=-ones,
        generation_logprobs=-ones,
        reference_policy_logprobs=-ones,
    )
    _, metrics = ClippedPGLoss(ClippedPGLossConfig())(-ones, inputs, torch.tensor(1.0), torch.tensor(3.0))
    assert set(metrics) <= build().train_metrics

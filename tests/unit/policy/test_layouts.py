"""The same step, whatever direction the model and the batch are cut in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.models.policy.config import (
    DTensorConfig,
    DynamicBatchingConfig,
    PipelineConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_rl.types import TrainResult
from tests.unit.policy.models import save_random_model
from tests.unit.policy.steps import one_step, policy_config
from tests.worlds import run_world

Step = tuple[TrainResult, dict[str, torch.Tensor]]

PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=70)}
DYNAMIC = {
    "dynamic_batching": DynamicBatchingConfig(
        enabled=True, train_mb_tokens=64, logprob_mb_tokens=96, sequence_length_round=8
    )
}
PADDED = {"padding_free": False}


def cut(**settings: Any) -> dict[str, Any]:
    return {"dtensor_cfg": DTensorConfig(**settings)}


def pipe(schedule: str = "1f1b", stages: int = 1) -> PipelineConfig:
    return PipelineConfig.model_validate({"schedule": schedule, "stages_per_rank": stages})


TP, SP, CP, PP = "tensor_parallel_size", "sequence_parallel", "context_parallel_size", "pipeline_parallel_size"

LAYOUTS = {
    "packed": (1, PACKED),
    "padded": (1, PADDED),
    "dynamic": (2, DYNAMIC | PADDED),
    "packed-dp2": (2, PACKED),
    "hsdp-packed": (4, PACKED | cut(dp_replicate_size=2)),
    "tp": (2, cut(**{TP: 2})),
    "tp-packed": (2, PACKED | cut(**{TP: 2})),
    "tp-sp-packed": (2, PACKED | cut(**{TP: 2, SP: True})),
    "tp-sp-padded-dp2": (4, PADDED | cut(**{TP: 2, SP: True})),
    "cp-packed": (2, PACKED | cut(**{CP: 2})),
    "cp-padded": (2, PADDED | cut(**{CP: 2})),
    "cp-packed-dp2": (4, PACKED | cut(**{CP: 2})),
    "tp-cp-packed": (4, PACKED | cut(**{TP: 2, CP: 2, SP: True})),
    "pp-packed": (2, PACKED | cut(**{PP: 2})),
    "pp-gpipe-dp2": (4, cut(**{PP: 2}, pipeline=pipe("gpipe"))),
    "pp-tp-packed": (4, PACKED | cut(**{PP: 2, TP: 2})),
    "pp-cp-padded": (4, PADDED | cut(**{PP: 2, CP: 2})),
    "recompute": (2, PACKED | cut(activation_checkpointing=True)),
    "recompute-products-kept": (1, PACKED | cut(activation_checkpointing="selective")),
    "offloaded": (2, PACKED | cut(cpu_offload=True)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_model("llama", path)
    return path


@pytest.fixture(scope="module")
def alone(llama: Path) -> Step:
    """One rank, one padded micro-batch per optimizer step: nothing was cut."""
    return run_world(one_step, 1, llama, policy_config(train_micro_batch_size=8, **PADDED))[0]


def assert_same(got: Step, want: Step) -> None:
    result, weights = got
    expected, expected_weights = want
    assert result.losses == pytest.approx(expected.losses, abs=1e-6)
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=2e-6)
    assert result.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=5e-6, abs=2e-6), name
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert (weight - expected_weights[name]).abs().max() < 2e-6, name


def settings_of(changes: dict[str, Any]) -> PolicyConfig:
    return policy_config(train_micro_batch_size=2, **changes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_does_not_depend_on_the_layout(llama: Path, alone: Step, name: str) -> None:
    world, changes = LAYOUTS[name]
    for step in run_world(one_step, world, llama, settings_of(changes)):
        assert_same(step, alone)

"""What Megatron's students and teachers say of tokens in distillation, next to the PyTorch backend's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.distillation import (
    TEACHER_STATES,
    TEACHER_TOPK,
    FullKL,
    LastStates,
    StoredHead,
    TopKLogits,
    TopKLogprobs,
)
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker
from tests.unit.policy.models import VOCAB, save_random_model
from tests.unit.policy.steps import load_step, policy_config, worker_settings
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2, by position": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


def tasks(teacher: Path) -> dict[str, HeadTask]:
    """Column -> task, in the order in which they need one another. The head of the KL is another model's."""
    head = StoredHead.of(AutoConfig.from_pretrained(teacher), str(teacher), "float32")
    return {
        TEACHER_TOPK: TopKLogits(k=5, vocab_size=VOCAB),
        "topk_logprobs": TopKLogprobs(k=5),
        TEACHER_STATES: LastStates(hidden_size=64, precision="float32"),
        "kl": FullKL(teacher=head, vocab_size=VOCAB),
    }


def columns(rank: int, world_size: int, student: Path, teacher: Path, layout: dict[str, Any] | None) -> dict[str, Any]:
    """Every column of every row; `layout` None: of the PyTorch backend."""
    settings = worker_settings(student, init_optimizer=False)
    if layout is None:
        config = policy_config()
        worker = DTensorPolicyWorker(config, settings)
    else:
        megatron = MegatronConfig(enabled=True, **layout)
        config = policy_config(dtensor_cfg=DTensorConfig(enabled=False), optimizer=None, megatron_cfg=megatron)
        worker = MegatronPolicyWorker(config, settings)
    load_step(worker, config)
    for column, task in tasks(teacher).items():
        worker.compute(task, column)
    return {f"{key}/{column}": row.columns[column] for key, row in worker.rows.items() for column in tasks(teacher)}


@pytest.mark.parametrize(
    "layout", [name if name.startswith("tp") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_columns_are_those_of_the_pytorch_backend(tmp_path, layout):
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    save_random_model("llama", student)
    save_random_model("qwen2-tied", teacher, seed=1)
    (want,) = run_world(columns, 1, student, teacher, None)
    assert max(values[:, 0].max() for key, values in want.items() if key.endswith("/kl")) > 0.1
    for found in run_world(columns, 2, student, teacher, LAYOUTS[layout]):
        assert found.keys() == want.keys()
        for key, values in found.items():
            torch.testing.assert_close(values, want[key], rtol=1e-5, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}")

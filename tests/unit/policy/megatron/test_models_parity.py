"""Every architecture and setting of a model that the mapping knows: logprobs and a step as the other backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronOptimizerConfig
from tests.unit.policy.megatron.hf_models import random_model
from tests.unit.policy.models import VOCAB
from tests.unit.policy.steps import LOSS, load_step, policy_config, worker_settings
from tests.worlds import run_world

pytest.importorskip("megatron.core")

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "window": ("mistral", {"sliding_window": 5}),
    "window-by-layer": (
        "qwen2-tied",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "mixtral": ("mixtral", {"sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-plain": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v2": ("deepseek_v2", {"rms_norm_eps": 1e-3, "routed_scaling_factor": 1.5}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {**GROUPS, "q_lora_rank": 16, "topk_method": "group_limited_greedy", "rope_parameters": LATENT_YARN},
    ),
    "latent-dense": ("deepseek_v3", {"first_k_dense_replace": 2, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3-groups": ("deepseek_v3", {**GROUPS, "n_group": 2, "topk_group": 1, "rope_parameters": YARN}),
}


@dataclass
class Outcome:
    """What a step came to on a rank."""

    losses: list[float]
    grad_norms: list[float]
    logprobs: dict[str, torch.Tensor] = field(repr=False)
    weights: dict[str, torch.Tensor] = field(repr=False)


def save(name: str, path: Path) -> Path:
    family, changes = MODELS[name]
    random_model(family, vocab_size=VOCAB, **changes).save_pretrained(path)
    return path


def megatron_config(**layout: Any) -> PolicyConfig:
    sgd = MegatronOptimizerConfig(
        optimizer="sgd", sgd_momentum=0.0, lr=0.1, weight_decay=0.0, use_distributed_optimizer=False
    )
    megatron = MegatronConfig(enabled=True, freeze_moe_router=False, optimizer=sgd, **layout)
    return policy_config(
        dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=megatron, optimizer=None, padding_free=None
    )


def step_of(worker: Any, config: PolicyConfig) -> Outcome:
    load_step(worker, config)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute(Logprobs(), "reference_policy_logprobs")
    logprobs = {key: row.columns["prev_logprobs"].clone() for key, row in worker.rows.items()}
    result = worker.train(ClippedPGLoss(LOSS), Logprobs())
    with torch.no_grad():
        weights = {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}
    return Outcome(result.losses, result.grad_norms, logprobs, weights)


def with_dtensor(rank: int, world: int, path: Path) -> Outcome:
    config = policy_config()
    return step_of(DTensorPolicyWorker(config, worker_settings(path)), config)


def with_megatron(rank: int, world: int, path: Path, layout: dict[str, Any]) -> Outcome:
    from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

    config = megatron_config(**layout)
    return step_of(MegatronPolicyWorker(config, worker_settings(path)), config)


def check(name: str, path: Path, world: int, layout: dict[str, Any]) -> None:
    """One step of both backends, from the same weights, on the same rollouts."""
    [reference] = run_world(with_dtensor, 1, save(name, path))
    for outcome in run_world(with_megatron, world, path, layout):
        for key, logprobs in outcome.logprobs.items():
            torch.testing.assert_close(logprobs, reference.logprobs[key], rtol=0, atol=1e-5)
        assert outcome.weights.keys() == reference.weights.keys()
        for key, weight in outcome.weights.items():
            torch.testing.assert_close(
                weight, reference.weights[key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
        assert outcome.losses == pytest.approx(reference.losses, abs=1e-5)
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)


@pytest.mark.parametrize(
    "name", [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_one_rank(name, tmp_path):
    check(name, tmp_path, 1, {})


TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}


STAGES, CONTEXT = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EXPERTS, CUT_EXPERTS = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek_v2", SEQUENCE),
        ("deepseek_v3", STAGES),
        ("deepseek_v3", CONTEXT),
        ("mixtral", CONTEXT),
        ("window-by-layer", SEQUENCE),
        ("window-by-layer", STAGES),
        ("deepseek_v2-groups", EXPERTS),
        ("deepseek_v3-groups", {**SEQUENCE, **EXPERTS}),
        ("mixtral", {**SEQUENCE, **CUT_EXPERTS}),
        ("qwen3_moe", {**SEQUENCE, **EXPERTS}),
        ("latent-dense", TENSOR),
        ("yarn", TENSOR),
    ],
)
def test_two_ranks(name, layout, tmp_path):
    check(name, tmp_path, 2, layout)

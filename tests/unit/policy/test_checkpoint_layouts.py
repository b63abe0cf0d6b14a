"""A worker saved on one layout continues on another, whatever is cut, and also when it trained on meanwhile."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, OptimizerConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.models import VOCAB, save_random_model
from tests.unit.policy.steps import LOSS, load_step, make_worker, policy_config, whole_weights
from tests.worlds import run_world

MOMENTUM = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})
FORMAT = SaveRequest(in_background=True)
TP, CP, PP, EP, COPIES = (
    f"{axis}_size"
    for axis in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "dp_replicate")
)
Layout = tuple[int, dict[str, Any]]


def config_of(layout: dict[str, Any]) -> PolicyConfig:
    return policy_config(optimizer=MOMENTUM, dtensor_cfg=DTensorConfig(**layout))


def train_once(worker: DTensorPolicyWorker) -> TrainResult:
    load_step(worker, worker.config)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    return worker.train(ClippedPGLoss(LOSS), Logprobs())


def finish(worker: DTensorPolicyWorker) -> None:
    ended: Any = worker.finish_save_checkpoint()
    if inspect.iscoroutine(ended):
        asyncio.run(ended)


def goes_on(rank: int, world: int, path: Path, layout: dict[str, Any], directory: Path) -> Any:
    worker = make_worker(path, config_of(layout))
    train_once(worker)
    worker.save_checkpoint(directory, FORMAT)
    result = train_once(worker)
    finish(worker)
    return result.losses, whole_weights(worker)


def resumes(rank: int, world: int, path: Path, layout: dict[str, Any], directory: Path) -> Any:
    worker = make_worker(path, config_of(layout))
    worker.load_checkpoint(directory, load_optimizer=True)
    return train_once(worker).losses, whole_weights(worker)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_random_model("llama", path / "llama")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path / "moe")
    return path


LORA = {
    "lora_cfg": LoRAConfig(enabled=True, dim=4, alpha=8, match_all_linear=False, target_modules=["q_proj", "down_proj"])
}


@pytest.mark.parametrize(
    ("family", "saved_on", "resumed_on"),
    [
        ("llama", (2, {TP: 2}), (2, {})),
        pytest.param("llama", (2, {PP: 2}), (2, {TP: 2}), marks=pytest.mark.slow),
        pytest.param("llama", (4, {CP: 2, COPIES: 2}), (2, {PP: 2}), marks=pytest.mark.slow),
        pytest.param("llama", (2, {TP: 2} | LORA), (2, LORA), marks=pytest.mark.slow),
        pytest.param("moe", (4, {EP: 2}), (2, {}), marks=pytest.mark.slow),
        ("moe", (1, {}), (2, {EP: 2})),
    ],
)
def test_a_policy_resumes_on_another_layout(models, tmp_path, family, saved_on: Layout, resumed_on: Layout):
    world, layout = saved_on
    want, want_weights = run_world(goes_on, world, models / family, layout, tmp_path)[0]
    world, layout = resumed_on
    got, got_weights = run_world(resumes, world, models / family, layout, tmp_path)[0]
    assert got == pytest.approx(want, rel=1e-6, abs=1e-7)
    assert got_weights.keys() == want_weights.keys()
    for name, weight in want_weights.items():
        torch.testing.assert_close(got_weights[name], weight, rtol=1e-4, atol=1e-5)

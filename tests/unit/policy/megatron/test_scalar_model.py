"""Reward and value models of the Megatron backend: what they say, what they learn, how they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from nemo_rl.models.policy.batch.microbatches import Row, scored_sequences
from nemo_rl.models.policy.config import DTensorConfig, RewardModelConfig
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, draw_head
from nemo_rl.models.policy.head.tasks import Scalars
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronOptimizerConfig
from nemo_rl.models.policy.megatron.files import DIRECTORY
from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker
from nemo_rl.types import SamplingParams
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.steps import policy_config, worker_settings
from tests.unit.policy.test_reward_model import LENGTHS, WEIGHTS, reference, save_reward_model, sequences
from tests.worlds import run_world

LEARNING_RATE = 0.1
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2, by position": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


def make_worker(path: Path, **layout: Any) -> MegatronPolicyWorker:
    optimizer = MegatronOptimizerConfig(
        optimizer="sgd", sgd_momentum=0.0, lr=LEARNING_RATE, weight_decay=0.0, use_distributed_optimizer=False
    )
    config = policy_config(
        model_name=str(path),
        reward_model_cfg=RewardModelConfig(enabled=True),
        dtensor_cfg=DTensorConfig(enabled=False),
        optimizer=None,
        max_grad_norm=None,
        megatron_cfg=MegatronConfig(enabled=True, optimizer=optimizer, **layout),
    )
    settings = worker_settings(path, sampling=SamplingParams(max_new_tokens=1), seed=5, pad_token_id=0)
    return MegatronPolicyWorker(config, settings)


def exported(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}


def scores_and_weights(
    rank: int, world_size: int, path: Path, layout: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The scores of all sequences, in micro-batches of two, and the weights after a step."""
    worker = make_worker(path, **layout)
    parts = [[0, 1], [2, 3]]
    batches = []
    for part in parts:
        rows = [
            Row(sample_id="", token_ids=ids, token_mask=ids > 0, mask=1.0) for ids in (sequences()[r] for r in part)
        ]
        batches.append(worker.layout.build(scored_sequences(rows, last_token_only=True, pad_token_id=0)))
    scores = [values.sum().item() for out in worker.runner.forward(batches, Scalars()) for values in out]
    worker.runner.train(batches, lambda number, out: (out.sum(1) * WEIGHTS[parts[number]]).sum(), Scalars())
    worker._clip()
    worker._take_step()
    return scores, exported(worker)


@pytest.mark.parametrize(
    "layout", [name if name.startswith("tp") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
@pytest.mark.parametrize("family", ["qwen2-tied", pytest.param("llama", marks=pytest.mark.slow)])
def test_scores_and_a_step_equal_those_of_transformers(tmp_path, family, layout):
    save_reward_model(family, tmp_path)
    want_scores, gradients = reference(tmp_path)
    before = run_world(lambda rank, size: exported(make_worker(tmp_path)), 1)[0]
    for scores, weights in run_world(scores_and_weights, 2, tmp_path, LAYOUTS[layout]):
        assert scores == pytest.approx(want_scores.tolist(), abs=1e-5)
        assert weights.keys() == gradients.keys() == before.keys() and HEAD_WEIGHT in weights
        for name, weight in weights.items():
            step = LEARNING_RATE * gradients[name]
            torch.testing.assert_close(weight, before[name] - step, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: n + m)
    assert len(LENGTHS) == len(want_scores)


def test_a_language_model_gets_the_head_that_is_drawn_from_the_seed(tmp_path):
    save_reward_model("qwen2-tied", tmp_path)
    (weights,) = run_world(lambda rank, size: exported(make_worker(tmp_path / "lm")), 1)
    want = torch.empty(1, 64)
    draw_head(want, AutoConfig.from_pretrained(tmp_path / "lm"), seed=5)
    assert torch.equal(weights[HEAD_WEIGHT], want) and "lm_head.weight" not in weights


@pytest.mark.parametrize("directory", ["", "lm"], ids=["reward model", "language model"])
def test_torch_files_are_read(tmp_path, monkeypatch, directory):
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "converted"))
    save_reward_model("qwen2-tied", tmp_path)
    file = tmp_path / directory / "model.safetensors"
    (want,) = run_world(lambda rank, size: exported(make_worker(file.parent)), 1)
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    (got,) = run_world(lambda rank, size: exported(make_worker(file.parent)), 1)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def saved(rank: int, world_size: int, path: Path, checkpoint: Path, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    worker = make_worker(path, **layout)
    worker.save_checkpoint(checkpoint, SaveRequest(save_consolidated=True))
    return exported(worker)


def resumed(rank: int, world_size: int, path: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    worker = make_worker(path)
    worker.load_checkpoint(checkpoint, load_optimizer=True)
    return exported(worker)


def test_a_saved_score_is_read_on_other_ranks_and_by_transformers(tmp_path):
    """Training began from a language model: the score is in no other file."""
    save_reward_model("qwen2-tied", tmp_path)
    checkpoint = tmp_path / "step_1"
    checkpoint.mkdir()
    (saved_weights, _) = run_world(saved, 2, tmp_path, checkpoint, LAYOUTS["tp2, by position"])
    (resumed_weights,) = run_world(resumed, 1, tmp_path / "lm", checkpoint)
    assert saved_weights.keys() == resumed_weights.keys()
    assert all(torch.equal(weight, resumed_weights[name]) for name, weight in saved_weights.items())
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint / "policy" / "weights" / "consolidated")
    assert torch.equal(model.score.weight, saved_weights[HEAD_WEIGHT])

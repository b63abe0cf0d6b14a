"""Models with one number for a head: what they say, how they are made, saved and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from nemo_rl.models.policy.checkpoint import full_tensor
from nemo_rl.models.policy.config import DTensorConfig, RewardModelConfig
from nemo_rl.models.policy.dtensor_policy_worker import DTensorPolicyWorker, PolicyWorkerSettings
from nemo_rl.models.policy.head_tasks import Scalars
from nemo_rl.models.policy.microbatches import Row, scored_sequences
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.types import SamplingParams
from tests.unit.policy.models import FAMILIES, VOCAB, save_random_model
from tests.unit.policy.steps import policy_config
from tests.worlds import run_world

LENGTHS = [17, 6, 11, 3]
WEIGHTS = torch.tensor([0.7, -1.3, 0.4, 2.0])  # of the rows in the loss: a gradient that no mistake cancels
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"activation_checkpointing": True}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2, by position": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}


def save_reward_model(family: str, directory: Path) -> None:
    save_random_model(family, directory / "lm")
    model = AutoModelForSequenceClassification.from_pretrained(directory / "lm", num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, 64, generator=generator) * 0.3)
    model.save_pretrained(directory)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in LENGTHS]


def make_worker(path: Path, kind: str = "bradley_terry", **changes: Any) -> DTensorPolicyWorker:
    config = policy_config(
        model_name=str(path), reward_model_cfg=RewardModelConfig(enabled=True, reward_model_type=kind), **changes
    )
    settings = PolicyWorkerSettings(
        model_path=str(path),
        sampling=SamplingParams(max_new_tokens=1),
        use_gpu=False,
        workers_per_node=8,
        init_reference_model=False,
        init_optimizer=True,
        seed=0,
        pad_token_id=0,
    )
    return DTensorPolicyWorker(config, settings)


def rows_of(worker: DTensorPolicyWorker) -> list[int]:
    share = len(LENGTHS) // worker.mesh.sizes.data_parallel
    return list(range(len(LENGTHS)))[worker.mesh.data_rank * share :][:share]


def scores_and_gradients(worker: DTensorPolicyWorker) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Scores of this rank's rows, in micro-batches of two, and the whole gradients of its tensors."""
    rows = rows_of(worker)
    parts = [rows[:2], rows[2:]] if len(rows) > 2 else [rows[:1], rows[1:]]
    batches = []
    for part in parts:
        held = [
            Row(sample_id="", token_ids=ids, token_mask=ids > 0, mask=1.0) for ids in (sequences()[r] for r in part)
        ]
        batches.append(worker.layout.build(scored_sequences(held, last_token_only=True, pad_token_id=0)))
    scores = {}
    for part, out in zip(parts, worker.runner.forward(batches, Scalars()), strict=True):
        assert out.dtype == torch.float32
        for row, values in zip(part, out, strict=True):
            assert values.count_nonzero() == 1 and values[LENGTHS[row] - 1] != 0
            scores[row] = values.sum().item()
    worker.runner.train(batches, lambda number, out: (out.sum(1) * WEIGHTS[parts[number]]).sum(), Scalars())
    grads = {
        name: full_tensor(tensor.grad)
        for stage in worker.stages
        for name, tensor in named_tensors(stage.hf)
        if tensor.grad is not None
    }
    return scores, grads


def right_padded() -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(sequences(), batch_first=True, padding_value=0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def reference(path: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    scores = model(**right_padded()).logits[:, 0]
    (scores * WEIGHTS).sum().backward()
    return scores.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in directories.items():
        save_reward_model(family, directory)
    return directories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradients_equal_those_of_transformers(reward_models, layout):
    world_size, cut = LAYOUTS[layout]

    def rank_main(rank: int, world: int) -> list[tuple[dict[int, float], dict[str, torch.Tensor]]]:
        config = DTensorConfig(**cut)
        return [scores_and_gradients(make_worker(reward_models[f], dtensor_cfg=config)) for f in FAMILIES]

    results = run_world(rank_main, world_size)
    for number, family in enumerate(FAMILIES):
        want, want_grads = reference(reward_models[family])
        found: dict[str, torch.Tensor] = {}
        for scores, grads in (result[number] for result in results):
            for row, score in scores.items():
                assert score == pytest.approx(want[row].item(), rel=1e-5, abs=1e-5), (family, row)
            found |= grads
        assert set(found) == set(want_grads)
        for name, grad in found.items():
            assert (grad - want_grads[name]).norm() <= 1e-5 * want_grads[name].norm() + 1e-7, (family, name)

"""Routing replay: logprobs and training with the experts that generation chose; transformers, forced, has the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.batch.microbatches import Row
from nemo_rl.models.policy.config import RouterReplayConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from tests.unit.policy.models import VOCAB, save_model
from tests.unit.policy.steps import LOSS, Step, load_step, logprobs_of, make_worker, whole_weights
from tests.worlds import run_world

pytest.importorskip("megatron.core")

from tests.unit.policy.megatron.parity import Layout, distances

LAYERS, EXPERTS, TOP_K = 2, 4, 2
FAILED, UNRECORDED = "1/2", "3/0"
REPLAY = {"router_replay": RouterReplayConfig(enabled=True)}


def random_experts(row: Row) -> torch.Tensor | None:
    """Of all tokens but the last, whose state nobody needs; of one sample of none. uint8 [T - 1, LAYERS, TOP_K]."""
    if row.sample_id == UNRECORDED:
        return None
    generator = torch.Generator().manual_seed(crc32(row.sample_id.encode()))
    scores = torch.rand(len(row.token_ids) - 1, LAYERS, EXPERTS, generator=generator)
    return scores.topk(TOP_K).indices.to(torch.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-moe")
    save_model("qwen3-moe", path)
    return path


def replayed(path: Path, layout: Layout) -> list[tuple[Step, dict[str, Row]]]:
    """The steps of every rank with `random_experts`, and the rows it had."""
    config = layout.config()

    def on_rank(rank: int, world: int) -> tuple[Step, dict[str, Row]]:
        worker = make_worker(path, config)
        load_step(worker)
        for row in worker.rows.values():
            row.routed_experts = random_experts(row)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        logprobs = logprobs_of(worker)
        result = worker.train(ClippedPGLoss(LOSS), Logprobs())
        step = Step(result=result, weights=whole_weights(worker), logprobs=logprobs)
        return step, {row.sample_id: row for row in worker.rows.values()}

    return run_world(on_rank, layout.world, timeout=120)


def logprobs_of_transformers(path: Path, row: Row, experts: torch.Tensor | None) -> torch.Tensor:
    """Of each token of the row, at the temperature of the tests, with `experts` forced upon the routers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")

    def force(layer: int) -> Any:
        def hook(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, weights, indices = output
            if experts is None:
                return output
            taken = experts[:, layer].long()
            indices = torch.cat([taken, indices[len(taken) :]])
            weights = logits.softmax(-1).gather(1, indices)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        return hook

    for layer in range(LAYERS):
        model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(force(layer))
    with torch.no_grad():
        logits = model(input_ids=row.token_ids[None]).logits[0, :-1, :VOCAB] / 0.8
    found = logits.log_softmax(-1).gather(1, row.token_ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found]) * row.token_mask


def test_logprobs_are_those_with_the_given_experts_and_the_reference_keeps_its_own(model):
    [(step, rows)] = replayed(model, Layout(world=1, policy=REPLAY, megatron={"moe_per_layer_logging": True}))
    changed = 0.0
    for sample_id in ("0/0", "2/1", FAILED, UNRECORDED):
        row = rows[sample_id]
        forced = logprobs_of_transformers(model, row, random_experts(row))
        own = logprobs_of_transformers(model, row, None)
        torch.testing.assert_close(step.logprobs[sample_id][0], forced, rtol=0, atol=1e-5)
        torch.testing.assert_close(step.logprobs[sample_id][1], own, rtol=0, atol=1e-5)
        changed = max(changed, float((forced - own).abs().max()))
    assert changed > 0.1, "the experts make a difference"
    metrics = step.result.metrics
    tokens = sum(len(row.token_ids) for row in rows.values())
    recorded = sum(len(row.token_ids) - 1 for row in rows.values() if row.sample_id != UNRECORDED)
    # Two optimizer steps, each of which reports its own part of the tokens.
    assert metrics["moe/replayed_fraction"] == pytest.approx(recorded / tokens, abs=0.1)
    assert 0.0 < metrics["moe/replay_agreement"] < 0.5
    by_layer = [metrics[f"moe/layer_{layer}/replay_agreement"] for layer in range(LAYERS)]
    assert sum(by_layer) / LAYERS == pytest.approx(metrics["moe/replay_agreement"])


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
    (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    (1, {"activation_checkpointing": True}),
    (2, {"pipeline_model_parallel_size": 2, "activation_checkpointing": True}),
    (
        2,
        {"pipeline_model_parallel_size": 2, "activation_checkpointing": True}
        | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "megatron"), LAYOUTS)
def test_training_with_given_experts_is_the_same_in_every_layout_and_when_recomputed(model, world, megatron):
    policy = REPLAY | {"make_sequence_length_divisible_by": 8}
    [(want, _)] = replayed(model, Layout(world=1, policy=policy))
    ranks = [step for step, _ in replayed(model, Layout(world=world, megatron=megatron, policy=policy))]
    off = distances(ranks, want)
    assert max(off.logprobs, off.loss, off.grad_norm) <= 1e-5
    assert off.weights <= 1e-6
    for step in ranks:
        for name in ("moe/replayed_fraction", "moe/replay_agreement", "moe/load_max_over_mean"):
            assert step.result.metrics[name] == pytest.approx(want.result.metrics[name], rel=1e-6)


@pytest.mark.slow
def test_other_experts_lead_to_other_weights(model):
    """The comparison of the test above can fail."""
    [(given, _)] = replayed(model, Layout(world=1, policy=REPLAY))
    [(own, _)] = replayed(model, Layout(world=1))
    assert distances([own], given).weights > 1e-3
    assert "moe/replay_agreement" not in own.result.metrics

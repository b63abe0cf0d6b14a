"""Routers of Megatron's mixture-of-experts layers: which experts they choose, whether they learn, what they report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.models.policy.experts import LOAD_METRICS
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.megatron.hf_models import NUM_EXPERTS, random_model
from tests.unit.policy.models import VOCAB, save_model
from tests.unit.policy.steps import (
    NUM_GENERATIONS,
    NUM_GROUPS,
    Step,
    load_step,
    make_groups,
    make_worker,
    step_of,
    whole_weights,
)
from tests.unit.policy.test_policy_worker import NanLoss
from tests.worlds import run_world

pytest.importorskip("megatron.core")

from nemo_rl.models.policy.megatron.moe import ExpertChoice, choose, highest, routers
from tests.unit.policy.megatron.parity import Layout, steps_in_one_world, torch_step

Trained = tuple[dict[str, float], dict[str, torch.Tensor]]
SELECTIVE: dict[str, Any] = {
    "activation_checkpointing": True,
    "recompute_granularity": "selective",
    "recompute_modules": ["moe"],
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
    (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2, "activation_checkpointing": True}),
    (2, {"pipeline_model_parallel_size": 2, **SELECTIVE}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-moe")
    save_model("qwen3-moe", path)
    return path


def train(path: Path, world: int, **megatron: Any) -> list[Trained]:
    """Of each rank the metrics of the routers in two optimizer steps, and the weights after them."""
    config = Layout(world=world, megatron=megatron).config()

    def on_rank(rank: int, world: int) -> Trained:
        step = step_of(make_worker(path, config))
        return of_routers(step), step.weights

    return run_world(on_rank, world, timeout=120)


def of_routers(step: Step) -> dict[str, float]:
    return {name: value for name, value in step.result.metrics.items() if name.startswith("moe/")}


def stored(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


# -- the choice


def test_of_equal_scores_the_first_expert_is_chosen_wherever_the_token_lies():
    scores = torch.zeros(300, 64)
    scores[:, 40] = 1.0
    assert (highest(scores, 3) == torch.tensor([40, 0, 1])).all()
    assert torch.equal(highest(scores[7:9], 3), highest(scores, 3)[7:9])
    in_groups = choose(scores, 3, 8, 2, scores_per_group=2)
    assert (in_groups == torch.tensor([40, 0, 1])).all(), "the group of expert 40, then the first"


def test_groups_are_judged_by_their_best_one_or_two_scores():
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    assert choose(scores, 2, 2, 1, scores_per_group=1).tolist() == [[0, 1]]
    assert choose(scores, 2, 2, 1, scores_per_group=2).tolist() == [[2, 3]]


def test_given_experts_are_taken_and_their_scores_keep_the_gradient():
    choice = ExpertChoice(is_independent=False)
    choice.given = torch.tensor([[3, 1], [-1, -1], [1, 0]])
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.2]]).repeat(3, 1).requires_grad_()
    taken, indices = choice.get_replay_topk(scores, 2)
    assert indices.tolist() == [[3, 1], [0, 1], [1, 0]]
    taken.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert choice.replay_counts(torch.tensor([True, True, True])).tolist() == [2, 1], "order does not matter"
    assert choice.replay_counts(torch.tensor([True, True, False])).tolist() == [1, 0]
    choice.given = None
    assert choice.get_replay_topk(scores, 2)[1].tolist() == [[0, 1]] * 3
    assert choice.replay_counts(torch.tensor([True])).tolist() == [0, 0]


# -- learning


@pytest.mark.parametrize("freeze", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frozen_routers_stay_and_everything_else_learns(model, freeze):
    before = {name: tensor for name, tensor in stored(model).items() if name.endswith("mlp.gate.weight")}
    [(metrics, weights)] = train(model, 1, freeze_moe_router=freeze)
    assert len(before) == 2
    assert set(metrics) == {f"moe/{name}" for name in LOAD_METRICS}, "layers are not asked for"
    for name, tensor in before.items():
        assert torch.equal(weights[name], tensor) == freeze, name
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert not torch.equal(weights[name], stored(model)[name])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_bias_of_experts_moves_towards_those_with_fewer_tokens(tmp_path, world):
    hf = random_model("deepseek_v3", vocab_size=VOCAB)
    hf.save_pretrained(tmp_path)
    rate = 2.0**-6
    chosen: list[torch.Tensor] = []
    hf.get_submodule("model.layers.1.mlp.gate").register_forward_hook(lambda *call: chosen.append(call[2][2]))
    for group in make_groups()[1]:
        for sample in group.samples:
            hf(input_ids=torch.from_numpy(sample.token_ids)[None])
    load = torch.cat(chosen).flatten().bincount(minlength=NUM_EXPERTS).double()
    assert load.unique().numel() > 1
    policy = {"train_global_batch_size": NUM_GROUPS * NUM_GENERATIONS, "make_sequence_length_divisible_by": 8}
    config = Layout(
        world=world, megatron={"moe_router_bias_update_rate": rate, "activation_checkpointing": True}, policy=policy
    ).config()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    want = stored(tmp_path)[name] + rate * (load.mean() - load).sign().float()
    for step in run_world(lambda rank, world: step_of(make_worker(tmp_path, config)), world, timeout=120):
        torch.testing.assert_close(step.weights[name], want, rtol=0, atol=1e-6)


def test_a_skipped_step_leaves_the_bias_of_experts(tmp_path):
    random_model("deepseek_v3", vocab_size=VOCAB).save_pretrained(tmp_path)
    policy = {"train_global_batch_size": NUM_GROUPS * NUM_GENERATIONS, "nonfinite_action": "skip"}
    config = Layout(world=1, megatron={"moe_router_bias_update_rate": 2.0**-6}, policy=policy).config()

    def on_rank(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
        worker = make_worker(tmp_path, config)
        load_step(worker)
        assert worker.train(NanLoss(), Logprobs()).num_skipped_steps == 1
        skipped, after = whole_weights(worker), step_of(worker).weights
        worker.mesh.close()
        return [skipped, after, step_of(make_worker(tmp_path, config)).weights]

    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    [(skipped, after, without)] = run_world(on_rank, 1)
    assert torch.equal(skipped[name], stored(tmp_path)[name])
    assert not torch.equal(after[name], skipped[name])
    assert torch.equal(after[name], without[name]), "tokens of the skipped step do not count"


def test_a_checkpoint_keeps_the_bias_of_experts(tmp_path):
    random_model("deepseek_v3", vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    policy = {"train_global_batch_size": NUM_GROUPS * NUM_GENERATIONS}
    config = Layout(world=1, megatron={"moe_router_bias_update_rate": 2.0**-6}, policy=policy).config()

    def on_rank(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        worker = make_worker(tmp_path / "model", config)
        step_of(worker)
        worker.save_checkpoint(tmp_path / "step_1", SaveRequest(in_background=True))
        [router] = routers(worker.stages)
        bias: Any = router.expert_bias
        saved = bias.clone()
        step_of(worker)  # while it is written
        asyncio.run(worker.finish_save_checkpoint())
        assert not torch.equal(bias, saved)
        worker.load_checkpoint(tmp_path / "step_1", load_optimizer=True)
        return saved, bias.clone()

    [(saved, loaded)] = run_world(on_rank, 1, timeout=120)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert not torch.equal(saved, stored(tmp_path / "model")[name]), "it has moved"
    assert saved.dtype == torch.float32 and torch.equal(loaded, saved)


def test_the_bias_of_experts_stays_exact_in_bfloat16(tmp_path):
    random_model("deepseek_v3", vocab_size=VOCAB).save_pretrained(tmp_path)
    config = Layout(world=1, policy={"precision": "bfloat16"}).config()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"

    def on_rank(rank: int, world: int) -> list[torch.Tensor]:
        worker = make_worker(tmp_path, config)
        load_step(worker)
        found = [whole_weights(worker)[name]]
        worker.compute(Logprobs(), "prev_logprobs")
        found.append(whole_weights(worker)[name])
        worker.compute_reference_logprobs()
        return [*found, whole_weights(worker)[name]]

    want = stored(tmp_path)[name]
    assert not torch.equal(want, want.bfloat16().float())
    [found] = run_world(on_rank, 1)
    assert all(bias.dtype == torch.float32 and torch.equal(bias, want) for bias in found)


# -- what they report


def assert_same_load(got: dict[str, float], want: dict[str, float]) -> None:
    assert set(got) >= {f"moe/{name}" for name in LOAD_METRICS} == set(want)
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-6), name
        by_layer = [got[f"moe/layer_{layer}/{name.removeprefix('moe/')}"] for layer in range(2)]
        assert sum(by_layer) / 2 == pytest.approx(value, rel=1e-6), name
        assert by_layer[0] != by_layer[1] or name == "moe/dead_expert_fraction"


PADDED = {"make_sequence_length_divisible_by": 8}


@pytest.mark.parametrize(
    ("world", "megatron"), [(1, {}), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS)]
)
def test_the_load_of_experts_is_that_of_the_other_backend_in_every_layout(model, world, megatron):
    layout = Layout(world=world, megatron={"moe_per_layer_logging": True} | megatron, policy=PADDED)
    want = torch_step(model, layout)
    for (step,) in zip(*steps_in_one_world(model, [layout]), strict=True):
        assert_same_load(of_routers(step), of_routers(want))


# -- determinism


@pytest.mark.slow
@pytest.mark.parametrize(("world", "megatron"), [(1, {}), *LAYOUTS])
def test_tied_experts_are_the_same_in_every_layout(model, tmp_path, world, megatron):
    """Routers that say nothing: every expert has the same score, and the first two get every token."""
    tensors = {n: torch.zeros_like(t) if n.endswith("gate.weight") else t for n, t in stored(model).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    for metrics, weights in train(tmp_path, world, freeze_moe_router=True, **megatron):
        assert metrics["moe/dead_expert_fraction"] == 0.5
        assert metrics["moe/load_max_over_mean"] == 2.0
        for expert in range(4):
            name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
            assert torch.equal(weights[name], tensors[name]) == (expert >= 2), name

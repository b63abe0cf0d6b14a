"""Routers of Megatron's mixture-of-experts layers: what they choose, whether they learn, balance, report."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.batch.microbatches import LoadedRow
from nemo_rl.models.policy.config import PolicyConfig, RouterReplayConfig
from nemo_rl.models.policy.experts import LOAD_METRICS
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.moe import ExpertChoice, choose
from nemo_rl.types import Sample
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy import steps
from tests.unit.policy.megatron.hf_models import NUM_EXPERTS
from tests.unit.policy.megatron.parity import Layout, cut, distances, selective, steps_in_one_world, torch_step
from tests.unit.policy.megatron.test_parity import ONE_BY_ONE, PACKED, RECOMPUTED
from tests.unit.policy.test_policy_worker import NanLoss
from tests.worlds import run_world

SAMPLES = 16
PADDED = {"make_sequence_length_divisible_by": 8}


def stored(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_of_equal_scores_the_first_expert_is_chosen_wherever_the_token_lies():
    scores = torch.zeros(300, 64)
    scores[:, 40] = 1.0
    for groups in (None, 2):  # with groups, the group of expert 40, then the first
        assert (choose(scores, 3, 8, groups, scores_per_group=2) == torch.tensor([40, 0, 1])).all()
        assert (choose(scores[7:9], 3, 8, groups, scores_per_group=2) == torch.tensor([40, 0, 1])).all()
    close = torch.tensor([[0.9, 0.0, 0.6, 0.5]])  # groups are judged by their best one or two scores
    assert choose(close, 2, 2, 1, scores_per_group=1).tolist() == [[0, 1]]
    assert choose(close, 2, 2, 1, scores_per_group=2).tolist() == [[2, 3]]


def test_given_experts_are_taken_and_their_scores_keep_the_gradient():
    choice = ExpertChoice(is_independent=False)
    choice.given = torch.tensor([[3, 1], [-1, -1], [1, 0]])
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.2]]).repeat(3, 1).requires_grad_()
    taken, indices = choice.get_replay_topk(scores, 2)
    assert indices.tolist() == [[3, 1], [0, 1], [1, 0]]
    taken.sum().backward()
    assert scores.grad.tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert choice.replay_counts(torch.tensor([True, True, True])).tolist() == [2, 1], "order does not matter"
    assert choice.replay_counts(torch.tensor([True, True, False])).tolist() == [1, 0]
    choice.given = None
    assert choice.get_replay_topk(scores, 2)[1].tolist() == [[0, 1]] * 3
    assert choice.replay_counts(torch.tensor([True])).tolist() == [0, 0]


def of_routers(step: steps.Step) -> dict[str, float]:
    """Their metrics."""
    return {name: value for name, value in step.result.metrics.items() if name.startswith("moe/")}


def test_frozen_routers_stay_and_everything_else_learns(qwen_moe):
    [[step]] = steps_in_one_world(qwen_moe, [Layout(world=1, megatron={"freeze_moe_router": True})])
    assert of_routers(step).keys() == {f"moe/{name}" for name in LOAD_METRICS}, "layers are not asked for"
    kept = {name for name, tensor in stored(qwen_moe).items() if torch.equal(step.weights[name], tensor)}
    assert kept == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


# -- the bias of experts

BIAS, RATE = "model.layers.1.mlp.gate.e_score_correction_bias", 2.0**-6
GATE = "model.layers.1.mlp.gate.weight"


def moving(policy: dict[str, Any], **megatron: Any) -> PolicyConfig:
    """With one optimizer step a call."""
    megatron, policy = megatron | {"moe_router_bias_update_rate": RATE}, policy | {"train_global_batch_size": SAMPLES}
    return Layout(world=1, megatron=megatron, policy=policy).config()


@pytest.mark.slow
def test_it_moves_towards_those_with_fewer_tokens(models):
    biased = models["deepseek_v3"]
    hf: Any = AutoModelForCausalLM.from_pretrained(biased, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    hf.get_submodule("model.layers.1.mlp.gate").register_forward_hook(lambda *call: chosen.append(call[2][2]))
    for group in steps.make_groups()[1]:
        for sample in group.samples:
            hf(input_ids=torch.from_numpy(sample.token_ids)[None])
    load = torch.cat(chosen).flatten().bincount(minlength=NUM_EXPERTS).double()
    assert load.unique().numel() > 1
    config = moving(PADDED, activation_checkpointing=True)
    want = stored(biased)[BIAS] + RATE * (load.mean() - load).sign().float()
    for step in run_world(lambda rank, world: steps.step_of(steps.make_worker(biased, config)), 2):
        torch.testing.assert_close(step.weights[BIAS], want, rtol=0, atol=1e-6)


def test_it_is_exact_in_bfloat16_a_skipped_step_leaves_it_and_a_checkpoint_keeps_it(models, tmp_path):
    """Also while the weights of the routers are frozen."""
    policy, biased = {"nonfinite_action": "skip", "precision": "bfloat16"}, models["deepseek_v3"]
    config = moving(policy, freeze_moe_router=True)

    def on_rank(rank: int, world: int) -> list[torch.Tensor]:
        worker = steps.make_worker(biased, config)
        steps.load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        found = [steps.whole_weights(worker)[BIAS]]
        assert worker.train(NanLoss(), Logprobs()).num_skipped_steps == 1
        found += [steps.whole_weights(worker)[BIAS], steps.step_of(worker).weights[BIAS]]
        worker.save_checkpoint(tmp_path / "step_1", SaveRequest(in_background=True))
        found.append(steps.step_of(worker).weights[BIAS])  # while it is written
        assert torch.equal(steps.whole_weights(worker)[GATE], stored(biased)[GATE].bfloat16().float())
        asyncio.run(worker.finish_save_checkpoint())
        worker.load_checkpoint(tmp_path / "step_1", load_optimizer=True)
        found.append(steps.whole_weights(worker)[BIAS])
        worker.mesh.close()
        return [*found, steps.step_of(steps.make_worker(biased, config)).weights[BIAS]]

    want = stored(biased)[BIAS]
    assert not torch.equal(want, want.bfloat16().float())
    [(passed, skipped, after, later, loaded, without)] = run_world(on_rank, 1)
    assert torch.equal(passed, want) and torch.equal(skipped, want) and not torch.equal(after, want)
    assert torch.equal(after, without), "tokens of the skipped step do not count"
    assert not torch.equal(later, after) and torch.equal(loaded, after) and loaded.dtype == torch.float32


def test_the_load_of_experts_is_that_of_the_other_backend(qwen_moe):
    layout = Layout(world=1, megatron={"moe_per_layer_logging": True}, policy=PADDED)
    want, [[step]] = of_routers(torch_step(qwen_moe, layout)), steps_in_one_world(qwen_moe, [layout])
    assert want.keys() == {f"moe/{name}" for name in LOAD_METRICS}
    for name in LOAD_METRICS:
        value, *by_layer = (step.result.metrics[f"moe/{of}{name}"] for of in ("", "layer_0/", "layer_1/"))
        assert value == pytest.approx(want[f"moe/{name}"], rel=1e-6), name
        assert sum(by_layer) / 2 == pytest.approx(value, rel=1e-6), name
        assert by_layer[0] != by_layer[1] or name == "dead_expert_fraction"


# -- replay of the experts that generation chose; transformers, forced, has the same

LAYERS, TOP_K, UNRECORDED = 2, 2, "3/0"
REPLAY = {"router_replay": RouterReplayConfig(enabled=True)}


def random_experts(row: LoadedRow | Sample) -> torch.Tensor | None:
    """Of all tokens but the last, whose state nobody needs; of one sample of none. uint8 [T - 1, LAYERS, TOP_K]."""
    if row.sample_id == UNRECORDED:
        return None
    generator = torch.Generator().manual_seed(crc32(row.sample_id.encode()))
    scores = torch.rand(len(row.token_ids) - 1, LAYERS, NUM_EXPERTS, generator=generator)
    return scores.topk(TOP_K).indices.to(torch.uint8)


def replayed(path: Path, layout: Layout) -> list[steps.Step]:
    """The steps of every rank with `random_experts`."""
    config = layout.config()

    def on_rank(rank: int, world: int) -> steps.Step:
        worker = steps.make_worker(path, config)
        steps.load_step(worker)
        for row in worker.rows.values():
            row.routed_experts = random_experts(row)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        result = worker.train(ClippedPGLoss(steps.LOSS), Logprobs())
        return steps.Step(result=result, weights=steps.whole_weights(worker), logprobs=steps.logprobs_of(worker))

    return run_world(on_rank, layout.world)


def logprobs_of_transformers(path: Path, samples: Sequence[Sample], *, forced: bool) -> dict[str, torch.Tensor]:
    """`forced`: with `random_experts` in the place of those that the routers choose."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")

    def force(given: Iterator[torch.Tensor | None], layer: int, *call: Any) -> tuple[torch.Tensor, ...]:
        logits, _, indices = call[2]
        if (taken := next(given)) is not None:
            indices = torch.cat([taken[:, layer].long(), indices[len(taken) :]])
        weights = logits.softmax(-1).gather(1, indices)
        return logits, weights / weights.sum(-1, keepdim=True), indices

    for layer in range(LAYERS) if forced else ():
        hook = partial(force, map(random_experts, samples), layer)
        model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(hook)
    return steps.plain_logprobs(model)


def test_logprobs_are_those_with_the_given_experts_and_the_reference_keeps_its_own(qwen_moe):
    [step] = replayed(qwen_moe, Layout(world=1, policy=REPLAY, megatron={"moe_per_layer_logging": True}))
    samples = [sample for group in steps.make_groups()[1] for sample in group.samples]
    wanted = [logprobs_of_transformers(qwen_moe, samples, forced=forced) for forced in (True, False)]
    for number, want in enumerate(wanted):
        found = {name: kinds[number] for name, kinds in step.logprobs.items()}
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    assert max((wanted[0][name] - own).abs().max() for name, own in wanted[1].items()) > 0.1, "experts matter"
    metrics = step.result.metrics
    tokens = sum(len(sample.token_ids) for sample in samples)
    recorded = sum(len(sample.token_ids) - 1 for sample in samples if sample.sample_id != UNRECORDED)
    # Two optimizer steps, each of which reports its own part of the tokens.
    assert metrics["moe/replayed_fraction"] == pytest.approx(recorded / tokens, abs=0.1)
    agreement = metrics["moe/replay_agreement"]
    by_layer = [metrics[f"moe/layer_{layer}/replay_agreement"] for layer in range(LAYERS)]
    assert 0.0 < agreement < 0.5 and sum(by_layer) / LAYERS == pytest.approx(agreement)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "megatron"),
    [(4, cut("tp2 pp2")), (2, cut("cp2 ep2") | RECOMPUTED), (2, cut("pp2") | selective("moe"))],
)
def test_given_experts_train_alike_and_routers_report_the_same_in_every_layout(qwen_moe, world, megatron):
    """And when they are recomputed."""
    policy, by_layer = REPLAY | PADDED, {"moe_per_layer_logging": True}
    [want] = replayed(qwen_moe, Layout(world=1, policy=policy, megatron=by_layer))
    ranks = replayed(qwen_moe, Layout(world=world, policy=policy, megatron=by_layer | megatron))
    off = distances(ranks, want)
    assert max(off.logprobs, off.loss, off.grad_norm) <= 1e-5 and off.weights <= 1e-6, off
    for step in ranks:
        assert of_routers(step) == pytest.approx(of_routers(want), rel=1e-6)


# -- balancing losses: what they are, and that micro-batches and ranks do not change them

LR, COEFF = 0.1, 0.3  # of gradient descent, of the loss
WHOLE: dict[str, Any] = {"train_micro_batch_size": SAMPLES, "logprob_batch_size": SAMPLES}
ROUNDED: dict[str, Any] = PACKED | {"make_sequence_length_divisible_by": 20}

Weights = dict[str, torch.Tensor]


def weights_after(path: Path, *cases: tuple[str, dict[str, Any], dict[str, Any]], world: int = 1) -> list[Weights]:
    """The model's weights after a step, for every (type of balancing, keys of megatron_cfg, batching)."""
    policy, layouts = {"train_global_batch_size": SAMPLES, "max_grad_norm": None}, []
    for kind, keys, batching in cases:
        balancing = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFF * (kind != "none")}
        layouts.append(Layout(world=world, megatron=keys | balancing, policy=policy, batching=batching))
    return [ranks[0].weights for ranks in steps_in_one_world(path, layouts)]


def by_definition(path: Path, *, per_sequence: bool) -> Weights:
    """Gradients of COEFF times the balancing loss of all samples, by transformers and autograd alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    number, chosen = model.config.num_experts, model.config.num_experts_per_tok
    parts, loss = [], torch.zeros(())  # [T, layers, E] of each sequence
    for sample in (sample for group in steps.make_groups()[1] for sample in group.samples):
        routed = model(input_ids=torch.from_numpy(sample.token_ids)[None], output_router_logits=True).router_logits
        parts.append(torch.stack(routed, dim=1))
    for part in parts if per_sequence else [torch.cat(parts)]:
        scores = part.softmax(-1)
        picked = torch.zeros_like(scores).scatter(-1, scores.topk(chosen).indices, 1.0)
        share = len(part) / sum(map(len, parts))
        loss = loss + share * number * (picked.mean(0) / chosen * scores.mean(0)).sum()
    (COEFF * loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_added(with_loss: Weights, without: Weights, gradients: Weights) -> None:
    """Balancing moved the weights by its gradients."""
    routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(gradients[name].abs().max() > 1e-3 for name in routers)
    # Experts are one tensor for all of them in transformers.
    moved = {name: (without[name] - with_loss[name]) / LR for name in gradients if ".experts." not in name}
    torch.testing.assert_close(moved, {name: gradients[name] for name in moved}, atol=3e-6, rtol=1e-4)


def test_balancing_is_what_the_documentation_says(qwen_moe: Path) -> None:
    cases = ("none", {}, WHOLE), ("aux_loss", {}, WHOLE), ("seq_aux_loss", {}, ROUNDED)
    none, whole, packed = weights_after(qwen_moe, *cases)
    assert_added(whole, none, by_definition(qwen_moe, per_sequence=False))
    assert_added(packed, none, by_definition(qwen_moe, per_sequence=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "keys"),
    [(2, cut("pp2")), (2, cut("ep2") | RECOMPUTED), (2, cut("tp2 ep2") | selective("moe")), (4, cut("tp2 cp2 ep2"))],
)
def test_micro_batches_and_ranks_do_not_change_balancing(qwen_moe: Path, world: int, keys: dict[str, Any]) -> None:
    """`global_aux_loss` is of the samples of all data ranks together."""
    cases = [("seq_aux_loss", keys, batching) for batching in (ROUNDED, ONE_BY_ONE | ROUNDED)]
    cases.append(("global_aux_loss", keys, WHOLE))
    none, *by_sequence, together = weights_after(qwen_moe, ("none", keys, ROUNDED), *cases, world=world)
    for weights in by_sequence:
        assert_added(weights, none, by_definition(qwen_moe, per_sequence=True))
    assert_added(together, none, by_definition(qwen_moe, per_sequence=False))

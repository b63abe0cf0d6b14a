"""Balancing losses of routers: what they are, and that micro-batches and ranks do not change them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.policy.megatron.parity import Layout, cut, selective, steps_in_one_world
from tests.unit.policy.megatron.test_parity import ONE_BY_ONE, PACKED, RECOMPUTED
from tests.unit.policy.steps import make_groups

pytest.importorskip("megatron.core")

RATE, COEFF, SAMPLES = 0.1, 0.3, 16  # of gradient descent, of the loss, of the one optimizer step
WHOLE: dict[str, Any] = {"train_micro_batch_size": SAMPLES, "logprob_batch_size": SAMPLES}
PADDED: dict[str, Any] = PACKED | {"make_sequence_length_divisible_by": 20}

Weights = dict[str, torch.Tensor]


def weights_after(path: Path, *cases: tuple[str, dict[str, Any], dict[str, Any]], world: int = 1) -> list[Weights]:
    """The model's weights after a step, for every (type of balancing, keys of megatron_cfg, batching)."""
    policy = {"train_global_batch_size": SAMPLES, "max_grad_norm": None}
    layouts = []
    for kind, keys, batching in cases:
        coeff = 0.0 if kind == "none" else COEFF
        balancing = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coeff}
        layouts.append(Layout(world=world, megatron=keys | balancing, policy=policy, batching=batching))
    return [ranks[0].weights for ranks in steps_in_one_world(path, layouts)]


def by_definition(path: Path, *, per_sequence: bool) -> Weights:
    """Gradients of COEFF times the balancing loss of all samples, by transformers and autograd alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    number, chosen = model.config.num_experts, model.config.num_experts_per_tok
    sequences = [torch.from_numpy(sample.token_ids) for group in make_groups()[1] for sample in group.samples]
    logits = [
        torch.stack(model(input_ids=ids[None], output_router_logits=True).router_logits, dim=1) for ids in sequences
    ]  # [T, layers, E] of each
    tokens = sum(len(ids) for ids in sequences)
    loss = torch.zeros(())
    for part in logits if per_sequence else [torch.cat(logits)]:
        scores = part.softmax(-1)
        picked = torch.zeros_like(scores).scatter(-1, scores.topk(chosen).indices, 1.0)
        loss = loss + len(part) / tokens * number * (picked.mean(0) / chosen * scores.mean(0)).sum()
    (COEFF * loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_added(with_loss: Weights, without: Weights, gradients: Weights) -> None:
    """Balancing moved the weights by its gradients."""
    routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(gradients[name].abs().max() > 1e-3 for name in routers)
    for name, gradient in gradients.items():
        if ".experts." in name:  # one tensor for all experts, in transformers
            continue
        moved = (without[name] - with_loss[name]) / RATE
        torch.testing.assert_close(moved, gradient, atol=3e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_it_is_what_the_documentation_says(qwen_moe: Path) -> None:
    none, whole, packed = weights_after(
        qwen_moe, ("none", {}, WHOLE), ("aux_loss", {}, WHOLE), ("seq_aux_loss", {}, PADDED)
    )
    assert_added(whole, none, by_definition(qwen_moe, per_sequence=False))
    assert_added(packed, none, by_definition(qwen_moe, per_sequence=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "keys"),
    [(2, cut("pp2")), (2, cut("ep2") | RECOMPUTED), (2, cut("tp2 ep2") | selective("moe")), (4, cut("tp2 cp2 ep2"))],
)
def test_micro_batches_and_ranks_do_not_change_it(qwen_moe: Path, world: int, keys: dict[str, Any]) -> None:
    """`global_aux_loss` is of the samples of all data ranks together."""
    cases = [("seq_aux_loss", keys, batching) for batching in (PADDED, ONE_BY_ONE | PADDED)]
    cases.append(("global_aux_loss", keys, WHOLE))
    none, *by_sequence, together = weights_after(qwen_moe, ("none", keys, PADDED), *cases, world=world)
    for weights in by_sequence:
        assert_added(weights, none, by_definition(qwen_moe, per_sequence=True))
    assert_added(together, none, by_definition(qwen_moe, per_sequence=False))

"""Norms with a backward pass of their own: transformers' bits forward, its gradients backward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nemo_rl.models.policy.dtensor.norm import shorten_norms

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}


def build(config: PretrainedConfig) -> tuple[nn.Module, nn.Module]:
    """The model of transformers with weights that are not 1, and the same with short norms."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config)
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    ours = copy.deepcopy(theirs)
    shorten_norms(ours)
    return theirs, ours


def passed(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(input_ids=ids, use_cache=False).logits
    logits.log_softmax(-1)[..., 5].sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Qwen2Config(**SMALL), Qwen3Config(**SMALL)])
def test_a_model_with_short_norms_has_the_bits_of_transformers_forward_and_its_gradients(
    config: PretrainedConfig,
) -> None:
    theirs, ours = build(config)
    ids = torch.randint(97, (3, 17))
    (logits, gradients), (expected, of_autograd) = passed(ours, ids), passed(theirs, ids)
    assert torch.equal(logits, expected)
    assert set(gradients) == set(of_autograd)
    for name, gradient in of_autograd.items():
        assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
    changed = [m for m, own in zip(theirs.modules(), ours.modules(), strict=True) if type(m) is not type(own)]
    assert len(changed) == sum(type(m).__name__.endswith("RMSNorm") for m in theirs.modules()) > 4


def test_gradients_are_as_near_to_float64_as_those_of_autograd() -> None:
    torch.manual_seed(1)
    theirs, states, grad = LlamaRMSNorm(64), torch.randn(5, 7, 64), torch.randn(5, 7, 64)
    nn.init.normal_(theirs.weight)
    ours, exact = nn.Sequential(copy.deepcopy(theirs)), copy.deepcopy(theirs).double()
    shorten_norms(ours)

    def errors(norm: nn.Module) -> list[float]:
        x, wide = states.clone().requires_grad_(), states.double().requires_grad_()
        found = torch.autograd.grad(norm(x), [x, *norm.parameters()], grad)
        # LlamaRMSNorm computes in float32, so float64 needs the formula itself.
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + theirs.variance_epsilon)
        true = torch.autograd.grad(wide * inverse * exact.weight, [wide, exact.weight], grad.double())
        return [float((a - b).abs().max()) for a, b in zip(found, true, strict=True)]

    for own, of_autograd in zip(errors(ours), errors(theirs), strict=True):
        assert own <= 2 * of_autograd + 1e-7


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm = nn.Sequential(LlamaRMSNorm(8))
    shorten_norms(norm)
    norm.requires_grad_(False)
    states = torch.randn(2, 8, requires_grad=True)
    norm(states).sum().backward()
    assert states.grad is not None and norm[0].weight.grad is None


def test_other_norms_and_half_precision_stay_as_they_are() -> None:
    theirs, ours = build(Gemma2Config(**SMALL))
    assert [type(m) for m in theirs.modules()] == [type(m) for m in ours.modules()]
    theirs, ours = build(LlamaConfig(**SMALL))
    ids = torch.randint(97, (2, 9))
    (logits, gradients), (expected, of_autograd) = passed(ours.bfloat16(), ids), passed(theirs.bfloat16(), ids)
    assert torch.equal(logits, expected)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in of_autograd.items())

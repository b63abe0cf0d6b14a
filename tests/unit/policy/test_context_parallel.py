"""Sequences cut over ranks give the logprobs and gradients of one process that takes them one by one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from nemo_rl.models.policy.attention import ATTENTION, context_sum
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor.checks import check_layout
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.layout import ParallelSizes
from tests.unit.policy.steps import policy_config
from tests.worlds import run_world

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen2": Qwen2Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
}
LENGTHS = [[17, 1, 5, 2], [9, 9, 24, 3]]  # by data-parallel rank

Grads = dict[str, torch.Tensor]


def build(config: PretrainedConfig, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=implementation, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def sequences(data_rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(data_rank)
    return [
        (torch.randint(2, VOCAB, (n,), generator=generator), torch.rand(n, generator=generator) < 0.7)
        for n in LENGTHS[data_rank]
    ]


def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Not linear: its gradient depends on logprobs that other ranks computed."""
    return logprobs.square().sum() / 10 + logprobs.sum().square() / 100


def alone(config: PretrainedConfig, data_ranks: int) -> tuple[list[torch.Tensor], Grads]:
    """Logprobs [B, S] by data-parallel rank, and the gradients of the summed losses; each sequence in its own pass."""
    model = build(config, "eager")
    logprobs = []
    for data_rank in range(data_ranks):
        out = torch.zeros(len(LENGTHS[data_rank]), max(LENGTHS[data_rank]))
        for row, (ids, mask) in enumerate(sequences(data_rank)):
            scores = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            picked = scores[:-1].gather(-1, ids[1:, None])[:, 0] * mask[1:]
            out = out.index_put((torch.tensor(row), torch.arange(1, len(ids))), picked)
        logprobs.append(out)
    torch.stack([loss_of(out) for out in logprobs]).sum().backward()
    return [out.detach() for out in logprobs], {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def score(model: PreTrainedModel, batch: ModelBatch, group: dist.ProcessGroup) -> torch.Tensor:
    out = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, cu_seqlens=batch.cu_seqlens, use_cache=False
    )
    picked = out.logits.flatten(0, 1)[batch.states].log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    return context_sum(torch.zeros(batch.shape).index_put((batch.rows, batch.positions), picked), group)


def run(config: PretrainedConfig, world_size: int, *, padding_free: bool) -> list[tuple[torch.Tensor, Grads]]:
    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, Grads]:
        mesh = ParallelMesh("cpu", ParallelSizes(dp_shard=world // 2, context_parallel=2))
        assert mesh.context is not None
        model = build(config, ATTENTION)
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh.fsdp)
        fully_shard(model, mesh=mesh.fsdp)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        layout = RowLayout(
            padding_free=padding_free,
            divisible_by=3,
            context_size=2,
            context_rank=mesh.context_rank,
            context_group=mesh.context.get_group(),
        )
        logprobs = score(model, layout.build(sequences(mesh.data_rank)), mesh.context.get_group())
        loss_of(logprobs).backward()
        grads = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            grads[name] = parameter.grad.full_tensor()
        return logprobs.detach(), grads

    return run_world(rank_main, world_size)


@pytest.mark.parametrize(
    ("family", "world_size", "padding_free"),
    [
        ("qwen2", 2, True),
        ("qwen2", 2, False),
        ("llama", 4, True),
        ("qwen3", 2, True),
        ("gemma3", 2, True),
        ("mistral", 4, True),
        ("mistral", 2, False),
    ],
)
def test_logprobs_and_gradients_equal_those_of_one_process(family, world_size, padding_free):
    config = FAMILIES[family]
    expected, expected_grads = alone(config, world_size // 2)
    for rank, (logprobs, grads) in enumerate(run(config, world_size, padding_free=padding_free)):
        torch.testing.assert_close(logprobs, expected[rank // 2], atol=1e-5, rtol=1e-5)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            assert (grad - expected_grads[name]).norm() <= 1e-5 * expected_grads[name].norm(), name


def test_the_sum_is_on_every_rank_and_its_gradient_is_not_summed_again():
    def rank_main(rank: int, world: int) -> tuple[list[float], list[float]]:
        partial = torch.tensor([float(rank), 1.0], requires_grad=True)
        total = context_sum(partial, dist.group.WORLD)
        (total * torch.tensor([2.0, 3.0])).sum().backward()
        assert partial.grad is not None
        return total.tolist(), partial.grad.tolist()

    assert run_world(rank_main, 2) == [([1.0, 2.0], [2.0, 3.0])] * 2


def test_an_attention_that_cannot_be_cut_is_refused_by_name():
    check_layout(policy_config(dtensor_cfg=DTensorConfig(context_parallel_size=8)), Qwen2Config())
    check_layout(policy_config(), Gemma2Config())
    with pytest.raises(ValueError, match=r"policy\.dtensor_cfg\.context_parallel_size=2.*'gemma2'.*soft-capped"):
        check_layout(policy_config(dtensor_cfg=DTensorConfig(context_parallel_size=2)), Gemma2Config())

"""Mixture-of-experts models against plain transformers in one process: logprobs, gradients, names, metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl.models.policy import moe
from nemo_rl.models.policy.expert_names import ExpertNames
from nemo_rl.models.policy.mesh import ParallelMesh
from nemo_rl.models.policy.parallel_sizes import ParallelSizes
from nemo_rl.models.policy.parallelize import decoder_layers, materialize, parameters_on_meta
from nemo_rl.models.policy.weight_loading import StoredModel, load_weights, named_tensors
from tests.worlds import run_world

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3"]
VOCAB, NUM_EXPERTS = 61, 4


def moe_config(family: str, num_experts: int = NUM_EXPERTS) -> PretrainedConfig:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "mixtral":
        return MixtralConfig(**shape, intermediate_size=24, num_local_experts=num_experts)
    shape |= {"intermediate_size": 48, "moe_intermediate_size": 24}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**shape, head_dim=16, num_experts=num_experts, norm_topk_prob=True)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    shape |= latent | {"num_key_value_heads": 4, "n_routed_experts": num_experts, "n_shared_experts": 1}
    return DeepseekV3Config(**shape, n_group=2, topk_group=1, first_k_dense_replace=1)


def random_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(moe_config(family), dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.2)
    return model


def token_ids(rows: int = 4) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, 13), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")


def reference(family: str, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model = random_model(family)
    loss = loss_of(model, ids)
    loss.backward()
    return loss.item(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()
    }


def sharded_model(path: Path, mesh: ParallelMesh) -> PreTrainedModel:
    """The model on `path`, sharded over `mesh`, as the policy builds it."""
    config = AutoConfig.from_pretrained(path)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    moe.choose_implementation(model, "cpu")
    moe.shard_experts(model, mesh, mp_policy=MixedPrecisionPolicy())
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.fsdp)
    fully_shard(model, mesh=mesh.fsdp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    materialize(model, torch.device("cpu"))
    load_weights(dict(named_tensors(model)), str(path), ExpertNames(config.model_type).read)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_step(path: Path, sizes: ParallelSizes, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss and whole gradients of one step, in which each data rank takes its rows of `ids`."""
    mesh = ParallelMesh("cpu", sizes)
    model = sharded_model(path, mesh)
    loss = loss_of(model, ids.chunk(sizes.data_parallel)[mesh.data_rank])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.data_group)
    grads: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = full(parameter.grad)
    return total.item(), grads


def assert_same(got: tuple[float, dict[str, torch.Tensor]], want: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 3e-6 * grad.norm() + 1e-7, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_and_gradients_of_the_sharded_model_equal_transformers(tmp_path, family, world_size):
    random_model(family).save_pretrained(tmp_path)
    ids = token_ids()
    results = run_world(lambda rank, world: run_step(tmp_path, ParallelSizes(dp_shard=world), ids), world_size)
    for result in results:
        assert_same(result, reference(family, ids))


def test_two_backward_passes_give_the_same_bits(tmp_path):
    random_model("qwen3_moe").save_pretrained(tmp_path)

    def rank_main(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
        return [run_step(tmp_path, ParallelSizes(), token_ids())[1] for _ in range(2)]

    first, second = run_world(rank_main, 1)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_exported_under_the_names_that_transformers_saves(tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path)
    names = ExpertNames(model.config.model_type)
    exported: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        parts = names.split(name, tensor.detach())
        assert names.split_meta(name, tensor.shape) == [(part, tuple(view.shape)) for part, view in parts]
        exported |= dict(parts)
    with StoredModel(str(tmp_path)) as stored:
        assert stored.names == set(exported)
        for name, tensor in exported.items():
            assert torch.equal(stored.tensor(name)[:], tensor), name
            assert tensor.is_contiguous()

"""Loading by shards and scoring by chunks, against the plain Hugging Face model in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.checkpoint import full_tensor, hf_parameters
from nemo_rl.models.policy.logprobs import LogprobModel, filter_logits
from nemo_rl.models.policy.parallelize import build_on_meta, load_config, load_weights, materialize, shard
from tests.unit.policy.models import FAMILIES, VOCAB, save_random_model
from tests.worlds import run_world


def sharded_model(path: Path, world_size: int, *, checkpointing: bool = False, chunk_tokens: int = 7) -> LogprobModel:
    model = LogprobModel(
        build_on_meta(load_config(str(path), {}), torch.float32), chunk_tokens=chunk_tokens, temperature=0.7
    )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    shard(model, mesh, torch.float32, activation_checkpointing=checkpointing)
    materialize(model, torch.device("cpu"))
    load_weights(model.hf, str(path))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (4, 21), generator=generator)
    mask = torch.rand(4, 21, generator=generator) < 0.6
    mask[:, 0] = False
    mask[3] = False  # a row without scored tokens
    return ids, mask


def reference(path: Path, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits = model(input_ids=ids, use_cache=False).logits / 0.7
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    logprobs = torch.cat([torch.zeros(len(ids), 1), logprobs], dim=1) * mask
    (logprobs * mask).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_logprobs_and_gradients_of_the_sharded_model_equal_hugging_face(tmp_path, family, world_size):
    save_random_model(family, tmp_path)

    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        model = sharded_model(tmp_path, world, checkpointing=family == "llama")
        ids, mask = batch()
        rows = slice(rank * 4 // world, (rank + 1) * 4 // world)
        logprobs = model(ids[rows], mask[rows])
        logprobs.sum().backward()
        grads = {name: full_tensor(p.grad) for name, p in hf_parameters(model)}
        local = sum(p.to_local().numel() for p in model.parameters())
        return logprobs.detach(), grads, local

    results = run_world(rank_main, world_size)
    want, want_grads = reference(tmp_path, *batch())
    got = torch.cat([logprobs for logprobs, _, _ in results])
    assert (got - want).abs().max() < 2e-6
    assert set(results[0][1]) == set(want_grads)
    for name, grad in results[0][1].items():
        assert (grad - want_grads[name]).norm() <= 2e-6 * want_grads[name].norm() + 1e-7, name
    total = sum(g.numel() for g in want_grads.values())
    assert sum(local for _, _, local in results) == total, "each parameter lives on one rank only"


def test_a_checkpoint_of_another_format_is_loaded_by_rank_zero_and_broadcast(tmp_path):
    save_random_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    def rank_main(rank: int, world: int) -> dict[str, torch.Tensor]:
        return {name: full_tensor(p.detach()) for name, p in hf_parameters(sharded_model(tmp_path, world))}

    for loaded in run_world(rank_main, 2):
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded[name], parameter), name


def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path):
    save_random_model("llama", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.mlp.* has shape \(96, 64\).*\(128, 64\)"):
        run_world(lambda rank, world: sharded_model(tmp_path, world) and None, 1)


def test_logits_outside_top_k_and_the_nucleus_have_no_mass_unless_they_were_sampled():
    def outside(target: int, top_k: int | None, top_p: float) -> list[bool]:
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        return filter_logits(logits, torch.tensor([target]), top_k, top_p).isinf()[0].tolist()

    assert outside(3, 2, 1.0) == [True, True, False, False]
    # probabilities 0.03 0.09 0.24 0.64: 0.64 + 0.24 reach 0.8
    assert outside(3, None, 0.8) == [True, True, False, False]
    assert outside(3, None, 0.1) == [True, True, True, False]
    assert outside(0, 2, 1.0) == [False, True, False, False]

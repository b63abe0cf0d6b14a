"""Building and filling a cut model, against the plain Hugging Face model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.model import build_stages, row_layout
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.layout import ParallelSizes
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.refit.layout import gathered
from nemo_rl.types import SamplingParams
from tests.unit.policy.models import VOCAB, save_random_model
from tests.unit.policy.steps import policy_config
from tests.worlds import run_world

CPU = torch.device("cpu")
LENGTHS = [21, 5, 13, 2]


def built(path: Path, world_size: int, **cut: Any) -> tuple[LogprobModel, ParallelMesh]:
    config = policy_config(dtensor_cfg=DTensorConfig(**cut))
    mesh = ParallelMesh("cpu", ParallelSizes.of(config.dtensor_cfg, world_size))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.7)
    (stage,) = build_stages(config, load_config(str(path), {}), str(path), mesh, CPU, sampling, seed=0)
    return stage, mesh


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(length, generator=generator) < 0.6 for length in LENGTHS]
    masks[3][:] = False  # a sequence without scored tokens
    return [(torch.randint(2, VOCAB, (len(mask),), generator=generator), mask) for mask in masks]


def reference(path: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    scored = []
    for ids, mask in sequences():
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / 0.7
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        scored.append(torch.cat([torch.zeros(1), logprobs]) * mask)
    torch.cat(scored).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [logprobs.detach() for logprobs in scored], grads


@pytest.mark.parametrize(
    ("family", "world_size", "cut"),
    [("llama", 1, {}), ("qwen2-tied", 2, {}), ("qwen3", 4, {"tensor_parallel_size": 2})],
)
def test_logprobs_and_gradients_equal_hugging_face(tmp_path, family, world_size, cut):
    save_random_model(family, tmp_path)

    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, list[int], dict[str, torch.Tensor], int]:
        stage, mesh = built(tmp_path, world, **cut, activation_checkpointing=family == "llama")
        data = mesh.sizes.data_parallel
        rows = list(range(len(LENGTHS)))[mesh.data_rank * 4 // data : (mesh.data_rank + 1) * 4 // data]
        layout = row_layout(policy_config(), stage.hf.config, mesh)
        logprobs = stage(layout.build([sequences()[row] for row in rows]), Logprobs())
        logprobs.sum().backward()
        grads = {name: gathered(p.grad, None) for name, p in named_tensors(stage.hf) if p.grad is not None}
        return logprobs.detach(), rows, grads, sum(p.to_local().numel() for p in stage.parameters())

    results = run_world(rank_main, world_size)
    want, want_grads = reference(tmp_path)
    for logprobs, rows, grads, _ in results:
        for row, got in zip(rows, logprobs, strict=True):
            assert (got[: LENGTHS[row]] - want[row]).abs().max() < 2e-6
        assert set(grads) == set(want_grads)
        for name, grad in grads.items():
            assert (grad - want_grads[name]).norm() <= 3e-6 * want_grads[name].norm() + 1e-7, name
    if not cut:
        total = sum(g.numel() for g in want_grads.values())
        assert sum(local for *_, local in results) == total, "each parameter lives on one rank only"


@pytest.mark.parametrize("cut", [{}, {"tensor_parallel_size": 2}])
def test_a_checkpoint_of_another_format_is_loaded_by_rank_zero_and_sent_around(tmp_path, cut):
    save_random_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    def rank_main(rank: int, world: int) -> dict[str, torch.Tensor]:
        stage, _ = built(tmp_path, world, **cut)
        return {name: gathered(tensor.detach(), None) for name, tensor in named_tensors(stage.hf)}

    for loaded in run_world(rank_main, 2):
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded[name], parameter), name


def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path):
    save_random_model("llama", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.mlp.* has shape \(96, 64\).*\(128, 64\)"):
        run_world(lambda rank, world: built(tmp_path, world) and None, 1)

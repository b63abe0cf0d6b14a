"""Models cut over tensor-parallel ranks, against the plain Hugging Face model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.policy import tp_plans
from nemo_rl.models.policy.grad_norm import clip_grad_norm
from nemo_rl.models.policy.mesh import ParallelMesh
from nemo_rl.models.policy.parallel_sizes import ParallelSizes
from nemo_rl.models.policy.parallelize import build_on_meta, decoder_layers, materialize, shard
from nemo_rl.models.policy.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from nemo_rl.models.policy.weight_loading import load_weights, named_tensors
from tests.unit.policy.models import ALL_FAMILIES, VOCAB, save_random_model
from tests.worlds import run_world

WIDTH = 12  # beyond the sliding windows


class Scored(nn.Module):
    """Sum of the logprobs of the next tokens; the head is used as it is used in training, by its weight."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        states = self.hf.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        assert not isinstance(states, DTensor)
        head = self.hf.get_output_embeddings()
        weight, bias = (whole(parameter) for parameter in (head.weight, head.bias))
        logprobs = F.linear(states[:, :-1], weight, bias).log_softmax(dim=-1)
        return logprobs.gather(-1, ids[:, 1:, None]).sum(), states.detach()


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def token_ids() -> torch.Tensor:
    ids = torch.randint(2, VOCAB, (4, WIDTH), generator=torch.Generator().manual_seed(1))
    ids[0, 3] = ids[1, 7] = 0  # padding has an embedding, but no gradient
    return ids


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)  # eps: tiny gradients are rounding errors


Outcome = dict[str, torch.Tensor]
"""Loss, hidden states, norm, "gradient of NAME" (clipped), "NAME after the step" and the loss after it."""

Parameters = Callable[[], Iterator[tuple[str, nn.Parameter]]]


def step(model: Scored, ids: torch.Tensor, parameters: Parameters, clip: Callable[..., torch.Tensor]) -> Outcome:
    loss, states = model(ids)
    loss.backward()
    outcome = {"loss": loss.detach(), "states": states, "norm": clip(model.parameters(), 5.0)}
    assert outcome["norm"] > 10, "clipping changes something"
    outcome |= {f"gradient of {name}": whole(p.grad) for name, p in parameters() if p.grad is not None}
    optimizer(model).step()
    outcome |= {f"{name} after the step": whole(p.detach()) for name, p in parameters()}
    outcome["loss after the step"] = model(ids)[0].detach()
    return outcome


def reference(path: Path) -> Outcome:
    model = Scored(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    return step(model, token_ids(), model.hf.named_parameters, torch.nn.utils.clip_grad_norm_)


def cut(path: Path, mesh: DeviceMesh, *, sequence_parallel: bool, custom_plan: str | None = None) -> PreTrainedModel:
    hf = build_on_meta(AutoConfig.from_pretrained(path), torch.float32).eval()
    apply_tensor_parallel(hf, mesh, sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    return hf


def filled(model: nn.Module, hf: PreTrainedModel, path: Path) -> None:
    materialize(model, torch.device("cpu"))
    load_weights(dict(named_tensors(hf)), str(path), lambda *_: False)


def trained(
    path: Path, sizes: ParallelSizes, *, sequence_parallel: bool, custom_plan: str | None = None, lora: bool = False
) -> Outcome:
    """One step; under FSDP2 too where there are more ranks than the tensor-parallel ones."""
    mesh = ParallelMesh("cpu", sizes)
    assert mesh.tensor is not None
    hf = cut(path, mesh.tensor, sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    model = Scored(hf)
    if sizes.data_parallel > 1:
        shard(model, decoder_layers(hf), mesh, torch.float32, cpu_offload=False)
    filled(model, hf, path)
    rows = token_ids().chunk(sizes.data_parallel)[mesh.data_rank]
    outcome = step(model, rows, hf.named_parameters, clip_grad_norm)
    for name in ("loss", "loss after the step"):
        torch.distributed.all_reduce(outcome[name], group=mesh.data_group)
    return outcome


def worst(outcome: Outcome, want: Outcome, rows: slice = slice(None)) -> dict[str, float]:
    """Relative differences above 1e-5, by name. `rows` are those of this rank."""
    want = want | {"states": want["states"][rows]}
    assert set(outcome) == set(want)
    differences = {
        name: ((outcome[name] - value).norm() / value.norm().clamp(min=1e-6)).item() for name, value in want.items()
    }
    return {name: difference for name, difference in differences.items() if not difference <= 1e-5}


TWO = ParallelSizes(tensor_parallel=2)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_step_on_two_ranks_equals_one_process(tmp_path, family):
    save_random_model(family, tmp_path)

    def rank_main(rank: int, world: int) -> list[Outcome]:
        return [trained(tmp_path, TWO, sequence_parallel=sp) for sp in (False, True)]

    want = reference(tmp_path)
    for outcomes in run_world(rank_main, 2):
        assert [worst(outcome, want) for outcome in outcomes] == [{}, {}]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_step_on_two_by_two_ranks_with_fsdp_equals_one_process(tmp_path, family):
    save_random_model(family, tmp_path)
    sizes = [ParallelSizes(dp_shard=2, tensor_parallel=2), ParallelSizes(dp_replicate=2, tensor_parallel=2)]

    def rank_main(rank: int, world: int) -> list[Outcome]:
        return [
            trained(tmp_path, sizes[0], sequence_parallel=False),
            trained(tmp_path, sizes[family == "llama"], sequence_parallel=True),
        ]

    want = reference(tmp_path)
    for rank, outcomes in enumerate(run_world(rank_main, 4)):
        rows = slice(rank // 2 * 2, rank // 2 * 2 + 2)
        assert [worst(outcome, want, rows) for outcome in outcomes] == [{}, {}]

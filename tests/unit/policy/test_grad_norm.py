"""The gradient's norm over meshes of every shape, against the whole gradients in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from nemo_rl.models.policy.dtensor.optimizer import clip_grad_norm
from tests.worlds import run_world

SHAPES = [(6, 4), (5, 3), (3,), (8, 2)]  # on four ranks some shards are uneven, some empty


def whole_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def expected(max_norm: float) -> tuple[float, list[torch.Tensor]]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, whole_gradients(), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.item(), [parameter.grad for parameter in parameters]


def placed(gradient: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    """A parameter with its gradient, cut alike; a partial gradient is a sum that is still due."""
    whole = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, whole))
    if whole == list(placements):
        parameter.grad = distribute_tensor(gradient, mesh, whole)
    else:
        parameter.grad = DTensor.from_local(gradient / mesh.size(), mesh, placements)
    return parameter


def full(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def clipped(meshes: list[DeviceMesh], layouts: list[tuple[Placement, ...] | None], max_norm: float | None):
    parameters = []
    for gradient, mesh, layout in zip(whole_gradients(), meshes, layouts, strict=True):
        if layout is None:
            parameters.append(nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        else:
            parameters.append(placed(gradient, mesh, layout))
    norm = clip_grad_norm(parameters, max_norm)
    assert norm.shape == () and norm.dtype == torch.float32
    return norm.item(), [full(parameter) for parameter in parameters]


LAYOUTS = {
    "tensor parallel with copies": ("flat", [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]),
    "fsdp of one axis": ("flat", [(Shard(0),)] * 4),
    "tensor parallel x fsdp": (
        "square",
        [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))],
    ),
    "copies x fsdp": ("square", [(Replicate(), Shard(0))] * 4),
    "experts on a mesh of their own": ("both", [(Shard(0), Replicate()), (Shard(1), Shard(0)), None, (Shard(0),) * 2]),
}


def test_norm_and_scaled_gradients_equal_one_process_on_every_mesh():
    def rank_main(rank: int, world: int):
        flat = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
        other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("expert_shard", "expert"))
        meshes = {"flat": [flat] * 4, "square": [square] * 4, "both": [square, other, flat, other]}
        return {
            (name, max_norm): clipped(meshes[kind], layouts, max_norm)
            for name, (kind, layouts) in LAYOUTS.items()
            for max_norm in (0.5, 100.0)
        }

    for results in run_world(rank_main, 4):
        for (name, max_norm), (norm, gradients) in results.items():
            want_norm, want = expected(max_norm)
            assert norm == pytest.approx(want_norm, rel=1e-6), name
            for got, gradient in zip(gradients, want, strict=True):
                torch.testing.assert_close(got, gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_without_a_limit_nothing_is_scaled():
    def rank_main(rank: int, world: int):
        return clipped([init_device_mesh("cpu", (2,))] * 4, [(Shard(0),)] * 4, None)

    want_norm, _ = expected(1.0)
    for norm, gradients in run_world(rank_main, 2):
        assert norm == pytest.approx(want_norm, rel=1e-6)
        assert all(map(torch.equal, gradients, whole_gradients()))


def test_layers_of_other_pipeline_stages_count():
    def rank_main(rank: int, world: int) -> tuple[float, list[torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "fsdp"))
        mine = whole_gradients()[rank // 2 * 2 :][:2]
        parameters = [placed(gradient, mesh["fsdp"], (Shard(0),)) for gradient in mine]
        norm = clip_grad_norm(parameters, 0.5, pipeline_group=mesh["pipeline"].get_group())
        return norm.item(), [full(parameter) for parameter in parameters]

    want_norm, want = expected(0.5)
    for rank, (norm, gradients) in enumerate(run_world(rank_main, 4)):
        assert norm == pytest.approx(want_norm, rel=1e-6)
        for got, gradient in zip(gradients, want[rank // 2 * 2 :][:2], strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_stay_as_they_are_when_one_is_not_finite(bad):
    def rank_main(rank: int, world: int) -> tuple[float, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        good, spoilt = (placed(torch.full((4,), 3.0), mesh, (Shard(0),)) for _ in range(2))
        if rank == 0:
            spoilt.grad.to_local()[0] = bad
        return clip_grad_norm([good, spoilt], 1.0).item(), full(good)

    for norm, gradient in run_world(rank_main, 2):
        assert not torch.tensor(norm).isfinite()
        assert torch.equal(gradient, torch.full((4,), 3.0))


def test_parameters_without_a_gradient_and_low_precision_ones():
    frozen, small = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    small.grad = torch.full((10_000,), 0.01, dtype=torch.bfloat16)
    norm = clip_grad_norm([frozen, small], 0.5)
    assert norm.item() == pytest.approx(float(torch.tensor(0.01, dtype=torch.bfloat16)) * 100, rel=1e-6)
    assert small.grad.dtype == torch.bfloat16
    assert small.grad.float().norm().item() == pytest.approx(0.5, rel=1e-2)
    assert clip_grad_norm([frozen], 0.5).item() == 0.0

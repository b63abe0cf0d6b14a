"""Checkpoints of an optimizer that keeps a part of its state on the host, made of the optimizers it consists of."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from nemo_rl.models.policy.megatron import cpu_shim
from nemo_rl.models.policy.megatron.optimizer import ParameterState, optimizers_by_main, set_steps_taken, steps_taken

SIZES = (5, 7)
cpu_shim.install()


def offloaded(values: list[torch.Tensor]) -> Any:
    """A leaf, as far as its state is asked for, whose parameters are all on the host."""
    groups = [{"params": [torch.nn.Parameter(value.clone())], "lr": 0.1} for value in values]
    inner = HybridDeviceOptimizer(
        groups,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    inner.cpu_copys_map_gpu_param.update(inner.inner_param_to_orig_param)  # as if the parameters were on a GPU
    return SimpleNamespace(optimizer=inner, is_stub_optimizer=False)


def parts_of(leaf: Any) -> list[ParameterState]:
    shards = [group["params"][0] for group in leaf.optimizer.param_groups]
    mains = [leaf.optimizer.param_to_inner_param[shard] for shard in shards]
    inner = optimizers_by_main(leaf.optimizer)
    return [
        ParameterState(owner=leaf, inner=inner[main], parameter=shard, main=main, flat=range(len(main)))
        for shard, main in zip(shards, mains, strict=True)
    ]


def step(leaf: Any, seed: int) -> list[torch.Tensor]:
    """Gradients come from a GPU in a run, so the optimizers are called themselves; the main parameters after it."""
    generator = torch.Generator().manual_seed(seed)
    parts = parts_of(leaf)
    for part in parts:
        part.main.grad = torch.randn(part.main.shape, generator=generator)
    for optimizer in leaf.optimizer.sub_optimizers:
        optimizer.step()
    leaf.optimizer._sync_sub_optimizers_state_to_hdo()
    return [part.main.detach().clone() for part in parts]


def test_a_loaded_optimizer_goes_on_where_the_saved_one_was() -> None:
    start = [torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16() for size in SIZES]
    saved, loaded = offloaded(start), offloaded(start)
    assert steps_taken(saved) is None
    for seed in range(3):
        step(saved, seed)
    assert steps_taken(saved) == 3
    for source, target in zip(parts_of(saved), parts_of(loaded), strict=True):
        tensors = source.tensors()
        assert set(tensors) == {"main_param", "exp_avg", "exp_avg_sq"}
        assert all(value.dtype == torch.float32 for value in tensors.values())
        target.allocate({"exp_avg", "exp_avg_sq"})
        into = target.tensors()
        with torch.no_grad():
            for key, value in into.items():
                value.copy_(tensors[key])
        target.put(into)
    set_steps_taken(loaded, steps_taken(saved))
    assert steps_taken(loaded) == 3
    assert all(len(loaded.optimizer.state[part.parameter]) == 4 for part in parts_of(loaded))  # and where it is moved
    torch.testing.assert_close(step(loaded, 3), step(saved, 3), rtol=0, atol=0)

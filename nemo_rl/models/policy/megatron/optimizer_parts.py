"""What a rank's Megatron optimizer keeps of each parameter, whichever optimizer it is.

distributed         a stretch of the parameter, laid out flat: one rank's share of a gradient buffer
  with an offload   likewise; the main parameter is on the host, or on the GPU, with the optimizer that updates it there
otherwise           all of the parameter's shard; of a bfloat16 parameter the main parameter besides
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

STEP = "step"
_MAIN_OF_OFFLOAD = "master_param"  # `main` itself, in its own state


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """The state of one parameter, or of the elements `flat` of it that this rank updates."""

    owner: Any
    inner: Any  # the torch optimizer that has the state of `main`
    parameter: torch.Tensor
    main: torch.Tensor  # what is updated; the parameter itself, or a view of it, in float32 training
    flat: range | None

    @property
    def is_scaled(self) -> bool:
        """Whether the optimizer keeps main parameter and moments in other dtypes and shows copies of them."""
        return (
            isinstance(self.owner, DistributedOptimizer)
            and self.owner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            and not isinstance(self.owner.optimizer, HybridDeviceOptimizer)
        )

    @property
    def has_main(self) -> bool:
        """Whether there is a main parameter beside the parameter."""
        return self.is_scaled or self.main.dtype != self.parameter.dtype

    def tensors(self) -> dict[str, torch.Tensor]:
        """`main_param` where there is one, and the state of `main`'s shape: references, or copies in host memory if
        `is_scaled`."""
        if self.is_scaled:
            shown = self.owner._get_main_param_and_optimizer_states(self.parameter)
            return {"main_param" if key == "param" else key: value.cpu() for key, value in shown.items()}
        state = self.inner.state.get(self.main, {})
        found = {"main_param": self.main} if self.has_main else {}
        for key, value in state.items():
            if key not in (STEP, _MAIN_OF_OFFLOAD) and value is not None:
                assert value.shape == self.main.shape, f"{key} has shape {tuple(value.shape)}"
                found[key] = value
        return found

    def allocate(self, keys: set[str]) -> None:
        """Make the state `keys`, of any value, and no other."""
        state = self.inner.state
        if self.is_scaled:
            if keys and not state[self.main]:
                self.inner.initialize_state(self.main, self.owner.config.store_param_remainders)
            return
        state.pop(self.main, None)
        if keys:
            state[self.main] = {key: torch.zeros_like(self.main) for key in sorted(keys)}

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what was loaded into `tensors()`."""
        if self.is_scaled:
            device = self.main.device
            renamed = {"param" if key == "main_param" else key: value.to(device) for key, value in tensors.items()}
            self.owner._set_main_param_and_optimizer_states(self.parameter, renamed)


def leaf_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that update something on this rank: with experts, or Muon, there are several."""
    leaves: list[Any] = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [leaf for leaf in leaves if not leaf.is_stub_optimizer]


def optimizer_parts(optimizer: MegatronOptimizer) -> Iterator[OptimizerPart]:
    """Of all parameters that the optimizer updates on this rank."""
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf, DistributedOptimizer):
            groups = leaf.optimizer.param_groups
            updates = holders(leaf.optimizer)
            for parameter, (group, order) in leaf.model_param_group_index_map.items():
                held = leaf._get_model_param_range_map(parameter)["param"]
                flat = range(held.start, held.end)
                main = groups[group]["params"][order]
                if isinstance(leaf.optimizer, HybridDeviceOptimizer):
                    main = leaf.optimizer.param_to_inner_param[main]
                yield OptimizerPart(owner=leaf, inner=updates[main], parameter=parameter, main=main, flat=flat)
        elif isinstance(leaf, Float16OptimizerWithFloat16Params):
            for parameters, mains in (
                *zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True),
                *zip(leaf.fp32_from_fp32_groups, leaf.fp32_from_fp32_groups, strict=True),
            ):
                for parameter, main in zip(parameters, mains, strict=True):
                    yield OptimizerPart(owner=leaf, inner=leaf.optimizer, parameter=parameter, main=main, flat=None)
        else:
            for group in leaf.optimizer.param_groups:
                for parameter in group["params"]:
                    yield OptimizerPart(
                        owner=leaf, inner=leaf.optimizer, parameter=parameter, main=parameter, flat=None
                    )


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Those that update: with an offload several, one of them on the GPU."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def holders(optimizer: Any) -> dict[torch.Tensor, Any]:
    """Of each main parameter, the torch optimizer that updates it."""
    inners = _inner_optimizers(optimizer)
    return {main: inner for inner in inners for group in inner.param_groups for main in group["params"]}


def _counts_per_parameter(inner: Any) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def steps_taken(optimizer: MegatronOptimizer) -> int | None:
    """How often Adam has updated its parameters; None for optimizers that do not count, and before the first step."""
    for leaf in leaf_optimizers(optimizer):
        for inner in _inner_optimizers(leaf.optimizer):
            counted = inner.state.values() if _counts_per_parameter(inner) else inner.param_groups
            for values in counted:
                if STEP in values:
                    return int(values[STEP])
    return None


def set_steps_taken(optimizer: MegatronOptimizer, steps: int | None) -> None:
    """Inverse of `steps_taken`, after the state was allocated."""
    if steps is None:
        return
    for leaf in leaf_optimizers(optimizer):
        for inner in _inner_optimizers(leaf.optimizer):
            if _counts_per_parameter(inner):
                for state in inner.state.values():
                    state[STEP] = torch.tensor(float(steps))
            elif "Adam" in type(inner).__name__:
                for group in inner.param_groups:
                    group[STEP] = steps
        if isinstance(leaf.optimizer, HybridDeviceOptimizer):
            leaf.optimizer._sync_sub_optimizers_state_to_hdo()

"""The policy's weights as generation and checkpoints want them: whole, merged, under their names on disk.

Sharded parameters are gathered, adapters added in, fused experts taken apart, and what another pipeline stage holds is
sent over. Every rank lists the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.models.policy.dtensor import lora
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.expert_names import ExpertNames
from nemo_rl.models.policy.weight_loading import hf_name
from nemo_rl.refit.layout import ExportedTensor, exported, gathered


def export_weights(
    stages: Sequence[PreTrainedModel], mesh: ParallelMesh, device: torch.device, *, merged: bool = True
) -> list[ExportedTensor]:
    """Every weight of the model whose parts on this rank are `stages`. Collective over pipeline ranks.

    Adapters are part of the weights they belong to, or, unless `merged`, tensors of their own behind the base weights
    (`ExportedTensor.adapts`), with alpha / r multiplied into B.
    """
    own = [tensor for stage in stages for tensor in _of_module(stage, merged)]
    everywhere = own if mesh.pipeline is None else _over_pipeline(own, mesh, device)
    return sorted(everywhere, key=lambda tensor: tensor.adapts is not None)


def _of_module(root: PreTrainedModel, merged: bool) -> Iterator[ExportedTensor]:
    names = ExpertNames(root.config.get_text_config().model_type)
    seen: set[int] = set()
    for prefix, module in root.named_modules(remove_duplicate=True):
        for attribute, tensor in _own_tensors(module):
            if id(tensor) in seen:  # tied
                continue
            seen.add(id(tensor))
            name = hf_name(f"{prefix}.{attribute}" if prefix else attribute)
            if isinstance(module, lora.LoRALinear) and (lora.is_adapter(attribute) or attribute == "weight"):
                yield from _of_adapted(name, module, attribute, names, merged)
            else:
                yield from _of_tensor(name, module, attribute, names)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield attribute, parameter
    for attribute, buffer in module._buffers.items():
        if buffer is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, buffer


def _of_adapted(
    name: str, module: lora.LoRALinear, attribute: str, names: ExpertNames, merged: bool
) -> Iterator[ExportedTensor]:
    """The weight of an adapted layer with its adapter in it, or W, A or (alpha / r) B by itself."""
    weight = names.stored_name(f"{name.rpartition('.')[0]}.weight")
    is_adapter = lora.is_adapter(attribute)
    if merged and is_adapter:
        return

    def values() -> torch.Tensor:  # looked up anew: parameters move between devices with their module
        if not is_adapter:
            return lora.merged_weight(module) if merged else module.weight.detach()
        return module.lora_B.detach() * module.scale if attribute == "lora_B" else module.lora_A.detach()

    parameter = module.get_parameter(attribute)
    yield ExportedTensor(
        name=name if is_adapter else weight,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        gather=lambda dtype: gathered(values(), dtype),
        adapts=weight if is_adapter else None,
    )


def _of_tensor(name: str, module: nn.Module, attribute: str, names: ExpertNames) -> Iterator[ExportedTensor]:
    def current() -> torch.Tensor:  # looked up anew: parameters move between devices with their module
        tensor = module._parameters.get(attribute, module._buffers.get(attribute))
        assert tensor is not None
        return tensor

    # Models in bfloat16 keep some in float32: the bias that chooses experts moves by less than bfloat16 can tell.
    is_buffer = attribute in module._buffers
    pieces = names.split_meta(name, current().shape)
    if len(pieces) == 1:
        yield exported(pieces[0][0], current, keeps_dtype=is_buffer)
        return
    whole = _GatheredOnce(current, lambda tensor: names.split(name, tensor))
    for index, (piece_name, shape) in enumerate(pieces):
        yield ExportedTensor(
            name=piece_name,
            shape=shape,
            dtype=current().dtype,
            gather=whole.piece(index, len(pieces)),
            keeps_dtype=is_buffer,
        )


class _GatheredOnce:
    """A fused tensor gathered for its first piece, taken apart, and let go with its last."""

    def __init__(
        self,
        tensor: Callable[[], torch.Tensor],
        split: Callable[[torch.Tensor], list[tuple[str, torch.Tensor]]],
    ) -> None:
        self._tensor = tensor
        self._split = split
        self._pieces: list[tuple[str, torch.Tensor]] = []

    def piece(self, index: int, count: int) -> Callable[[torch.dtype | None], torch.Tensor]:
        def gather(dtype: torch.dtype | None) -> torch.Tensor:
            if index == 0:
                self._pieces = self._split(gathered(self._tensor().detach(), dtype))
            assert len(self._pieces) == count, "pieces are gathered in order"
            part = self._pieces[index][1].contiguous()
            if index == count - 1:
                self._pieces = []
            return part

        return gather


def _over_pipeline(own: list[ExportedTensor], mesh: ParallelMesh, device: torch.device) -> list[ExportedTensor]:
    assert mesh.pipeline is not None
    group = mesh.pipeline.get_group()
    described: list[list[ExportedTensor]] = [[] for _ in range(mesh.pipeline.size())]
    dist.all_gather_object(described, [replace(tensor, gather=_nothing) for tensor in own], group=group)
    mine = {tensor.name: tensor for tensor in own}
    tensors = []
    for stage, theirs in enumerate(described):
        source = dist.get_global_rank(group, stage)
        for tensor in theirs:
            gather = _sent_gather(mine.get(tensor.name), tensor, source, group, device)
            tensors.append(replace(tensor, gather=gather))
    return tensors


def _nothing(dtype: torch.dtype | None) -> torch.Tensor:
    raise AssertionError("held by another pipeline stage")


def _sent_gather(
    own: ExportedTensor | None, meta: ExportedTensor, source: int, group: Any, device: torch.device
) -> Callable[[torch.dtype | None], torch.Tensor]:
    def gather(dtype: torch.dtype | None) -> torch.Tensor:
        wanted = meta.dtype if dtype is None or not meta.dtype.is_floating_point else dtype
        if own is not None:
            tensor = own.gather(dtype).to(device)
        else:
            tensor = torch.empty(meta.shape, dtype=wanted, device=device)
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return gather

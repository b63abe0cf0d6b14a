"""How one module is cut over the tensor-parallel ranks: styles for `torch.distributed.tensor.parallel`.

Every style leaves plain local tensors between modules, with one exception: `Region` hands its module the hidden states
as a replicated DTensor, so that the gradients of all projections that read them are reduced once, not one by one.
Parameters become DTensors that keep name, shape and `requires_grad`; buffers are left alone.

Column and row parallel matrices: Shoeybi et al. 2019, arXiv 1909.08053. Sequence parallel: Korthikanti et al. 2022,
arXiv 2205.05198.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle

SEQUENCE = Shard(1)
"""Layout of hidden states [R, W, H] between the regions of sequence parallelism."""


def place_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Turn the module's own parameters into DTensors. Nothing is sent: every rank cuts its part out of what it has."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        assert name in placements, f"{type(module).__name__}.{name} has no place in tensor parallelism"
        placed = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [layout], run_check=False)


def _relayout(tensor: torch.Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> torch.Tensor:
    """A local tensor in another layout; its gradient comes back in the first."""
    return _as_dtensor(tensor, mesh, now).redistribute(placements=[then]).to_local()


class _Style(ParallelStyle):
    """Hooks around a module; subclasses say what becomes of its parameters, first input and output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if args:
                return (self.read(module, args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self.read(module, kwargs["hidden_states"], device_mesh)}

        def after(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return self.write(module, output, device_mesh)

        self.place(module, device_mesh)
        module.register_forward_pre_hook(before, with_kwargs=True)
        if type(self).write is not _Style.write:
            module.register_forward_hook(after)
        return module

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Cut the parameters."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The first argument, or the keyword `hidden_states`, as the module is to see it."""
        return tensor

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The output as the caller is to see it."""
        return output


class Colwise(_Style):
    """A linear layer whose output features are shared out. Replicated input [..., in] -> local [..., out / size].

    With `gathered` the output is replicated [..., out]. An adapter (`lora_A` [r, in], `lora_B` [out, r]) is cut alike.
    """

    def __init__(self, *, gathered: bool = False) -> None:
        self.gathered = gathered

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        placements = {"weight": Shard(0), "bias": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}
        place_parameters(module, mesh, placements)

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, Replicate())

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert isinstance(output, DTensor)
        return output.redistribute(placements=[Replicate() if self.gathered else Shard(-1)]).to_local()


class FusedColwise(Colwise):
    """Several column-parallel matrices stored as one, `blocks` output features each, one block after the other.

    The weight is cut as it is stored, in consecutive rows, so that checkpoints see one ordinary tensor. An exchange of
    the outputs then gives each rank its share of every block: [..., out / size], block after block.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.blocks = tuple(blocks)

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        local = super().write(module, output, mesh)
        size, rank = mesh.size(), mesh.get_local_rank()
        parts = {to: list(_overlaps(self.blocks, size, rank, to)) for to in range(size)}
        features = local.movedim(-1, 0)
        sent = torch.cat([features[part] for to in range(size) for part in parts[to]])
        sent_sizes = [_length(parts[to]) for to in range(size)]
        received_sizes = [_length(list(_overlaps(self.blocks, size, source, rank))) for source in range(size)]
        received = funcol.all_to_all_single_autograd(sent, received_sizes, sent_sizes, mesh.get_group())
        return received.movedim(0, -1).contiguous()


def _overlaps(blocks: Sequence[int], size: int, owner: int, wanted_by: int) -> Iterator[slice]:
    """Where, in the consecutive features of rank `owner`, those lie that rank `wanted_by` has of each block."""
    share = sum(blocks) // size
    begin = 0
    for block in blocks:
        first = max(begin + wanted_by * block // size, owner * share)
        last = min(begin + (wanted_by + 1) * block // size, (owner + 1) * share)
        if first < last:
            yield slice(first - owner * share, last - owner * share)
        begin += block


def _length(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)


class Rowwise(_Style):
    """A linear layer whose input features are shared out. Local [..., in / size] -> [..., out] in layout `output`.

    With `is_split=False` the input is replicated [..., in], and each rank takes its share of it.
    """

    def __init__(self, *, output: Placement, is_split: bool = True) -> None:
        self.output = output
        self.input = Shard(-1) if is_split else Replicate()

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        placements = {"weight": Shard(1), "bias": Replicate(), "lora_A": Shard(1), "lora_B": Replicate()}
        place_parameters(module, mesh, placements)

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.input).redistribute(placements=[Shard(-1)])

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert isinstance(output, DTensor)
        return output.redistribute(placements=[self.output]).to_local()


class Replicated(_Style):
    """A module whose parameters are whole on every rank, while its input and output have `layout`.

    Where ranks see different positions or heads, the gradients of its parameters are summed over ranks. `joined` gives
    the output whole to every rank.
    """

    def __init__(self, layout: Placement, *, joined: bool = False) -> None:
        self.layout = layout
        self.joined = joined

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        place_parameters(module, mesh, {name: Replicate() for name, _ in module.named_parameters(recurse=False)})

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.layout)

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert isinstance(output, DTensor)
        return (output.redistribute(placements=[Replicate()]) if self.joined else output).to_local()


class SharedKeys(Replicated):
    """The down-projection of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), whole on every rank.

    The last `rope_features` outputs are one key that all heads share: each rank's heads give it a part of its gradient.
    The rest goes through a column-parallel matrix, which sums its gradient itself.
    """

    def __init__(self, rope_features: int) -> None:
        super().__init__(Replicate())
        self.rope_features = rope_features

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        local = super().write(module, output, mesh)
        latent, key = local.split([local.shape[-1] - self.rope_features, self.rope_features], dim=-1)
        key = _as_dtensor(key, mesh, Replicate()).to_local(grad_placements=[Partial()])
        return torch.cat([latent, key], dim=-1)


class Region(_Style):
    """An attention or MLP whose matrices are shared out: it gets the hidden states whole, as a DTensor.

    Args:
        hidden: how the hidden states arrive.
        fused_heads: the module finds its heads in a fused projection by their numbers, which become this rank's.
    """

    def __init__(self, hidden: Placement, *, fused_heads: bool = False) -> None:
        self.hidden = hidden
        self.fused_heads = fused_heads

    def place(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not self.fused_heads:
            return
        attention = cast(Any, module)
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads //= mesh.size()
        attention.num_key_value_heads //= mesh.size()

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _as_dtensor(tensor, mesh, self.hidden).redistribute(placements=[Replicate()])


class WholeSequence(_Style):
    """A module that knows nothing of sequence parallelism: it gets all positions, and each rank keeps its own."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(tensor, mesh, SEQUENCE, Replicate())

    def write(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _relayout(output, mesh, Replicate(), SEQUENCE)


class SplitSequence(_Style):
    """The first transformer block: of whole hidden states [R, W, H] each rank keeps W / size positions."""

    def read(self, module: nn.Module, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert tensor.shape[1] % mesh.size() == 0, f"{tensor.shape[1]} positions on {mesh.size()} ranks"
        return _relayout(tensor, mesh, Replicate(), SEQUENCE)


class VocabularyParallelEmbedding(_Style):
    """Each rank holds some rows of the embedding and looks up the tokens it has: int64 [R, W] -> replicated [R, W, H].

    Written without DTensor's own embedding, whose gradient is whole on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        whole = module.weight.shape
        place_parameters(module, device_mesh, {"weight": Shard(0)})
        (rows, _), (first, _) = compute_local_shape_and_global_offset(whole, device_mesh, [Shard(0)])
        assert rows > 0, f"{whole[0]} embeddings on {device_mesh.size()} ranks"
        padding, forward = module.padding_idx, module.forward
        if padding is not None:
            module.padding_idx = padding - first if first <= padding < first + rows else None

        def lookup(input_ids: torch.Tensor) -> torch.Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            ids = input_ids - first
            is_elsewhere = (ids < 0) | (ids >= rows)
            module._parameters["weight"] = cast(nn.Parameter, weight.to_local())
            try:
                found = forward(ids.masked_fill(is_elsewhere, 0))
            finally:
                module._parameters["weight"] = cast(nn.Parameter, weight)
            return _relayout(found.masked_fill(is_elsewhere[..., None], 0), device_mesh, Partial(), Replicate())

        cast(Any, module).forward = lookup
        return module

"""Megatron parameters spread over ranks as generation and checkpoints want them: whole Hugging Face tensors.

    shard --(expert ranks)--> --(pipeline stages)--> --(tensor ranks)--> all shards --> Hugging Face tensors

Every rank walks the same list, made from the mapping, so every rank takes part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl.distributed.exported_tensor import ExportedTensor
from nemo_rl.models.policy.megatron.mapping import MappedTensor, WeightMap
from nemo_rl.models.policy.megatron.shard_layout import Replicated


@dataclass(frozen=True, kw_only=True)
class ExportGroups:
    """The groups of this rank that tensors are spread over; None where there is one rank.

    A rank has the same places in `tp`, `ep` and `etp` as the ranks of its `pp` group.
    """

    tp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None


def export_weights(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, groups: ExportGroups, device: torch.device
) -> list[ExportedTensor]:
    """Every Hugging Face tensor of the model, in its order, under its name on disk. Collective over `groups.pp`.

    `parameters`: as for `load_weights`; looked up anew at every gather. `gather(dtype)` is a collective over all ranks
    and is called in the order of the list: tensors that make up one Megatron tensor are gathered with the first of
    them. At most one Megatron tensor is gathered at a time. A tied output layer is left out.
    """
    held = _held_by_stage({name: tensor.dtype for name, tensor in parameters.items()}, groups.pp)
    exported = []
    for entry in weight_map.entries:
        name = entry.name(_size(groups.ep))
        stage = next((index for index, names in enumerate(held) if name in names), None)
        assert stage is not None, f"no rank holds {name}"
        spread = _Spread(parameters, entry, groups, device, stage, held[stage][name])
        for index, source in enumerate(entry.sources):
            exported.append(
                ExportedTensor(
                    name=source.name,
                    shape=source.shape,
                    dtype=spread.dtype,
                    gather=spread.part(index),
                    keeps_dtype=entry.is_buffer,
                )
            )
    return exported


@dataclass
class _Spread:
    """A Megatron tensor gathered for its first Hugging Face tensor and let go with its last."""

    parameters: Mapping[str, torch.Tensor]
    entry: MappedTensor
    groups: ExportGroups
    device: torch.device
    stage: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def part(self, index: int) -> Callable[[torch.dtype | None], torch.Tensor]:
        count = len(self.entry.sources)

        def gather(dtype: torch.dtype | None) -> torch.Tensor:
            if index == 0:
                self._parts = self._gather(self.dtype if dtype is None else dtype)
            assert len(self._parts) == count, "tensors are gathered in order"
            part = self._parts[index]
            if index == count - 1:
                self._parts = []
            return part

        return gather

    def _gather(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The whole Hugging Face tensors, cast before they travel where that makes less to send."""
        sent = dtype if dtype.itemsize < self.dtype.itemsize else self.dtype
        entry, groups = self.entry, self.groups
        cut = groups.tp if entry.expert is None else groups.etp
        cut = None if isinstance(entry.layout, Replicated) else cut
        owner = entry.ep_owner(_size(groups.ep))
        is_owner = self.stage == _rank(groups.pp) and owner in (None, _rank(groups.ep))
        if is_owner:
            shard = self.parameters[entry.name(_size(groups.ep))].detach().to(sent).to(self.device).contiguous()
        else:
            shard = torch.empty(entry.shard_shape(_size(cut)), dtype=sent, device=self.device)
        if owner is not None and self.stage == _rank(groups.pp):
            _broadcast(shard, owner, groups.ep)
        _broadcast(shard, self.stage, groups.pp)
        return entry.join([shard.to(dtype) for shard in _all_gather(shard, cut)])


def _held_by_stage(own: dict[str, torch.dtype], group: dist.ProcessGroup | None) -> Sequence[Mapping[str, torch.dtype]]:
    if group is None:
        return [own]
    everywhere: list[dict[str, torch.dtype]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everywhere, own, group=group)
    return everywhere


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def _all_gather(shard: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if group is None:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return shards


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()

"""Megatron parameters on a rank <-> Hugging Face tensors.

`load_weights` fills them from a checkpoint: each rank reads the slices it owns straight from safetensors, so no rank
ever holds the whole model. `export_weights` gathers whole tensors for checkpoints in Hugging Face format.
`local_shards` lists a rank's shards for a refit, which gathers nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.megatron.mapping import (
    CheckpointTensor,
    HFTensor,
    MappedTensor,
    ParallelRanks,
    Replicated,
    ShardSlice,
    Vocabulary,
    WeightMap,
)
from nemo_rl.models.policy.weight_loading import StoredModel
from nemo_rl.refit.layout import ExportedTensor, GatheredParts
from nemo_rl.refit.shard_sender import ExportedShard

logger = logging.getLogger(__name__)


class _Target(NamedTuple):
    """A slice of a Hugging Face tensor and the view of a parameter that it fills."""

    source: HFTensor
    part: ShardSlice
    view: torch.Tensor


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, ranks: ParallelRanks, model_path: str
) -> None:
    """Fill the parameters and buffers of a rank in place, and padding rows of the vocabulary with zeros. Collective.

    A checkpoint that is not in safetensors is read by transformers on rank 0 and broadcast one tensor at a time.

    Args:
        parameters: by Megatron name, with layer numbers of the whole model and expert numbers of the rank.
        model_path: a directory or a model of the hub.

    Raises:
        ValueError: names or shapes on disk differ from config.json, or a tensor does not divide evenly.
    """
    targets = _targets(parameters, weight_map, ranks)
    with StoredModel(model_path) as stored:
        if stored.names is not None:
            _read(targets, weight_map.locate(stored.names), stored)
            return
    logger.info("%s holds no safetensors: rank 0 loads it whole and broadcasts it", model_path)
    by_name: dict[str, list[_Target]] = defaultdict(list)
    for target in targets:
        by_name[target.source.name].append(target)
    for name, whole in _broadcast_from_rank_zero(weight_map, model_path):
        for target in by_name[name]:
            target.view.copy_(whole.narrow(target.part.dim, target.part.start, target.part.length))


def _targets(parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, ranks: ParallelRanks) -> list[_Target]:
    entries = weight_map.on_rank(ranks)
    assert parameters.keys() <= entries.keys(), f"not mapped: {sorted(parameters.keys() - entries.keys())}"
    targets = []
    for name, parameter in parameters.items():
        entry = entries[name]
        rank, size = entry.rank_and_size(ranks)
        shape = entry.shard_shape(size)
        assert tuple(parameter.shape) == shape, f"{name} is {tuple(parameter.shape)}, not {shape}"
        if isinstance(entry.layout, Vocabulary):
            parameter.zero_()
        for part in entry.slices(rank, size):
            view = parameter.narrow(part.dim, part.at, part.length)
            targets.append(_Target(entry.sources[part.source], part, view))
    return targets


def _read(targets: list[_Target], located: Mapping[str, CheckpointTensor], stored: StoredModel) -> None:
    for target in targets:
        location = located[target.source.name]
        tensor = stored.tensor(location.name)
        if tuple(tensor.get_shape()) != location.shape:
            raise ValueError(
                f"{stored.model_path}: tensor {location.name} has shape {tuple(tensor.get_shape())}, the model's "
                f"config.json says {location.shape}; the weights and config.json do not belong together"
            )
        target.view.copy_(tensor[location.index(target.part)])


def _broadcast_from_rank_zero(weight_map: WeightMap, model_path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name on disk, whole tensor) of the model, on every rank."""
    whole: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto", output_loading_info=True)
        model, loading = loaded
        drawn = loading["missing_keys"]  # initialised at random because the checkpoint lacks them
        names = ExpertNames(weight_map.model_type)
        for name, tensor in model.state_dict().items():
            if name not in drawn:
                whole |= names.split(name, tensor)
    described: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in whole.items()]]
    dist.broadcast_object_list(described, src=0)
    weight_map.locate(name for name, _, _ in described[0])
    for name, shape, dtype in described[0]:
        tensor = whole[name].contiguous() if name in whole else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, src=0)
        yield name, tensor


# -- whole tensors
#
#     shard --(expert ranks)--> --(pipeline stages)--> --(tensor ranks)--> all shards --> Hugging Face tensors
#
# Every rank walks the same list, made from the mapping, so every rank takes part in the same collectives.


@dataclass(frozen=True, kw_only=True)
class ExportGroups:
    """The groups of this rank that tensors are sharded over; None for a group of one rank.

    A rank has the same rank in `tp`, `ep` and `etp` as the other ranks of its `pp` group.
    """

    tp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None


def export_weights(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, groups: ExportGroups, device: torch.device
) -> list[ExportedTensor]:
    """Every Hugging Face tensor of the model, in its order, under its name on disk. Collective over `groups.pp`.

    `parameters` as for `load_weights`; each gather looks them up anew. `gather(dtype)` is a collective over all ranks,
    to be called in the order of the list: the tensors in one Megatron tensor are gathered with the first of them, and
    one Megatron tensor at a time. A tied output layer is left out.
    """
    own = {name: tensor.dtype for name, tensor in parameters.items()}
    stages: list[dict[str, torch.dtype]] = [own] * _size(groups.pp)
    if groups.pp is not None:
        dist.all_gather_object(stages, own, group=groups.pp)
    exported = []
    for entry in weight_map.entries:
        name = entry.name(_size(groups.ep))
        stage = next((index for index, names in enumerate(stages) if name in names), None)
        assert stage is not None, f"no rank holds {name}"
        dtype = stages[stage][name]
        parts = GatheredParts(
            len(entry.sources), partial(_gather, parameters, entry, groups, device, stage=stage, dtype=dtype)
        )
        for index, source in enumerate(entry.sources):
            exported.append(
                ExportedTensor(
                    name=source.name,
                    shape=source.shape,
                    dtype=dtype,
                    gather=parts.part(index),
                    keeps_dtype=entry.is_buffer,
                )
            )
    return exported


def _gather(
    parameters: Mapping[str, torch.Tensor],
    entry: MappedTensor,
    groups: ExportGroups,
    device: torch.device,
    wanted: torch.dtype | None,
    *,
    stage: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The whole Hugging Face tensors of `entry`, which `stage` holds in `dtype`, as `wanted` (None: in `dtype`)."""
    wanted = dtype if wanted is None else wanted
    sent = wanted if wanted.itemsize < dtype.itemsize else dtype  # cast first if that reduces the bytes to send
    sharded_over = groups.tp if entry.expert is None else groups.etp
    if isinstance(entry.layout, Replicated):
        sharded_over = None
    owner = entry.ep_owner(_size(groups.ep))
    in_stage = stage == _rank(groups.pp)
    if in_stage and owner in (None, _rank(groups.ep)):
        shard = parameters[entry.name(_size(groups.ep))].detach().to(sent).to(device).contiguous()
    else:
        shard = torch.empty(entry.shard_shape(_size(sharded_over)), dtype=sent, device=device)
    if owner is not None and in_stage:
        _broadcast(shard, owner, groups.ep)
    _broadcast(shard, stage, groups.pp)
    shards = [shard]
    if sharded_over is not None:
        shards = [torch.empty_like(shard) for _ in range(sharded_over.size())]
        dist.all_gather(shards, shard, group=sharded_over)
    return entry.unshard([shard.to(wanted) for shard in shards])


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


# -- this rank's shards


def local_shards(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, ranks: ParallelRanks, device: torch.device
) -> list[ExportedShard]:
    """This rank's shard of every Hugging Face tensor that it holds a part of, in the order of the model.

    `parameters` as for `load_weights`; every sync looks them up anew and moves them to `device`. A shard is a view of
    its parameter, except for queries, keys and values, which are interleaved and therefore copied. The last stage's
    copy of a tied embedding is left out.
    """
    shards = []
    for entry in weight_map.entries:
        name = entry.name(ranks.ep_size)
        if name not in parameters or entry.ep_owner(ranks.ep_size) not in (None, ranks.ep_rank):
            continue
        by_source: dict[int, list[ShardSlice]] = {}
        for part in entry.slices(*entry.rank_and_size(ranks)):
            by_source.setdefault(part.source, []).append(part)
        for number, parts in by_source.items():
            parts.sort(key=lambda part: part.start)
            source = entry.sources[number]
            assert all(a.stop == b.start for a, b in itertools.pairwise(parts)), f"{source.name} has gaps"
            shards.append(
                ExportedShard(
                    name=source.name,
                    dtype=parameters[name].dtype,
                    dim=parts[0].dim,
                    start=parts[0].start,
                    stop=parts[-1].stop,
                    local=_local_values(parameters, name, parts, device),
                    keeps_dtype=entry.is_buffer,
                )
            )
    return shards


def _local_values(
    parameters: Mapping[str, torch.Tensor], name: str, parts: Sequence[ShardSlice], device: torch.device
) -> Callable[[], torch.Tensor]:
    def local() -> torch.Tensor:
        parameter = parameters[name].detach()
        views = [parameter.narrow(part.dim, part.at, part.length) for part in parts]
        return (views[0] if len(views) == 1 else torch.cat(views, dim=parts[0].dim)).to(device)

    return local

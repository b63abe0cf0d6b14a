"""Weights of a Hugging Face checkpoint -> the Megatron parameters that a rank holds.

Each rank reads the slices it owns straight from safetensors, so no rank ever holds the whole model. A checkpoint in
another format is read by transformers on rank 0 and sent around one tensor at a time.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.megatron.mapping import HFTensor, MappedTensor, StoredPlace, WeightMap
from nemo_rl.models.policy.megatron.shard_layout import Piece, Replicated, ShardPlace, Vocabulary
from nemo_rl.models.policy.weight_loading import StoredModel
from nemo_rl.refit.layout import ExportedTensor, GatheredParts
from nemo_rl.refit.shard_sender import ExportedShard

logger = logging.getLogger(__name__)


class _Target(NamedTuple):
    """A piece of a Hugging Face tensor and the part of a parameter that it fills."""

    source: HFTensor
    piece: Piece
    part: torch.Tensor


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, place: ShardPlace, model_path: str
) -> None:
    """Fill the parameters and buffers of a rank in place, rows of padded tokens with zeros. Collective.

    `parameters`: by Megatron name, with layer numbers of the whole model and expert numbers of the rank. `model_path`
    is a directory or hub model.

    Raises:
        ValueError: names or shapes on disk are not those of config.json, or a tensor cannot be cut evenly.
    """
    targets = _targets(parameters, weight_map, place)
    with StoredModel(model_path) as stored:
        if stored.names is not None:
            _read(targets, weight_map.locate(stored.names), stored)
            return
    logger.info("%s holds no safetensors: rank 0 loads it whole and sends it around", model_path)
    by_name: dict[str, list[_Target]] = defaultdict(list)
    for target in targets:
        by_name[target.source.name].append(target)
    for name, whole in _sent_from_rank_zero(weight_map, model_path):
        for target in by_name[name]:
            target.part.copy_(whole.narrow(target.piece.dim, target.piece.start, target.piece.length))


def _targets(parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, place: ShardPlace) -> list[_Target]:
    entries = weight_map.held(place)
    assert parameters.keys() <= entries.keys(), f"not mapped: {sorted(parameters.keys() - entries.keys())}"
    targets = []
    for name, parameter in parameters.items():
        entry = entries[name]
        rank, size = entry.rank_and_size(place)
        shape = entry.shard_shape(size)
        assert tuple(parameter.shape) == shape, f"{name} is {tuple(parameter.shape)}, not {shape}"
        if isinstance(entry.layout, Vocabulary):
            parameter.zero_()
        for piece in entry.pieces(rank, size):
            part = parameter.narrow(piece.dim, piece.at, piece.length)
            targets.append(_Target(entry.sources[piece.source], piece, part))
    return targets


def _read(targets: list[_Target], located: Mapping[str, StoredPlace], stored: StoredModel) -> None:
    for target in targets:
        place = located[target.source.name]
        tensor = stored.tensor(place.name)
        if tuple(tensor.get_shape()) != place.shape:
            raise ValueError(
                f"{stored.model_path}: tensor {place.name} has shape {tuple(tensor.get_shape())}, the model's "
                f"config.json says {place.shape}; the weights and config.json do not belong together"
            )
        target.part.copy_(tensor[place.index(target.piece)])


def _sent_from_rank_zero(weight_map: WeightMap, model_path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name on disk, whole tensor) of the model, on every rank."""
    whole: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto", output_loading_info=True)
        model, loading = loaded
        drawn = loading["missing_keys"]  # at random, because they are not there
        names = ExpertNames(weight_map.model_type)
        for name, tensor in model.state_dict().items():
            if name not in drawn:
                whole |= names.split(name, tensor)
    described: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in whole.items()]]
    dist.broadcast_object_list(described, src=0)
    weight_map.check_names(name for name, _, _ in described[0])
    for name, shape, dtype in described[0]:
        tensor = whole[name].contiguous() if name in whole else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, src=0)
        yield name, tensor


# -- Megatron parameters spread over ranks as generation and checkpoints want them: whole Hugging Face tensors.
#
#     shard --(expert ranks)--> --(pipeline stages)--> --(tensor ranks)--> all shards --> Hugging Face tensors
#
# Every rank walks the same list, made from the mapping, so every rank takes part in the same collectives.


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
        parts = GatheredParts(len(entry.sources), spread.gather)
        for index, source in enumerate(entry.sources):
            exported.append(
                ExportedTensor(
                    name=source.name,
                    shape=source.shape,
                    dtype=spread.dtype,
                    gather=parts.part(index),
                    keeps_dtype=entry.is_buffer,
                )
            )
    return exported


@dataclass
class _Spread:
    """A Megatron tensor, to be gathered whole."""

    parameters: Mapping[str, torch.Tensor]
    entry: MappedTensor
    groups: ExportGroups
    device: torch.device
    stage: int
    dtype: torch.dtype

    def gather(self, wanted: torch.dtype | None) -> list[torch.Tensor]:
        """The whole Hugging Face tensors, cast before they travel where that makes less to send."""
        dtype = self.dtype if wanted is None else wanted
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


# -- What a rank holds of the Hugging Face tensors, for sending it without gathering (`distributed.shard_sender`).


def held_shards(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, place: ShardPlace, device: torch.device
) -> list[ExportedShard]:
    """This rank's part of every Hugging Face tensor that it holds one of, in the order of the model.

    `parameters`: as for `load_weights`; looked up anew at every sync, and brought to `device`. A shard is a view of its
    parameter, except for queries, keys and values, which lie in turns and are copied. The copy of a tied embedding
    that the last stage has is left out.
    """
    shards = []
    for entry in weight_map.entries:
        name = entry.name(place.ep_size)
        if name not in parameters or entry.ep_owner(place.ep_size) not in (None, place.ep_rank):
            continue
        by_source: dict[int, list[Piece]] = {}
        for piece in entry.pieces(*entry.rank_and_size(place)):
            by_source.setdefault(piece.source, []).append(piece)
        shards += [_shard(parameters, name, entry, pieces, device) for pieces in by_source.values()]
    return shards


def _shard(
    parameters: Mapping[str, torch.Tensor],
    name: str,
    entry: MappedTensor,
    pieces: Sequence[Piece],
    device: torch.device,
) -> ExportedShard:
    pieces = sorted(pieces, key=lambda piece: piece.start)
    source, dim = entry.sources[pieces[0].source], pieces[0].dim
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces)), f"{source.name} has gaps"
    return ExportedShard(
        name=source.name,
        dtype=parameters[name].dtype,
        dim=dim,
        start=pieces[0].start,
        stop=pieces[-1].stop,
        local=_values(parameters, name, pieces, device),
        keeps_dtype=entry.is_buffer,
    )


def _values(
    parameters: Mapping[str, torch.Tensor], name: str, pieces: Sequence[Piece], device: torch.device
) -> Callable[[], torch.Tensor]:
    def local() -> torch.Tensor:
        parameter = parameters[name].detach()
        parts = [parameter.narrow(piece.dim, piece.at, piece.length) for piece in pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=pieces[0].dim)).to(device)

    return local

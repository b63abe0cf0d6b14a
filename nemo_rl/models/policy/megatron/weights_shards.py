"""What a rank holds of the Hugging Face tensors, for sending it without gathering (`distributed.shard_sender`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from nemo_rl.distributed.shard_sender import ExportedShard
from nemo_rl.models.policy.megatron.mapping import MappedTensor, WeightMap
from nemo_rl.models.policy.megatron.shard_layout import Piece, ShardPlace


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

"""Weights of a Hugging Face checkpoint -> the Megatron parameters that a rank holds.

Each rank reads the slices it owns straight from safetensors, so no rank ever holds the whole model. A checkpoint in
another format is read by transformers on rank 0 and sent around one tensor at a time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.expert_names import ExpertNames
from nemo_rl.models.policy.megatron.mapping import HFTensor, StoredPlace, WeightMap
from nemo_rl.models.policy.megatron.shard_layout import Piece, ShardPlace, Vocabulary
from nemo_rl.models.policy.weight_loading import StoredModel

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

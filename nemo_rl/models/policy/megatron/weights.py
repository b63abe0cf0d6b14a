"""Megatron parameters on a rank <-> Hugging Face tensors.

`load_weights` fills them from a checkpoint: each rank reads the slices it owns straight from the files, so no rank ever
holds the whole model. `local_shards` lists a rank's shards for a refit, which gathers nothing. `export_weights`
gathers whole tensors for checkpoints in Hugging Face format.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.models.policy.megatron.mapping import HFTensor, ParallelRanks, ShardSlice, Vocabulary, WeightMap
from nemo_rl.models.policy.weight_loading import StoredModel
from nemo_rl.refit.layout import ExportedTensor, OwnParts
from nemo_rl.refit.shard_sender import ExportedShard


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, ranks: ParallelRanks, model_path: str
) -> list[str]:
    """Fill the parameters and buffers of a rank in place, and padding rows of the vocabulary with zeros.

    Args:
        parameters: by Megatron name, with layer numbers of the whole model and expert numbers of the rank.
        model_path: a directory or a model of the hub.

    Returns:
        Names of the parameters that the files lack: at most the head of a reward or value model.

    Raises:
        ValueError: there are no weights, names or shapes on disk differ from config.json, or a tensor does not divide
            evenly.
    """
    entries = weight_map.on_rank(ranks)
    assert parameters.keys() <= entries.keys(), f"not mapped: {sorted(parameters.keys() - entries.keys())}"
    lacking = []
    with StoredModel(model_path, torch_files=True) as stored:
        if stored.names is None:
            raise ValueError(f"{model_path} holds neither *.safetensors nor pytorch_model*.bin")
        located = weight_map.locate(stored.names)
        for name, parameter in parameters.items():
            entry = entries[name]
            if entry.sources[0].name not in located:
                lacking.append(name)
                continue
            # Experts have a tensor parallelism of their own.
            rank, size = entry.rank_and_size(ranks)
            shape = entry.shard_shape(size)
            assert tuple(parameter.shape) == shape, f"{name} is {tuple(parameter.shape)}, not {shape}"
            if isinstance(entry.layout, Vocabulary):
                parameter.zero_()  # padding rows are in no file, and a head with other values there would predict them
            for part in entry.slices(rank, size):
                location = located[entry.sources[part.source].name]
                tensor = stored.tensor(location.name)
                if tuple(tensor.get_shape()) != location.shape:
                    raise ValueError(
                        f"{stored.model_path}: tensor {location.name} has shape {tuple(tensor.get_shape())}, the "
                        f"model's config.json says {location.shape}; the weights and config.json do not belong together"
                    )
                parameter.narrow(part.dim, part.at, part.length).copy_(tensor[location.index(part)])
    return lacking


# -- this rank's shards, and whole tensors gathered from the shards of all ranks


def local_shards(
    parameters: Mapping[str, torch.Tensor],
    weight_map: WeightMap,
    ranks: ParallelRanks,
    device: torch.device,
    value: Callable[[str], torch.Tensor] | None = None,
) -> list[ExportedShard]:
    """This rank's shard of every Hugging Face tensor that it holds a part of, in the order of the model.

    A shard is a view of its parameter, except for queries, keys and values, which are interleaved and therefore copied.
    The last stage's copy of a tied embedding is left out.

    Args:
        parameters: as for `load_weights`.
        device: every sync moves the shards to it.
        value: name -> the values to send, looked up at every sync. Default: `parameters`.
    """
    value = value or parameters.__getitem__
    shards = []
    held = weight_map.on_rank(ranks, with_tied_output=False)
    for name, entry in ((name, entry) for name, entry in held.items() if name in parameters):
        # A fused matrix, such as linear_qkv, becomes the tensors it was made of.
        by_source: dict[int, list[ShardSlice]] = defaultdict(list)
        for part in entry.slices(*entry.rank_and_size(ranks)):
            by_source[part.source].append(part)
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
                    local=partial(_joined, partial(value, name), parts, device),
                    keeps_dtype=entry.is_buffer,
                )
            )
    return shards


def _joined(value: Callable[[], torch.Tensor], parts: Sequence[ShardSlice], device: torch.device) -> torch.Tensor:
    parameter = value().detach()
    views = [parameter.narrow(part.dim, part.at, part.length) for part in parts]
    return (views[0] if len(views) == 1 else torch.cat(views, dim=parts[0].dim)).to(device)


def export_weights(
    shards: Sequence[ExportedShard], weight_map: WeightMap, device: torch.device
) -> list[ExportedTensor]:
    """Every Hugging Face tensor of the model, in its order, under its name on disk. A collective over all ranks.

    `shards` are this rank's `local_shards`. Each gather broadcasts every distinct shard from the first rank that holds
    it, and holds one tensor at a time. A rank has no part of its own to compare: what it sends stays as it is.
    """
    own = [(shard.name, shard.dtype, shard.keeps_dtype, (shard.dim, shard.start, shard.stop)) for shard in shards]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)  # once for all gathers
    dtypes: dict[str, tuple[torch.dtype, bool]] = {}
    holders: dict[str, dict[tuple[int, int, int], int]] = defaultdict(dict)  # name -> (dim, start, stop) -> rank
    for rank, held in enumerate(of_ranks):
        for name, dtype, keeps_dtype, extent in held:
            dtypes[name] = (dtype, keeps_dtype)
            holders[name].setdefault(extent, rank)  # replicas of a shard are equal: the first of them sends
    local = {shard.name: shard.local for shard in shards}

    def gather(source: HFTensor, wanted: torch.dtype | None, parts: OwnParts) -> torch.Tensor:
        whole = torch.empty(source.shape, dtype=dtypes[source.name][0], device=device)
        # The same order on every rank: each of these is a collective.
        for (dim, start, stop), rank in holders[source.name].items():
            target = whole.narrow(dim, start, stop - start)
            shard = torch.empty(target.shape, dtype=whole.dtype, device=device)
            if rank == dist.get_rank():
                shard.copy_(local[source.name]())
            dist.broadcast(shard, src=rank)
            target.copy_(shard)
        return whole if wanted is None else whole.to(wanted)

    missing = [source.name for source in weight_map.hf_tensors if source.name not in dtypes]
    assert not missing, f"no rank holds {missing}"
    return [
        ExportedTensor(
            name=source.name,
            shape=source.shape,
            dtype=dtypes[source.name][0],
            collective=partial(gather, source),
            keeps_dtype=dtypes[source.name][1],
        )
        for source in weight_map.hf_tensors
    ]

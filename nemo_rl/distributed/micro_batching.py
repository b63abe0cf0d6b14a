"""The rows of a global batch on each shard, and their micro-batches, for `BatchedDataDict.shard_by_batch_size`.

Only scripts that divide batches themselves, as those of NeMo RL do, import this: a run plans from lengths alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, MicroBatches
from nemo_rl.utils.registry import import_object


def _lengths(batch: BatchedDataDict[Any], rows: Sequence[int], key: str, multiple: int, limit: int) -> list[int]:
    """Lengths of `rows`, rounded up. ValueError for one above `limit`."""
    lengths = [-(-int(batch[key][row]) // multiple) * multiple for row in rows]
    if (longest := max(lengths, default=0)) > limit:
        raise ValueError(f"a row of {longest} tokens does not fit: raise max_tokens_per_microbatch above {limit}")
    return lengths


def dynamic(
    batch: BatchedDataDict[Any],
    rows: Sequence[int],
    shards: int,
    micro: list[MicroBatches],
    *,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    input_key: str,
    input_lengths_key: str,
) -> list[list[int]]:
    """The rows of each shard, and their micro-batches, of a global batch."""
    width = batch[input_key].shape[1]
    _lengths(batch, rows, input_lengths_key, 1, max_tokens_per_microbatch)
    in_order = sorted(rows, key=lambda row: int(batch[input_lengths_key][row]))
    parts = [in_order[i::shards] for i in range(shards)]
    ranges: list[list[int]] = []
    lengths: list[int] = []
    for position, together in enumerate(zip(*parts, strict=True)):
        longest = max(int(batch[input_lengths_key][row]) for row in together)
        longest = min(width, -(-longest // sequence_length_round) * sequence_length_round)
        if ranges and (position + 1 - ranges[-1][0]) * longest <= max_tokens_per_microbatch:
            ranges[-1][1], lengths[-1] = position + 1, longest
        else:
            ranges.append([position, position + 1])
            lengths.append(longest)
    for own in micro:
        own.indices.append(copy.deepcopy(ranges))
        own.lengths.append(list(lengths))
        own.num_rows.append(len(parts[0]))
    return parts


def packed(
    batch: BatchedDataDict[Any],
    rows: Sequence[int],
    shards: int,
    micro: list[MicroBatches],
    *,
    max_tokens_per_microbatch: int,
    algorithm: str,
    input_key: str,
    input_lengths_key: str,
    sequence_length_pad_multiple: int,
) -> list[list[int]]:
    """The rows of each shard, bin after bin, and the bins, of a global batch."""
    lengths = _lengths(batch, rows, input_lengths_key, sequence_length_pad_multiple, max_tokens_per_microbatch)
    get_packer = import_object("nemo_rl.data.packing:get_packer", "packer")  # the package above this one
    packer = get_packer(algorithm, max_tokens_per_microbatch, min_bin_count=shards, bin_count_multiple=shards)
    bins = packer.pack(lengths)
    parts = []
    for shard, own in enumerate(micro):
        mine = bins[shard::shards]
        ends = [sum(map(len, mine[: i + 1])) for i in range(len(mine))]
        own.indices.append([[end - len(bin_), end] for end, bin_ in zip(ends, mine, strict=True)])
        own.lengths.append([sum(lengths[i] for i in bin_) for bin_ in mine])
        own.num_rows.append(sum(map(len, mine)))
        parts.append([rows[i] for bin_ in mine for i in bin_])
    return parts

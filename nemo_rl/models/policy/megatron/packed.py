"""A micro-batch in the words of Megatron: packed sequences (its `thd` layout)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from nemo_rl.models.policy.attention import Segments
from nemo_rl.models.policy.model_batch import ModelBatch


@dataclass
class SegmentParams(PackedSeqParams):
    """Megatron's description of packed sequences, and ours. Every layer gets it, when recomputed too."""

    segments: Segments | None = None
    batch: ModelBatch | None = None


def packed_params(batch: ModelBatch, context_size: int) -> SegmentParams:
    """The sequences of a padding-free batch, of which each of `context_size` ranks has two chunks of each.

    Lengths are those of the whole sequences, rounded up to chunks; padding at the end is a sequence of its own.
    """
    assert batch.segments is not None
    queries = batch.segments.query_lengths
    if context_size > 1:
        pairs = [queries[at] + queries[at + 1] for at in range(0, len(queries) - 1, 2)]
        queries = tuple(pairs) + queries[2 * len(pairs) :]
    lengths = [length * context_size for length in queries]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=batch.input_ids.device)
    longest = max(lengths)
    return SegmentParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        segments=batch.segments,
        batch=batch,
    )

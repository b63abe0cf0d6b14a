"""Adapters that travel apart from their weights: an engine adds them to the weights in its own memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl.refit.layout import Segment, merge


class Adapters:
    """Writes W + B A into the memory of W.

    Every merge begins at the kept values of W, so nothing accumulates over syncs. An engine that holds a slice of W
    keeps and computes that slice alone.
    """

    def __init__(self) -> None:
        self.halves: dict[int, tuple[int, torch.Tensor]] = {}  # weight -> (tensor, values) of A or B alone
        self._base: dict[int, list[torch.Tensor]] = {}  # weight -> its values without adapter, in host memory

    def holds(self, weight: int) -> bool:
        """Whether the values of `weight` without its adapter are kept."""
        return weight in self._base

    @torch.no_grad()
    def add(self, weight: int, segments: Sequence[Segment], tensor: int, values: torch.Tensor) -> None:
        """Keep one matrix of an adapter until the other arrives, then merge both into the `segments` of `weight`.

        `tensor`: number of the matrix in the layout, where A [r, in] comes before B [out, r].

        Raises:
            ValueError: a segment is no block of rows and columns.
        """
        if weight not in self.halves:
            self.halves[weight] = (tensor, values.clone())
            return
        halves = [self.halves.pop(weight), (tensor, values)]
        (_, lora_a), (_, lora_b) = sorted(halves, key=lambda half: half[0])
        if weight not in self._base:
            self._base[weight] = [
                torch.empty_like(s.target, device="cpu", pin_memory=s.target.is_cuda).copy_(s.target) for s in segments
            ]
        for segment, base in zip(segments, self._base[weight], strict=True):
            rows, columns = _block(segment, lora_a.shape[1])
            base = base.to(segment.target.device, non_blocking=True)
            segment.target.copy_(merge(base, lora_a[:, columns], lora_b[rows], 1.0))


def _block(segment: Segment, width: int) -> tuple[slice, slice]:
    """Rows and columns that a segment covers of a matrix with `width` columns. ValueError if it is no such block."""
    row, column = divmod(segment.offset, width)
    if len(segment.size) == 2:
        num_rows, num_columns = segment.size
        in_rows = num_rows == 1 or segment.stride[0] == width
        in_columns = num_columns == 1 or segment.stride[1] == 1
        if in_rows and in_columns and column + num_columns <= width:
            return slice(row, row + num_rows), slice(column, column + num_columns)
    raise ValueError(f"the engine takes it as {list(segment.size)} with strides {list(segment.stride)}")

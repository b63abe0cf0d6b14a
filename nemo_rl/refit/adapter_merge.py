"""Low-rank adapters added to the weights they belong to, W + s B A, at training and at generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl.refit.layout import Segment


def merge(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    """W [out, in] + scale B [out, r] A [r, in], computed in float32, in the dtype of W."""
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale).to(weight.dtype)


class AdapterMerger:
    """Adds adapters to the adapted weights of an engine, whose base values it keeps in host memory.

    Every merge begins at the base values, so nothing adds up over syncs. An engine that holds a part of a weight (a
    slice of its rows or columns) keeps and computes that part alone. Weights go by the number of their tensor.
    """

    def __init__(self) -> None:
        self._base: dict[int, list[torch.Tensor]] = {}

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._base

    def forget(self) -> None:
        """Let go of all base values: other ones are on their way."""
        self._base.clear()

    def keep(self, tensor: int, segments: Sequence[Segment]) -> None:
        """What the engine holds of a weight now is its base value."""
        self._base[tensor] = [
            torch.empty_like(s.target, device="cpu", pin_memory=s.target.is_cuda).copy_(s.target) for s in segments
        ]

    @torch.no_grad()
    def merge(self, tensor: int, segments: Sequence[Segment], lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        """Write W + B A into what `segments` says of W [out, in]; A [r, in] and B [out, r] are whole.

        Raises:
            ValueError: when a segment is no block of rows and columns of W.
        """
        for segment, base in zip(segments, self._base[tensor], strict=True):
            rows, columns = _block(segment, lora_a.shape[1])
            base = base.to(segment.target.device, non_blocking=True)
            segment.target.copy_(merge(base, lora_a[:, columns], lora_b[rows], 1.0))


def _block(segment: Segment, width: int) -> tuple[slice, slice]:
    """Rows and columns of a matrix with `width` columns that a segment of it takes in."""
    row, column = divmod(segment.offset, width)
    if len(segment.size) == 2:
        num_rows, num_columns = segment.size
        in_rows = num_rows == 1 or segment.stride[0] == width
        in_columns = num_columns == 1 or segment.stride[1] == 1
        if in_rows and in_columns and column + num_columns <= width:
            return slice(row, row + num_rows), slice(column, column + num_columns)
    raise ValueError(f"the engine takes it as {list(segment.size)} with strides {list(segment.stride)}")

"""Products in float32 of which a row has the same bits in every batch.

BLAS and oneDNN choose kernels by the number of rows, which is the number of tokens that an engine has scheduled. So the
logits of a token would depend on the other requests. `RowInvariantLinear` packs a weight for one kernel and checks each
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

ROW_BLOCKS = (512, 256, 128, 64, 32, 16, 8)
"""Numbers of rows into which a product is split if it cannot be computed at once, largest first. Every other number is
compared with the smallest, which is above the sizes for which BLAS may have special kernels."""

_MAX_ROWS_TRIED = 64  # larger numbers of rows become multiples of the smallest block, which costs little there
_NUMBERS_COMPARED = 64  # in each row, to prove that two products agree


class RowInvariantLinear:
    """`x @ weight.T + bias` for float32 `x` [..., K] and `weight` [N, K], with a copy of the weight packed for MKL.

    Row i of the result has the same bits whatever T, i and the other rows are. After the weight was written, `pack` has
    to be called.

    Raises:
        RuntimeError: this machine's matrix product cannot guarantee this for the shape.
    """

    _proven: ClassVar[dict[tuple[int, int, int], bool]] = {}  # (T, N, K) -> its bits equal those at the smallest T

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.pack(weight)
        split_rows(ROW_BLOCKS[-1], self._agrees)

    def pack(self, weight: torch.Tensor) -> None:
        """Use this weight from now on."""
        self._parts: dict[int, list[int]] = {}  # rows of the products for T rows; weights that are zero prove none
        self._weight = self._packed = weight.data
        if torch.backends.mkl.is_available():  # not on ARM
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._weight, ROW_BLOCKS[0])

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.ndim != 2:  # vision towers have a further dimension
            return self(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], self.shape[0])
        num_rows = x.shape[0]
        if (sizes := self._parts.get(num_rows)) is None:
            sizes = self._parts[num_rows] = split_rows(padded_rows(num_rows, self._agrees), self._agrees)
        if sizes == [num_rows]:
            return self._product(x, bias)
        if sum(sizes) != num_rows:
            x = torch.nn.functional.pad(x, (0, 0, 0, sum(sizes) - num_rows))
        parts = [self._product(part, bias) for part in x.split(sizes)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is self._weight or len(x) == 0:
            return torch.nn.functional.linear(x, self._weight, bias)
        return torch.ops.mkl._mkl_linear(x, self._packed, self._weight, bias, len(x))

    def _agrees(self, num_rows: int) -> bool:
        """Whether a product of `num_rows` rows has the bits of one of the smallest; found out in its first use."""
        key = (num_rows, *self.shape)
        if key in self._proven:
            return self._proven[key]
        generator = torch.Generator().manual_seed(0)
        agrees, num_telling, num_compared = True, 0, 0
        while agrees and num_compared < _NUMBERS_COMPARED:  # two orders of operations often round one number equally
            row, bias = (torch.randn(size, generator=generator) for size in self.shape[::-1])
            # A kernel's order of operations does not depend on the numbers, so equal rows in must give equal rows out.
            reference = self._product(row.repeat(ROW_BLOCKS[-1], 1), bias)[0]
            agrees = bool((self._product(row.repeat(num_rows, 1), bias) == reference).all())
            num_telling += int((reference != bias).sum())
            num_compared += len(bias)
        if 2 * num_telling > num_compared:  # weights that are zero prove nothing
            self._proven[key] = agrees
        return agrees


def padded_rows(num_rows: int, agrees: Callable[[int], bool]) -> int:
    """The number of rows to compute for `num_rows` rows: as few more as products that `agrees` need.

    With AVX-512 MKL's products of two or more columns agree for any number of rows; with AVX2, and of one column, the
    multiples of 4 do.
    """
    num_rows = max(1, num_rows)
    for step in (1, 4) if num_rows <= _MAX_ROWS_TRIED else ():
        padded = -(-num_rows // step) * step
        if agrees(padded):
            return padded
    return -(-num_rows // ROW_BLOCKS[-1]) * ROW_BLOCKS[-1]


def split_rows(num_rows: int, agrees: Callable[[int], bool]) -> list[int]:
    """The numbers of rows of the products for `num_rows` rows, each of which `agrees`: one if possible.

    Raises:
        RuntimeError: not even products of the smallest size agree.
    """
    if 0 < num_rows <= ROW_BLOCKS[0] and agrees(num_rows):
        return [num_rows]
    sizes = []
    for size in filter(agrees, ROW_BLOCKS):
        sizes += [size] * (num_rows // size)
        num_rows %= size
    if num_rows > 0:
        raise RuntimeError(
            f"float32 products of {num_rows} rows depend on the row's place on this machine ({torch.get_num_threads()} "
            "threads): generation cannot be made reproducible"
        )
    return sizes

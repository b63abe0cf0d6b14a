"""Logits of hidden states on an output head, one tile at a time, and sums over the tiles.

    Tiles      logits [rows, columns] of each block of tokens and of the vocabulary, in one buffer
    Sums       per token: largest logit, sum of exponentials, chosen logits, terms of the entropy
    Gradients  of states, weight and bias, from tiles of gradients of the logits

All tokens pass a block of the head before the next block: its gradient is then complete in float32, and a bfloat16 head
needs no float32 copy of its whole gradient. With top-k or top-p a tile has whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemo_rl.utils.logprobs import smallest_kept

TILE_BYTES = 32 << 20
"""Memory of one tile of logits on a CPU: larger tiles leave the caches, smaller ones slow down the matrix products."""

KEPT_BYTES = 256 << 20
"""Memory of the exponentials of logits that a CPU keeps for the backward pass instead of another product. A GPU has
little memory beside its speed."""

GPU_TILE_BYTES = 128 << 20, 512 << 20
"""The least and the most on a GPU, where a product needs many columns to fill the device."""

FREE_SHARE = 1 / 64  # of a GPU's free memory, for one tile; a backward pass has two or three
MAX_ROWS = 8192
_FEW_COLUMNS = 4  # times the hidden size: a feed-forward layer keeps as many numbers of a token
_COLUMN_MULTIPLE = 64
_WHOLE_ROWS_TILES = 4  # tiles of whole rows are larger: with few rows at a time, reading the head would dominate


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """The change of logits after the head: `scale * x`, or `softcap * tanh(scale * x / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """The last linear layer of a language model, or this rank's rows of it.

    Attributes:
        weight: [V_local, H], with V_local above 0; rows [start, start + V_local) of the vocabulary.
        bias: [V_local], or None.
        temperature: logits are divided by it, after `transform`.
        group: the ranks that hold the vocabulary together; None when it is whole here.
        vocab_size: rows over all ranks.
        chunk_tokens: the most tokens whose logits are in memory at a time; None: by `tile_bytes` alone.
        tile_bytes: memory of one tile of logits, None: by the device; with top-k or top-p four times as much.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transform: LogitTransform = LogitTransform()
    temperature: float = 1.0
    group: dist.ProcessGroup | None = None
    start: int = 0
    vocab_size: int
    chunk_tokens: int | None = None
    tile_bytes: int | None = None


def tile_bytes_on(device: torch.device, *, is_equal: bool) -> int:
    """Memory of one tile of logits. `is_equal`: ranks must choose the same, so free memory has no say.

    Nor has it in deterministic runs: the tiles decide the order of sums.
    """
    if device.type != "cuda":
        return TILE_BYTES
    least, most = GPU_TILE_BYTES
    if is_equal or torch.are_deterministic_algorithms_enabled():
        return least
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    return min(max(least, int(free * FREE_SHARE)), most)


class TileOptions:
    """How the logits of `head` are computed. Only the first `vocab_size` token ids count; None: all."""

    def __init__(
        self, head: OutputHead, *, top_k: int | None = None, top_p: float = 1.0, vocab_size: int | None = None
    ) -> None:
        assert 0.0 < top_p <= 1.0 and (top_k is None or top_k > 0)
        assert vocab_size is None or 0 < vocab_size <= head.vocab_size
        self.head, self.top_p = head, top_p
        self.vocab_size = head.vocab_size if vocab_size is None else vocab_size
        self.top_k = top_k if top_k is not None and top_k < head.vocab_size else None  # None if it filters nothing
        self.is_filtered = self.top_k is not None or top_p < 1.0
        is_equal = (top_k is not None or top_p < 1.0) and head.group is not None
        self.tile_bytes = head.tile_bytes or tile_bytes_on(head.weight.device, is_equal=is_equal)

    def rows_per(self, num_bytes: int, itemsize: int) -> int:
        """Whole rows of logits that fit into `num_bytes` on the rank with the largest share of the vocabulary.

        All ranks of the group filter every tile together, so they must cut the rows alike.
        """
        num_ranks = 1 if self.head.group is None else self.head.group.size()
        return max(1, num_bytes // itemsize // -(-self.vocab_size // num_ranks))

    def tile_shape(self, num_rows: int, num_columns: int, itemsize: int) -> tuple[int, int]:
        """Rows and columns of a tile, out of `num_rows` tokens and this rank's `num_columns` of the vocabulary."""
        rows = self.rows_per(_WHOLE_ROWS_TILES * self.tile_bytes, itemsize) if self.is_filtered else MAX_ROWS
        rows = rows if self.head.chunk_tokens is None else min(rows, self.head.chunk_tokens)
        rows = -(-num_rows // max(1, -(-num_rows // rows)))  # equal blocks
        if self.is_filtered:
            return rows, num_columns
        columns = self.tile_bytes // itemsize // max(1, rows) // _COLUMN_MULTIPLE * _COLUMN_MULTIPLE
        return rows, min(max(_COLUMN_MULTIPLE, columns), num_columns)


class Tiles:
    """Logits of `states` [N, H] on a head, tile by tile in one buffer; `num_columns` of the head's rows count.

    `keeps`: the first tiles get memory of their own, `kept`, as far as there is room for them.

    Logits are float32 and never rounded to half precision: the tensor cores of a GPU multiply half-precision matrices
    with float32 sums and results; elsewhere one block at a time is converted to float32.
    """

    def __init__(
        self,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: TileOptions,
        *,
        keeps: bool = False,
    ) -> None:
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.operand_dtype = weight.dtype if weight.is_cuda else self.dtype
        self.states, self.weight, self.bias, self.options = states.to(self.operand_dtype), weight, bias, options
        self.num_columns = min(max(0, options.vocab_size - options.head.start), len(weight))
        rows, columns = options.tile_shape(len(states), self.num_columns, self.dtype.itemsize)
        self.row_blocks = list(_slices(len(states), rows))
        self.rows_per_block, self.columns_per_block = rows, columns
        self.buffer = weight.new_empty(rows * columns, dtype=self.dtype)
        transform, temperature = options.head.transform, options.head.temperature
        self.softcap = transform.softcap
        self.scale = transform.scale / (temperature if transform.softcap is None else transform.softcap)
        self.softcap_scale = 1.0 if transform.softcap is None else transform.softcap / temperature
        self.num_kept = self._num_kept() if keeps else 0
        self.kept: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """(rows, columns, rows of the head [columns, H], logits [rows, columns] after transform and temperature).

        A tile of logits is valid until the next one.
        """
        return self.after(0)

    def after(self, unfilled: int) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """The same tiles, the first `unfilled` of them without their logits."""
        number = 0
        for columns in _slices(self.num_columns, self.columns_per_block):
            block = self.weight[columns].to(self.operand_dtype)  # once for all rows, because it is a copy on CPUs
            for rows in self.row_blocks:
                shape = rows.stop - rows.start, len(block)
                memory = self.buffer
                if number < self.num_kept:
                    memory = memory.new_empty(math.prod(shape))
                    self.kept.append(memory)
                tile = memory[: math.prod(shape)].view(shape)
                if number >= unfilled:
                    self._fill(tile, rows, columns, block)
                yield rows, columns, block, tile
                number += 1

    def _fill(self, tile: torch.Tensor, rows: slice, columns: slice, block: torch.Tensor) -> None:
        _matmul(self.states[rows], block.t(), out=tile)
        if self.bias is not None:
            tile.add_(self.bias[columns])
        if self.scale != 1.0:
            tile.mul_(self.scale)
        if self.softcap is not None:
            tile.tanh_().mul_(self.softcap_scale)

    def _num_kept(self) -> int:
        """Tiles of which the backward pass needs no more than the exponentials, as far as there is room for them."""
        if self.options.is_filtered or self.softcap is not None:
            return 0
        room = 0
        if self.num_columns <= _FEW_COLUMNS * self.states.shape[1]:  # little more than the states of a layer
            room = self.buffer.nbytes
        if self.buffer.device.type == "cpu" and self.options.head.chunk_tokens is None:
            room = max(room, KEPT_BYTES)
        return room // self.buffer.nbytes if self.buffer.nbytes else 0

    def find(self, targets: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each row's target in a tile of `columns`, or any; whether it is in the tile), [rows, 1] each."""
        index, width = (targets - self.options.head.start - columns.start)[:, None], columns.stop - columns.start
        return index.clamp(0, width - 1), (index >= 0) & (index < width)

    def slope(self, tile: torch.Tensor) -> torch.Tensor | None:
        """The derivative of the logits by the head's output, divided by `scale`; None if it is 1."""
        if self.softcap is None:
            return None
        # d/dx of c tanh(x) is c (1 - tanh^2 x)
        return tile.mul(1.0 / self.softcap_scale).square_().neg_().add_(1.0).mul_(self.softcap_scale)

    def smallest_kept(self, tile: torch.Tensor) -> torch.Tensor:
        """The smallest logit [rows] that top-k and top-p keep, of a tile of whole rows."""
        options = self.options
        # A few rows at a time, because finding a nucleus takes three more tensors of this size.
        few = options.rows_per(options.tile_bytes, self.dtype.itemsize)
        group = options.head.group
        return torch.cat([smallest_kept(rows, options.top_k, options.top_p, group) for rows in tile.split(few)])

    @staticmethod
    def filter(tile: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, is_here: torch.Tensor) -> None:
        """Set logits below `kept` [rows] to -inf in place, but not the target's, which `find` found.

        The target was sampled: rounding at the border of the set, or an update since, must not make it impossible.
        """
        sampled = tile.gather(1, index)
        tile.masked_fill_(tile < kept[:, None], float("-inf"))
        tile.scatter_(1, index, torch.where(is_here, sampled, tile.gather(1, index)))


def whole_logits(states: torch.Tensor, head: OutputHead) -> torch.Tensor:
    """Logits [N, V_local] of `states` [N, H] after transform and temperature, computed as in training."""
    tiles = Tiles(states, head.weight, head.bias, TileOptions(replace(head, chunk_tokens=None)))
    logits = tiles.buffer.new_empty(len(states), tiles.num_columns)
    for rows, columns, _, tile in tiles:
        logits[rows, columns] = tile
    return logits


class Sums:
    """Running sums over the tiles of each row; exponents are relative to `maximum`, so that none overflows."""

    def __init__(self, like: torch.Tensor, n: int, k: int = 1) -> None:
        # The lowest finite number instead of -inf, because -inf - -inf is NaN.
        self.maximum = like.new_full((n,), torch.finfo(like.dtype).min)  # [N]
        self.total = like.new_zeros(n)  # [N]; sum of e = exp(logit - maximum)
        self.spread = like.new_zeros(n)  # [N]; sum of -e (logit - maximum)
        self.chosen = like.new_zeros(n, k)  # [N, K]; logits of the targets, 0 until their tile comes

    def add(self, rows: slice, tile: torch.Tensor, *, with_entropy: bool) -> None:
        """Add a tile of logits, which becomes exp(logit - maximum so far)."""
        self._raise_maximum(rows, torch.maximum(self.maximum[rows], tile.amax(dim=1)))
        tile.sub_(self.maximum[rows, None]).exp_()
        self.total[rows] += tile.sum(dim=1)
        if with_entropy:
            self.spread[rows] += torch.special.entr(tile).sum(dim=1)

    def _raise_maximum(self, rows: slice, maximum: torch.Tensor) -> None:
        # Earlier terms had a smaller maximum in their exponents: rescale them to the new one.
        change = self.maximum[rows] - maximum
        factor = change.exp()
        self.spread[rows] = factor * (self.spread[rows] - change * self.total[rows])
        self.total[rows] *= factor
        self.maximum[rows] = maximum

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Over the ranks that share the vocabulary."""
        if group is None or len(self.maximum) == 0:
            return
        # The maximum first: sums of exponentials of several ranks add up only under a common one.
        maximum = self.maximum.clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        self._raise_maximum(slice(None), maximum)
        sums = torch.cat([self.chosen, self.total[:, None], self.spread[:, None]], dim=1)
        dist.all_reduce(sums, group=group)
        self.chosen, self.total, self.spread = sums[:, :-2], sums[:, -2], sums[:, -1]

    def logprobs(self) -> torch.Tensor:
        """[N, K]."""
        # Not chosen - logsumexp: added to a large maximum, log(total) would lose digits.
        return self.chosen - self.maximum[:, None] - self.total.log()[:, None]

    def entropy(self) -> torch.Tensor:
        return self.total.log() + self.spread / self.total


class Gradients:
    """Gradients of states, weight and bias, from tiles of gradients of the head's output.

    They accumulate in float32, for the states as a whole [N, H], for the weight block by block.
    """

    def __init__(self, tiles: Tiles, needs_states: bool, needs_weight: bool, needs_bias: bool) -> None:
        self.tiles = tiles
        self.needs_states, self.needs_weight, self.needs_bias = needs_states, needs_weight, needs_bias
        num_rows, hidden = tiles.states.shape
        new_zeros = tiles.buffer.new_zeros
        self.states = new_zeros((num_rows, hidden) if needs_states else 0)
        self.bias = new_zeros(len(tiles.weight) if needs_bias else 0)
        self.weight = torch.empty_like(tiles.weight) if needs_weight else tiles.weight.new_empty(0)
        is_rounded = needs_weight and tiles.weight.dtype != tiles.dtype
        self.block = tiles.buffer.new_empty((tiles.columns_per_block, hidden) if is_rounded else 0)
        if needs_weight:  # rows that no tile reaches
            self.weight[tiles.num_columns if num_rows > 0 else 0 :].zero_()

    def add(
        self, rows: slice, columns: slice, tile: torch.Tensor, block: torch.Tensor, slope: torch.Tensor | None
    ) -> None:
        """Add a tile of gradients of the logits; `block` are the rows of the head it came from, `slope` its slope."""
        if slope is not None:
            tile.mul_(slope)
        if self.needs_bias:
            self.bias[columns] += tile.sum(dim=0)
        tile = tile.to(self.tiles.operand_dtype)
        if self.needs_states:
            _add_matmul(self.states[rows], tile, block)
        if not self.needs_weight:
            return
        is_rounded = self.block.numel() > 0
        accumulator = self.block[: columns.stop - columns.start] if is_rounded else self.weight[columns]
        if rows.start == 0:
            _matmul(tile.t(), self.tiles.states[rows], out=accumulator)
        else:
            _add_matmul(accumulator, tile.t(), self.tiles.states[rows])
        if is_rounded and rows.stop == len(self.tiles.states):  # rounded once, after the tiles of all rows
            self.weight[columns] = accumulator

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Gradients of states, weight and bias in the weight's dtype. Collective: the states' are summed over ranks."""
        group, dtype = self.tiles.options.head.group, self.tiles.weight.dtype
        if self.needs_states and group is not None and len(self.states) > 0:
            dist.all_reduce(self.states, group=group)
        return (
            self.states.to(dtype) if self.needs_states else None,
            self.weight if self.needs_weight else None,
            self.bias.to(dtype) if self.needs_bias else None,
        )


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, max(1, step)):
        yield slice(start, min(start + step, length))


def _matmul(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _add_matmul(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    else:
        out.add_(torch.mm(left, right, out_dtype=out.dtype))

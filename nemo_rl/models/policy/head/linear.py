"""Logprobs, entropies, top-k logits and KLs straight from hidden states: logits exist one tile at a time.

    hidden states [N, H], head [V, H] -> tiles of logits [rows, columns] -> per token: sums of exponentials, own logits

Forward keeps a few sums per token, and on a CPU the exponentials of the first tiles. Backward computes each other tile
again, turns it into its gradient in place and adds that to the gradients of states and head. The idea comes from Cut
Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009) and Liger Kernel's fused linear cross-entropy (Hsu et al. 2024,
arXiv 2410.10989). Their Triton kernels need CUDA and return a summed loss; policy gradients need every token's logprob,
under the sampled distribution, over a sharded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from nemo_rl.models.policy.head.logit_tiles import Gradients, OutputHead, Sums, TileOptions, Tiles


def linear_logprobs(
    states: torch.Tensor,
    head: OutputHead,
    targets: torch.Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> torch.Tensor:
    """log p(target) of every row under temperature, top-k and top-p. Float32 [N], equal on all ranks of `head.group`.

    Gradients take the set that top-k and top-p keep as constant. The gradient of the states is complete on every rank
    of the group; the gradients of weight and bias cover this rank's rows. Of the N x V logits no more are in memory
    than a tile and, for the backward pass on a CPU, `KEPT_BYTES`. Inputs of float64 are computed, and returned, in
    float64.

    Args:
        states: [N, H] of the weight's dtype, equal on all ranks of the group.
        targets: int64 [N], token ids in the whole vocabulary, equal on all ranks of the group.
    """
    options = TileOptions(head, top_k=top_k, top_p=top_p)
    assert states.dtype == head.weight.dtype and len(head.weight) > 0
    will_learn = torch.is_grad_enabled()
    return cast(torch.Tensor, _LinearLogprobs.apply(states, head.weight, head.bias, targets, options, will_learn))


@torch.no_grad()
def topk_logits(
    states: torch.Tensor, head: OutputHead, k: int, *, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the first `vocab_size` logits of every row, descending: float32 [N, k], token ids int64 [N, k].

    After the transform of the head and its temperature; equal on all ranks of the group, and without gradient.
    """
    options = TileOptions(head, vocab_size=vocab_size)
    assert 1 <= k <= vocab_size
    tiles = Tiles(states, head.weight, head.bias, options)
    values = tiles.buffer.new_full((len(states), k), float("-inf"))
    indices = torch.zeros((len(states), k), dtype=torch.int64, device=states.device)
    for rows, columns, _, tile in tiles:
        # A tile can hold fewer than k columns; `_keep_largest` joins them.
        found, where = tile.topk(min(k, columns.stop - columns.start), dim=1)
        where += head.start + columns.start
        _keep_largest(values[rows], indices[rows], found, where)
    if head.group is not None and len(states) > 0:
        shape = (head.group.size() * len(states), k)
        all_values, all_indices = values.new_empty(shape), indices.new_empty(shape)
        dist.all_gather_single(all_values, values, group=head.group)
        dist.all_gather_single(all_indices, indices, group=head.group)
        # Start over: the gathered logits include this rank's own. All ranks merge in the order of ranks, so that
        # they agree on ties.
        values.fill_(float("-inf"))
        for found, where in zip(all_values.split(len(states)), all_indices.split(len(states)), strict=True):
            _keep_largest(values, indices, found, where)
    return values, indices


def _keep_largest(values: torch.Tensor, indices: torch.Tensor, found: torch.Tensor, where: torch.Tensor) -> None:
    """Keep the largest of `values` and `found` in `values`, in place, with their token ids in `indices`."""
    largest, order = torch.cat([values, found], dim=1).topk(values.shape[1], dim=1)
    indices.copy_(torch.cat([indices, where], dim=1).gather(1, order))
    values.copy_(largest)


def linear_topk_logprobs(
    states: torch.Tensor, head: OutputHead, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of K token ids per row, float32 [N, K], and the entropy of p in nats, float32 [N].

    p is under the temperature of the head, without top-k and top-p. `indices` are int64 [N, K], equal on all ranks.
    Ranks, gradients and dtypes are as in `linear_logprobs`. Two tiles of logits are in memory at a time.
    """
    assert states.dtype == head.weight.dtype and len(head.weight) > 0
    assert indices.ndim == 2 and len(indices) == len(states)
    options = TileOptions(head)
    logprobs, entropy = _LinearTopK.apply(states, head.weight, head.bias, indices, options)
    return logprobs, entropy


def linear_kl(
    states: torch.Tensor,
    head: OutputHead,
    teacher_states: torch.Tensor,
    teacher_head: OutputHead,
    *,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || student) and KL(student || teacher) in nats of every row, float32 [N] each.

    Both distributions cover only the first `vocab_size` token ids, because checkpoints pad their heads to different
    sizes. The student's states, weight and bias get gradients, as in `linear_logprobs`. The teacher may have another
    hidden size, dtype, transform and temperature. Three tiles of logits are in memory at a time.

    Args:
        states: [N, H] of the student, equal on all ranks of `head.group`.
        teacher_states: [N, H'] of the same tokens, equal on all ranks of `head.group`.
        teacher_head: the rows of the teacher's head from `head.start` on, at least as many as this rank's share of the
            first `vocab_size`, in tiles of the same size. Its `group` is not used.
    """
    assert states.dtype == head.weight.dtype and teacher_states.dtype == teacher_head.weight.dtype
    assert len(states) == len(teacher_states) and head.start == teacher_head.start
    options, teacher_options = (TileOptions(one, vocab_size=vocab_size) for one in (head, teacher_head))
    # Forward and backward each make the teacher's tiles, so that their buffer does not live between the two.
    teacher = partial(Tiles, teacher_states.detach(), teacher_head.weight.detach(), teacher_head.bias, teacher_options)
    forward, reverse = _LinearKL.apply(states, head.weight, head.bias, teacher, options)
    return forward, reverse


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: TileOptions,
        will_learn: bool,
    ) -> torch.Tensor:
        tiles = Tiles(states, weight, bias, options, keeps=will_learn)
        sums = Sums(tiles.buffer, len(states))
        maxima = []  # to which the exponentials of a kept tile are relative
        kept = tiles.buffer.new_empty(len(states) if options.is_filtered else 0)
        for rows, columns, _, tile in tiles:
            index, is_here = tiles.find(targets[rows], columns)
            if options.is_filtered:
                kept[rows] = tiles.smallest_kept(tile)
                tiles.filter(tile, kept[rows], index, is_here)
            # One tile of one rank has the target, so the sum over tiles and ranks is its logit. Read before `add` turns
            # the tile into exponentials.
            sums.chosen[rows] += torch.where(is_here, tile.gather(1, index), 0.0)
            sums.add(rows, tile, with_entropy=False)
            if len(maxima) < tiles.num_kept:
                maxima.append(sums.maximum[rows].clone())
        sums.reduce(options.head.group)
        # Not all tiles: backward computes them again, because [N, V] logits would not fit into memory.
        ctx.save_for_backward(states, weight, bias, targets, kept, sums.maximum, sums.total, *tiles.kept, *maxima)
        ctx.options = options
        return sums.logprobs()[:, 0]

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, kept, maximum, total, *of_tiles = ctx.saved_tensors
        num_kept = len(of_tiles) // 2
        exponentials, maxima = of_tiles[:num_kept], of_tiles[num_kept:]
        options: TileOptions = ctx.options
        tiles = Tiles(states, weight, bias, options)
        sums = Gradients(tiles, *ctx.needs_input_grad[:3])
        rising = grads[0] * tiles.scale
        # p = exp(logit - maximum) / total: dividing here costs one division per token in place of one per logit.
        falling = -rising / total
        for number, (rows, columns, block, tile) in enumerate(tiles.after(num_kept)):
            index, is_here = tiles.find(targets[rows], columns)
            slope = tiles.slope(tile)  # of the logits themselves: before the filter and the gradient overwrite them
            if options.is_filtered:
                # Logits outside of the kept set are -inf again, so their p, and with it their gradient, is exactly 0.
                tiles.filter(tile, kept[rows], index, is_here)
            # d log p(target) / d logit = [is target] - p
            if number < num_kept:
                factor = (maxima[number] - maximum[rows]).exp() * falling[rows]
                torch.mul(exponentials[number].view_as(tile), factor[:, None], out=tile)
            else:
                tile.sub_(maximum[rows, None]).exp_().mul_(falling[rows, None])
            tile.scatter_add_(1, index, torch.where(is_here, rising[rows, None], 0.0))
            sums.add(rows, columns, tile, block, slope)
        return *sums.result(), None, None, None


class _Chosen:
    """The tile, and the position in it, of each logit of `indices` [N, K] that this rank has."""

    def __init__(self, indices: torch.Tensor, tiles: Tiles) -> None:
        height, width = tiles.rows_per_block, max(1, tiles.columns_per_block)
        self.num_row_blocks, self.height, self.width = len(tiles.row_blocks), height, width
        column = indices - tiles.options.head.start
        row = torch.arange(len(indices), device=indices.device)[:, None].expand_as(indices)
        num_tiles = self.num_row_blocks * -(-tiles.num_columns // width)
        is_here = (column >= 0) & (column < tiles.num_columns)
        number = torch.where(is_here, column // width * self.num_row_blocks + row // height, num_tiles).flatten()
        # The last block of columns may be narrower.
        width_here = (tiles.num_columns - column // width * width).clamp(max=width)
        place = (row % height * width_here + column % width).flatten()
        # Sorted by tile once. Looking for the ids in every tile would compare N x K ids as often as there are tiles.
        order = number.argsort(stable=True)
        # The only wait for the device. Ids of other ranks lie behind the last tile, where nothing reads them.
        sizes = torch.bincount(number, minlength=num_tiles + 1).tolist()
        self.entries = order.split(sizes)
        self.places = place[order].split(sizes)

    def of_tile(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of this tile's logits: in the flattened [N, K], and in the flattened tile."""
        number = columns.start // self.width * self.num_row_blocks + rows.start // self.height
        return self.entries[number], self.places[number]


class _LinearTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        indices: torch.Tensor,
        options: TileOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = Tiles(states, weight, bias, options)
        sums = Sums(tiles.buffer, *indices.shape)
        chosen = _Chosen(indices, tiles)
        for rows, columns, _, tile in tiles:
            # Before `add`, which overwrites the logits.
            entries, places = chosen.of_tile(rows, columns)
            sums.chosen.view(-1)[entries] = tile.view(-1)[places]
            sums.add(rows, tile, with_entropy=True)
        sums.reduce(options.head.group)
        entropy = sums.entropy()
        ctx.save_for_backward(states, weight, bias, indices, sums.maximum, sums.total, entropy)
        ctx.options = options
        # The entropy is often a metric only. None instead of zeros as its gradient tells backward to leave its terms
        # out.
        ctx.set_materialize_grads(False)
        return sums.logprobs(), entropy

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d log p_i / d logit_j = [i = j] - p_j, and d entropy / d logit_j = -p_j (log p_j + entropy)."""
        states, weight, bias, indices, maximum, total, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        options: TileOptions = ctx.options
        tiles = Tiles(states, weight, bias, options)
        sums = Gradients(tiles, *ctx.needs_input_grad[:3])
        chosen = _Chosen(indices, tiles)
        if of_logprobs is None:
            of_logprobs = tiles.buffer.new_zeros(indices.shape)
        rising = (of_logprobs * tiles.scale).flatten()
        # A tile of log p becomes p (constant + slope log p).
        constant = -of_logprobs.sum(1) * tiles.scale
        slope_of_log = None
        if of_entropy is not None:
            slope_of_log = -of_entropy * tiles.scale
            constant += slope_of_log * entropy
        spare = torch.empty_like(tiles.buffer)
        log_total = total.log()
        for rows, columns, block, tile in tiles:
            slope = tiles.slope(tile)
            # In two steps: total and maximum differ in size, and their sum would lose digits.
            tile.sub_(maximum[rows, None]).sub_(log_total[rows, None])
            if slope_of_log is None:
                tile.exp_().mul_(constant[rows, None])
            else:
                probabilities = torch.exp(tile, out=spare[: tile.numel()].view_as(tile))
                tile.mul_(slope_of_log[rows, None]).add_(constant[rows, None]).mul_(probabilities)
            entries, places = chosen.of_tile(rows, columns)
            # Added, not written: an id may stand several times in a row of `indices`.
            tile.view(-1).index_add_(0, places, rising[entries])
            sums.add(rows, columns, tile, block, slope)
        return *sums.result(), None, None


class _PairSums:
    """Running sums over tiles for the KLs of student and teacher, [2, N] each: student, teacher."""

    def __init__(self, like: torch.Tensor, n: int) -> None:
        # Subtracted in the exponents, so that none overflows. Not -inf at first, because -inf - -inf is NaN.
        self.maxima = like.new_full((2, n), torch.finfo(like.dtype).min)
        self.totals = like.new_zeros(2, n)  # sum of e = exp(logit - maximum)
        # Sum of e ((logit - maximum) - (the other's logit - the other's maximum)).
        self.crossed = like.new_zeros(2, n)

    def add(self, rows: slice, student: torch.Tensor, teacher: torch.Tensor, difference: torch.Tensor) -> None:
        """Add a tile of logits of each; all three tensors are overwritten."""
        largest = torch.stack([student.amax(dim=1), teacher.amax(dim=1)])
        self._raise_maxima(rows, torch.maximum(self.maxima[:, rows], largest))
        student.sub_(self.maxima[0, rows, None])
        teacher.sub_(self.maxima[1, rows, None])
        # Before the exponentials overwrite both.
        torch.sub(student, teacher, out=difference)
        self.totals[:, rows] += torch.stack([student.exp_().sum(dim=1), teacher.exp_().sum(dim=1)])
        self.crossed[0, rows] += student.mul_(difference).sum(dim=1)
        # The difference seen from the teacher has the opposite sign.
        self.crossed[1, rows] -= teacher.mul_(difference).sum(dim=1)

    def _raise_maxima(self, rows: slice, maxima: torch.Tensor) -> None:
        # All earlier terms had a smaller maximum in their exponents: rescale them to the new one.
        # The difference inside `crossed` loses the rise of its own maximum and gains the rise of the other one.
        rise = maxima - self.maxima[:, rows]
        factor = rise.neg().exp()
        self.crossed[:, rows] = factor * (self.crossed[:, rows] + (rise.flip(0) - rise) * self.totals[:, rows])
        self.totals[:, rows] *= factor
        self.maxima[:, rows] = maxima

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Over the ranks that share the vocabulary."""
        if group is None or self.maxima.numel() == 0:
            return
        # Maxima first: sums of exponentials of several ranks add up only under a common maximum.
        maxima = self.maxima.clone()
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        self._raise_maxima(slice(None), maxima)
        sums = torch.cat([self.totals, self.crossed])
        dist.all_reduce(sums, group=group)
        self.totals, self.crossed = sums[:2], sums[2:]

    def kl(self) -> torch.Tensor:
        """[2, N]: KL(student || teacher), KL(teacher || student)."""
        # With p = e / total: sum of p (log p - log q) = crossed / total - log total + log total of the other.
        log_totals = self.totals.log()
        return self.crossed / self.totals - log_totals + log_totals.flip(0)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        teacher: Callable[[], Tiles],
        options: TileOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles, others = Tiles(states, weight, bias, options), teacher()
        assert others.dtype == tiles.dtype and others.num_columns == tiles.num_columns
        sums = _PairSums(tiles.buffer, len(states))
        spare = torch.empty_like(tiles.buffer)
        for (rows, _, _, tile), (_, _, _, other) in zip(tiles, others, strict=True):
            sums.add(rows, tile, other, spare[: tile.numel()].view_as(tile))
        sums.reduce(options.head.group)
        reverse, forward = sums.kl()
        ctx.save_for_backward(states, weight, bias, sums.maxima, sums.totals, reverse)
        ctx.teacher, ctx.options = teacher, options
        return forward.clone(), reverse.clone()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With q the teacher's: d KL(q || p) / d logit_j = p_j - q_j, of KL(p || q) it is p_j (log p_j/q_j - KL)."""
        states, weight, bias, maxima, totals, kl = ctx.saved_tensors
        options: TileOptions = ctx.options
        tiles, others = Tiles(states, weight, bias, options), ctx.teacher()
        sums = Gradients(tiles, *ctx.needs_input_grad[:3])
        of_forward, of_reverse = (grad[:, None] * tiles.scale for grad in grads)
        spare = torch.empty_like(tiles.buffer)
        log_totals = totals.log()
        for (rows, columns, block, tile), (_, _, _, other) in zip(tiles, others, strict=True):
            slope = tiles.slope(tile)
            tile.sub_(maxima[0, rows, None]).sub_(log_totals[0, rows, None])
            other.sub_(maxima[1, rows, None]).sub_(log_totals[1, rows, None])
            # Both gradients have a term in p, so one pass makes p (g_forward + g_reverse (log p/q - KL)) - g_forward q.
            factor = torch.sub(tile, other, out=spare[: tile.numel()].view_as(tile))
            factor.sub_(kl[rows, None]).mul_(of_reverse[rows]).add_(of_forward[rows])
            tile.exp_().mul_(factor).sub_(other.exp_().mul_(of_forward[rows]))
            sums.add(rows, columns, tile, block, slope)
        return *sums.result(), None, None

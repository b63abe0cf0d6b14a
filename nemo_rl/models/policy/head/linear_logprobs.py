"""Logprobs of tokens, entropies and top-k logits straight from hidden states: logits exist one tile at a time.

    hidden states [N, H], head [V, H] -> tiles of logits [rows, columns] -> per token: sum of exponentials, own logit

Forward keeps two numbers per token, the largest logit and the sum of exponentials; backward computes each tile again,
turns it into its gradient in place and adds it into the gradients of states and head. This is the idea of Cut
Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009) and of Liger Kernel's fused linear cross-entropy (Hsu et al.
2024, arXiv 2410.10989). Their kernels are Triton's, so for CUDA alone, and sum up to a loss; policy gradients need the
logprob of every token, under the sampled distribution, with the vocabulary spread over ranks. So this is plain torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from nemo_rl.models.policy.head.logit_tiles import TILE_BYTES, Gradients, OutputHead, Place, Sums, TileOptions, Tiles


def linear_logprobs(
    states: torch.Tensor,
    head: OutputHead,
    targets: torch.Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    chunk_tokens: int | None = None,
    tile_bytes: int = TILE_BYTES,
) -> torch.Tensor:
    """log p(target) of every row under temperature, top-k and top-p. Float32 [N], equal on all ranks of `head.group`.

    The set that top-k and top-p leave is that of `token_filter.filter_logits`; gradients take it as constant. The
    gradient of the states is complete on every rank of the group, that of weight and bias is of this rank's rows. No
    tensor of N x V elements is made. Inputs of float64 are computed, and answered, in float64.

    Args:
        states: [N, H] of the weight's dtype, equal on all ranks of the group.
        targets: int64 [N], numbers in the whole vocabulary, equal on all ranks of the group.
        chunk_tokens: the most rows whose logits are in memory at a time; None: by `tile_bytes` alone.
        tile_bytes: memory of one tile of logits; with top-k or top-p four times as much.
    """
    options = TileOptions.of(head, chunk_tokens, tile_bytes, top_k, top_p)
    return _apply(states, head, targets, options)[0]


def linear_logprobs_and_entropy(
    states: torch.Tensor,
    head: OutputHead,
    targets: torch.Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    chunk_tokens: int | None = None,
    tile_bytes: int = TILE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_logprobs`, and the entropy in nats of the same distributions, float32 [N], without gradient."""
    options = TileOptions.of(head, chunk_tokens, tile_bytes, top_k, top_p, with_entropy=True)
    return _apply(states, head, targets, options)


def _apply(
    states: torch.Tensor, head: OutputHead, targets: torch.Tensor, options: TileOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    assert states.dtype == head.weight.dtype and len(head.weight) > 0
    scores = _LinearLogprobs.apply(states, head.weight, head.bias, targets, options)
    assert isinstance(scores, tuple)
    return scores


@torch.no_grad()
def topk_logits(
    states: torch.Tensor,
    head: OutputHead,
    k: int,
    *,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    tile_bytes: int = TILE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of every row, descending: values float32 [N, k] and numbers in the vocabulary int64 [N, k].

    After the transform of the head and its temperature; equal on all ranks of the group, and without gradient.

    Args:
        vocab_size: only numbers below it are looked at; None: all of the head's.

    Raises:
        ValueError: k is larger than the vocabulary.
    """
    options = TileOptions.of(head, chunk_tokens, tile_bytes, vocab_size=vocab_size)
    if not 1 <= k <= options.vocab_size:
        raise ValueError(f"k={k}: the vocabulary has {options.vocab_size} logits; use a k from 1 to that")
    tiles = Tiles(states, head.weight, head.bias, options)
    values = tiles.buffer.new_full((len(states), k), float("-inf"))
    indices = torch.zeros((len(states), k), dtype=torch.int64, device=states.device)
    for columns, block in tiles.column_blocks():
        for rows in tiles.row_blocks:
            found, where = tiles.logits(rows, columns, block).topk(min(k, columns.stop - columns.start), dim=1)
            where += head.start + columns.start
            _keep_largest(values[rows], indices[rows], found, where)
    if head.group is not None and len(states) > 0:
        shape = (head.group.size() * len(states), k)
        all_values, all_indices = values.new_empty(shape), indices.new_empty(shape)
        dist.all_gather_into_tensor(all_values, values, group=head.group)
        dist.all_gather_into_tensor(all_indices, indices, group=head.group)
        values.fill_(float("-inf"))
        for found, where in zip(all_values.split(len(states)), all_indices.split(len(states)), strict=True):
            _keep_largest(values, indices, found, where)
    return values, indices


def _keep_largest(values: torch.Tensor, indices: torch.Tensor, found: torch.Tensor, where: torch.Tensor) -> None:
    """Put the largest of `values` and `found` into `values`, in place, and where they are into `indices`."""
    largest, order = torch.cat([values, found], dim=1).topk(values.shape[1], dim=1)
    indices.copy_(torch.cat([indices, where], dim=1).gather(1, order))
    values.copy_(largest)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: TileOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = Tiles(states, weight, bias, options)
        sums = Sums.empty(tiles.buffer, len(states))
        kept = tiles.buffer.new_empty(len(states) if options.is_filtered else 0)
        for columns, block in tiles.column_blocks():
            for rows in tiles.row_blocks:
                tile = tiles.logits(rows, columns, block)
                target = Place.of(targets[rows], options.start + columns.start, len(block))
                if options.is_filtered:
                    kept[rows] = tiles.smallest_kept(tile)
                    tiles.filter(tile, kept[rows], target)
                sums.chosen[rows] += torch.where(target.is_here, tile.gather(1, target.index), 0.0)
                sums.add(rows, tile, with_entropy=options.with_entropy)
        if options.group is not None and len(states) > 0:
            sums.reduce(options.group)
        ctx.save_for_backward(states, weight, bias, targets, kept, sums.maximum, sums.total)
        ctx.options = options
        entropy = sums.entropy()
        ctx.mark_non_differentiable(entropy)
        return sums.logprobs()[:, 0], entropy

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, kept, maximum, total = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        options: TileOptions = ctx.options
        tiles = Tiles(states, weight, bias, options)
        sums = Gradients(tiles, needs_states, needs_weight, needs_bias)
        rising = grads[0] * tiles.scale
        falling = -rising / total
        for columns, block in tiles.column_blocks():
            for rows in tiles.row_blocks:
                tile = tiles.logits(rows, columns, block)
                target = Place.of(targets[rows], options.start + columns.start, len(block))
                slope = tiles.slope(tile)
                if options.is_filtered:
                    tiles.filter(tile, kept[rows], target)
                # d log p(target) / d logit = [is target] - p
                tile.sub_(maximum[rows, None]).exp_().mul_(falling[rows, None])
                tile.scatter_add_(1, target.index, torch.where(target.is_here, rising[rows, None], 0.0))
                if slope is not None:
                    tile.mul_(slope)
                sums.add(rows, columns, tile, block)
            sums.finish(columns)
        return *sums.result(options.group, weight.dtype), None, None

"""Top-k and nucleus (top-p) sampling seen from outside: which tokens could have been drawn.

The set is "every logit at or above the smallest one kept", so ties at its border all belong to it and no order of
sorting enters. Top-k comes before top-p, and the nucleus is the smallest set whose probability reaches `top_p`
(Holtzman et al. 2019, arXiv 1904.09751), as the generation engine does it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def filter_logits(logits: torch.Tensor, targets: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Set logits outside the top-k / nucleus set to -inf. `logits` float32 [N, V], already divided by temperature.

    The `targets` int64 [N] were sampled, so they stay in the set: rounding at its border, or an update since, must not
    make them impossible. Whole rows in one process: what `linear_logprobs` does by tiles is measured by this.
    """
    if top_k is None and top_p >= 1.0:
        return logits
    sampled = logits.gather(1, targets[:, None])
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        descending = logits.sort(dim=-1, descending=True).values
        smallest = _nucleus(descending, descending.softmax(dim=-1), top_p)
        logits = logits.masked_fill(logits < smallest[:, None], float("-inf"))
    return logits.scatter(1, targets[:, None], sampled)


def _nucleus(descending: torch.Tensor, mass: torch.Tensor, needed: torch.Tensor | float) -> torch.Tensor:
    """The smallest logit [N] of the nucleus. A token is in it while those before it do not reach `needed`."""
    before = F.pad(mass.cumsum(dim=-1)[:, :-1], (1, 0))
    return torch.where(before < needed, descending, float("inf")).amin(dim=-1)


def smallest_kept(
    logits: torch.Tensor, top_k: int | None, top_p: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The smallest logit [N] that top-k and top-p leave, from this rank's columns `logits` [N, V_local].

    A collective over `group`, which shares the vocabulary; no logits but the top k of each rank are gathered. At least
    one of the filters takes something away.
    """
    if top_k is None:
        return _bisect(logits, top_p, group)
    best = _largest(logits, top_k, group)
    if top_p >= 1.0:
        return best[:, -1]
    # The mass of the set has its ties too, of which `best` may lack some.
    is_kept = logits >= best[:, -1:]
    total = torch.where(is_kept, logits - best[:, :1], float("-inf")).exp_().sum(dim=1)
    return _nucleus(best, (best - best[:, :1]).exp_(), top_p * _sum(total, group)[:, None])


def _sum(partial: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(partial, group=group)
    return partial


def _largest(logits: torch.Tensor, k: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The k largest of every row over all ranks [N, k], descending."""
    width = min(k, logits.shape[1])
    best = logits.topk(width, dim=1).values
    if group is None:
        return best
    best = F.pad(best, (0, k - width), value=float("-inf"))  # shards of the vocabulary may be narrower than k
    gathered = best.new_empty(group.size() * len(best), k)
    dist.all_gather_into_tensor(gathered, best.contiguous(), group=group)
    return gathered.view(-1, *best.shape).transpose(0, 1).flatten(1).topk(k, dim=1).values


def _bisect(logits: torch.Tensor, top_p: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The smallest logit of the nucleus, exact to the last bit: bisection over the bits of a float.

    The nucleus ends at the smallest number t with: mass of the logits above t < top_p. That mass falls as t grows, in
    floating point too (a sum in a fixed order), so the search always ends at the same place, and on every rank. It
    needs no sort, waits for nothing on the host, and gathers one number per row and round.
    """
    maximum = logits.amax(dim=1)
    if group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    mass = (logits - maximum[:, None]).exp_()
    needed = top_p * _sum(mass.sum(dim=1), group)
    low, high = _to_ordered(torch.full_like(maximum, float("-inf"))), _to_ordered(maximum)
    for _ in range(torch.iinfo(low.dtype).bits):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, without overflow
        is_above = logits > _from_ordered(middle, logits.dtype)[:, None]
        reaches = _sum(torch.where(is_above, mass, 0.0).sum(dim=1), group) >= needed
        low, high = torch.where(reaches, middle, low), torch.where(reaches, high, middle)
    return _from_ordered(high, logits.dtype)


def _to_ordered(numbers: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, one apart for neighbours."""
    return _flip(numbers.view(_INTEGERS[numbers.dtype]))


def _from_ordered(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _flip(integers).view(dtype)


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """Floats store sign and magnitude: under a sign bit the rest counts downwards. Its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)

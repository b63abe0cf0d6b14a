"""Logprobs of a whole vocabulary, from logits, and the filters top-k and top-p (nucleus)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """`logits.log_softmax(-1)` in float32 [..., V] without its bias on CPUs.

    Torch's own kernel for CPUs adds the exponentials of a row one by one, so terms that are small beside the sum are
    lost. Where one word stands out, as in the answers of a trained model, all logprobs of the row are too large, by
    6e-6 at 49 thousand words and 3e-5 at 262 thousand. `logsumexp` adds in a cascade.
    """
    return logits - logits.logsumexp(dim=-1, keepdim=True)


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def smallest_kept(
    logits: torch.Tensor, top_k: int | None, top_p: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The smallest logit [N] that top-k and top-p keep, from this rank's columns `logits` [N, V_local].

    The kept set is "every logit at or above the smallest one", so ties at its border all belong to it. Top-k comes
    before top-p, and the nucleus is the smallest set whose probability reaches `top_p` (Holtzman et al. 2019, arXiv
    1904.09751), as the generation engine does it. At least one of the filters is active.

    A collective over `group`, which shares the vocabulary; only the top k logits of each rank are gathered.
    """
    if top_k is None:
        return _bisect(logits, top_p, group)
    best = _largest(logits, top_k, group)
    if top_p >= 1.0:
        return best[:, -1]
    # Ties count towards the mass of the set, and `best` may lack some of them.
    is_kept = logits >= best[:, -1:]
    total = torch.where(is_kept, logits - best[:, :1], float("-inf")).exp_().sum(dim=1)
    # A token is in the nucleus while the mass of the tokens before it does not reach `top_p` of the total.
    before = F.pad((best - best[:, :1]).exp_().cumsum(dim=-1)[:, :-1], (1, 0))
    return torch.where(before < top_p * _sum(total, group)[:, None], best, float("inf")).amin(dim=-1)


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
    dist.all_gather_single(gathered, best.contiguous(), group=group)
    return gathered.view(-1, *best.shape).transpose(0, 1).flatten(1).topk(k, dim=1).values


def _bisect(logits: torch.Tensor, top_p: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The smallest logit of the nucleus, exact to the last bit: bisection over the bits of a float.

    The nucleus ends at the smallest t for which the mass of the logits above t is below top_p. That mass falls as t
    grows, in floating point too (a sum in a fixed order), so the search ends at the same t on every rank. It needs no
    sort and no synchronisation with the host, and reduces one number per row and round.
    """
    maximum = logits.amax(dim=1)
    if group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    mass = (logits - maximum[:, None]).exp_()
    needed = top_p * _sum(mass.sum(dim=1), group)
    integers = _INTEGERS[logits.dtype]
    low, high = (_flip(bound.view(integers)) for bound in (torch.full_like(maximum, float("-inf")), maximum))
    for _ in range(torch.iinfo(integers).bits):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        is_above = logits > _flip(middle).view(logits.dtype)[:, None]
        reaches = _sum(torch.where(is_above, mass, 0.0).sum(dim=1), group) >= needed
        low, high = torch.where(reaches, middle, low), torch.where(reaches, high, middle)
    return _flip(high).view(logits.dtype)


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """From the bits of floats to integers in their order, one apart for neighbours, and back.

    Floats store sign and magnitude: under a sign bit the rest counts downwards.
    """
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)

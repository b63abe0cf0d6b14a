"""Groups and advantages -> a plan: which sample in which rank, optimizer step and micro-batch.

The plan is made of indices and lengths; tokens stay in the object store. Losses are sums over a global count, so any
plan of the same samples gives the same gradient: this one is chosen to pad little and to load ranks evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.types import BatchPlan, GroupHandle, MicroBatch, PlannedSample, RankPlan


def chunks(items: Sequence[PlannedSample], size: int) -> list[MicroBatch]:
    """Consecutive pieces of `size`; the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def deal(samples: Sequence[PlannedSample], num_ranks: int) -> list[list[PlannedSample]]:
    """Longest first, back and forth over the ranks: equal counts, nearly equal tokens, each rank sorted by length."""
    order = sorted(samples, key=lambda sample: (-sample.length, sample.group, sample.index))
    ranks: list[list[PlannedSample]] = [[] for _ in range(num_ranks)]
    for position, sample in enumerate(order):
        lap, seat = divmod(position, num_ranks)
        ranks[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(sample)
    return ranks


def plan_batch(
    groups: Sequence[GroupHandle],
    advantages: Sequence[Sequence[float]],
    masks: Sequence[Sequence[float]],
    *,
    num_ranks: int,
    global_batch_size: int,
    micro_batch_size: int,
    logprob_batch_size: int,
) -> BatchPlan:
    """Plan one step.

    Args:
        groups: finished groups, in the order their samples fill the optimizer steps.
        advantages: per group and sample.
        masks: per group and sample; 0.0 leaves the sample out of the loss, not out of the batch.
        num_ranks: data-parallel ranks.
        global_batch_size: samples per optimizer step; the number of samples must be a multiple of it, and it a
            multiple of `num_ranks` (checked when the configuration is read).
        micro_batch_size: samples per forward and backward pass of one rank.
        logprob_batch_size: samples per forward-only pass of one rank.
    """
    samples = [
        PlannedSample(group=g, index=i, length=meta.length, advantage=advantage, mask=mask)
        for g, (group, group_advantages, group_masks) in enumerate(zip(groups, advantages, masks, strict=True))
        for i, (meta, advantage, mask) in enumerate(zip(group.samples, group_advantages, group_masks, strict=True))
    ]
    assert len(samples) % global_batch_size == 0 and global_batch_size % num_ranks == 0
    ranks = [RankPlan(train=[], logprobs=[]) for _ in range(num_ranks)]
    owned: list[list[PlannedSample]] = [[] for _ in range(num_ranks)]
    for step in chunks(samples, global_batch_size):
        for plan, mine, share in zip(ranks, owned, deal(step, num_ranks), strict=True):
            plan.train.append(chunks(share, micro_batch_size))
            mine.extend(share)
    for plan, mine in zip(ranks, owned, strict=True):
        mine.sort(key=lambda sample: (-sample.length, sample.group, sample.index))
        plan.logprobs = chunks(mine, logprob_batch_size)
    return BatchPlan(groups=[group.ref for group in groups], ranks=ranks)


def token_imbalance(plan: BatchPlan) -> float:
    """Tokens of the fullest rank over the mean of all ranks (1.0 is even)."""
    tokens = [sum(sample.length for batch in rank.logprobs for sample in batch) for rank in plan.ranks]
    return max(tokens) * len(tokens) / sum(tokens)

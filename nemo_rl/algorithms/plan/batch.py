"""Groups and advantages -> a plan: which sample goes to which rank, optimizer step and micro-batch.

The plan is made from lengths; tokens stay in the object store. Losses are sums over a global count, so every plan of
the same samples gives the same gradient, and this one may pad little and load the ranks evenly. Samples that teach
nothing have micro-batches of their own, without a backward pass. Ranks enter the same collectives: all have the same
number of micro-batches of either kind in every optimizer step, and for logprobs, none of them empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize, MicroBatching, PackedTokens
from nemo_rl.config.rules import round_up
from nemo_rl.distributed.packing import Bins, balance, even_out, get_packer, split_fullest
from nemo_rl.types import BatchPlan, GroupHandle, MicroBatch, PlannedSample, RankPlan


def plan_batch(
    groups: Sequence[GroupHandle],
    advantages: Sequence[Sequence[float]],
    masks: Sequence[Sequence[float]],
    *,
    rewards: Sequence[Sequence[float]] | None = None,
    good: Sequence[Sequence[bool]] | None = None,
    only_advantages_teach: bool = False,
    global_batch_size: int,
    **how: Any,
) -> BatchPlan:
    """`plan_samples` of finished groups, whose samples fill the optimizer steps in order.

    `advantages`, `masks` and `rewards` are per group and row; mask 0.0 leaves a row out of the loss, not out of the
    batch. With `rewards` the workers compute the advantages. An optimizer step has `global_batch_size` samples, with
    all their rows. `good`: the rows whose likelihood the loss raises, also per group and row. `only_advantages_teach`:
    other rows have no gradient if their advantage or mask is 0.
    """
    # A masked sample is planned too, because steps need a multiple of ranks and micro-batches.
    samples = rows_of_groups(groups, advantages, masks)
    if rewards is not None:
        samples = [[replace(row, reward=rewards[row.group][row.index]) for row in rows] for rows in samples]
    if good is not None:
        samples = weigh_likelihood(samples, groups, good, global_batch_size)
    if only_advantages_teach:
        assert rewards is None, "the workers compute the advantages"
        samples = [[replace(row, teaches=_teaches(row)) for row in rows] for rows in samples]
    refs = [(group.ref, group.place) for group in groups]
    return plan_samples(samples, refs, global_batch_size=global_batch_size, **how)


def weigh_likelihood(
    samples: Sequence[Sequence[PlannedSample]],
    groups: Sequence[GroupHandle],
    good: Sequence[Sequence[bool]],
    global_batch_size: int,
) -> list[list[PlannedSample]]:
    """The rows with `nll_weight`: 1 / loss tokens of all good rows of its optimizer step, and 0 for other rows."""

    def tokens(row: PlannedSample) -> int:
        counts = row.mask > 0 and good[row.group][row.index]
        return groups[row.group].rows[row.index].num_generated_tokens if counts else 0

    weighed = []
    for start in range(0, len(samples), global_batch_size):
        step = samples[start : start + global_batch_size]
        total = sum(tokens(row) for rows in step for row in rows)
        weighed += [[replace(row, nll_weight=1.0 / total if tokens(row) else 0.0) for row in rows] for rows in step]
    return weighed


def _teaches(row: PlannedSample) -> bool:
    return row.mask > 0 and (row.advantage != 0 or bool(row.nll_weight))


def rows_of_groups(
    groups: Sequence[GroupHandle], advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[float]]
) -> list[list[PlannedSample]]:
    """The rows of each sample, for `plan_samples`."""
    episodes: list[list[PlannedSample]] = []
    for g, (group, group_advantages, group_masks) in enumerate(zip(groups, advantages, masks, strict=True)):
        # Branches of an episode begin in different ways, and a row without an answer has no end of its prompt.
        is_shared = all(meta.num_generated_tokens and not meta.branches for meta in group.samples)
        prompt = min(meta.num_prompt_tokens for meta in group.samples) if is_shared else 0
        rows = [
            PlannedSample(
                group=g,
                index=i,
                lengths=(meta.length,),
                advantage=advantage,
                mask=mask,
                num_pixels=meta.num_pixels,
                prompt=prompt,
            )
            for i, (meta, advantage, mask) in enumerate(zip(group.rows, group_advantages, group_masks, strict=True))
        ]
        branches = iter(rows[len(group.samples) :])
        for row, meta in zip(rows, group.samples, strict=False):
            episodes.append([row, *(next(branches) for _ in meta.branches)])
    return episodes


def plan_samples(
    samples: Sequence[Sequence[PlannedSample]],
    groups: Sequence[Any],
    *,
    num_ranks: int,
    global_batch_size: int,
    batching: Batching,
) -> BatchPlan:
    """Plan one step. O(n log n) in the number of rows.

    A step whose number of rows the ranks cannot share evenly is filled up with copies of rows, with mask 0.

    Args:
        samples: the rows of each sample, in the order in which samples fill the optimizer steps; a multiple of
            `global_batch_size`.
        groups: ray.ObjectRef of each group, by the number that rows have.
        num_ranks: data-parallel ranks.
        global_batch_size: samples per optimizer step; a multiple of `num_ranks` x `batching.micro_batch_multiple`.

    Raises:
        ValueError: a row is longer than any micro-batch may be.
    """
    multiple = num_ranks * batching.micro_batch_multiple
    assert len(samples) % global_batch_size == 0 and global_batch_size % multiple == 0
    sizes = Counter(row.group for sample in samples for row in sample)
    steps = []
    for start in range(0, len(samples), global_batch_size):
        rows = [row for sample in samples[start : start + global_batch_size] for row in sample]
        steps.append([*rows, *_fillers(rows, -len(rows) % multiple, sizes)])
    # A model that only scores uses the logprob budget for both, so that one is named first.
    for name, rule in (("logprob_mb_tokens", batching.logprobs), ("train_mb_tokens", batching.train)):
        if isinstance(rule, FixedSize):
            continue
        needed, tokens = max((max(rule.tokens_of(row), row.length), row.length) for rows in steps for row in rows)
        if needed > rule.tokens:
            raise ValueError(
                f"a sample of {tokens} tokens is longer than any micro-batch may be ({rule.tokens}); raise "
                f"{rule.key}.{name} to at least {needed}"
            )
    ranks = [RankPlan(train=[], logprobs=[]) for _ in range(num_ranks)]
    owned: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for rows in steps:
        for plan in ranks:
            plan.train.append([])
            plan.forward_only.append(0)
        parts = [_share(part, num_ranks, batching) for part in _by_gradient(rows, multiple)]
        if len(parts) == 2:  # a rank with more of the rows that teach nothing gets fewer of the others
            silent, teaching = (sorted(shares, key=lambda share: sum(map(batching.cost, share))) for shares in parts)
            parts = [silent, teaching[::-1]]
        for shares in parts:
            filled = _fill(shares, batching.train, batching)
            for plan, mine, share, micro_batches in zip(ranks, owned, shares, filled, strict=True):
                # A rank trains on the rows that it scores, so that logprobs never travel between ranks.
                plan.forward_only[-1] = len(plan.train[-1])
                plan.train[-1] += micro_batches
                mine.extend(share)
    # Logprobs need no optimizer step in between: the samples of all steps share micro-batches.
    scored = _fill(owned, batching.logprobs, batching)
    for plan, micro_batches in zip(ranks, scored, strict=True):
        plan.logprobs = micro_batches
    return BatchPlan(groups=list(groups), ranks=ranks)


def _fillers(rows: Sequence[PlannedSample], num: int, sizes: Mapping[int, int]) -> list[PlannedSample]:
    """Copies of the `num` shortest rows, with mask 0. Their indices count from the end of the rows of their group,
    whose number is in `sizes`."""
    shortest = sorted(rows, key=lambda row: (row.length, row.group, row.index))[:num]
    assert len(shortest) == num
    return [replace(row, index=row.index - sizes[row.group], advantage=0.0, mask=0.0) for row in shortest]


def _by_gradient(rows: Sequence[PlannedSample], multiple: int) -> list[list[PlannedSample]]:
    """The rows of an optimizer step that teach nothing, if there are any, and the others: a `multiple` of rows each.

    Some that teach nothing may be among the others, to fill them up.
    """
    teaching = [row for row in rows if row.teaches]
    others = sorted((row for row in rows if not row.teaches), key=lambda row: (row.length, row.group, row.index))
    moved = max(multiple, round_up(len(teaching), multiple)) - len(teaching)
    parts = [others[moved:], [*teaching, *others[:moved]]]
    return [part for part in parts if part]


def _share(samples: Sequence[PlannedSample], num_ranks: int, batching: Batching) -> list[list[MicroBatch]]:
    """Samples of one optimizer step by rank, in pieces that stay together; every rank has the same number of pieces.

    A piece is one sample; with packing it is a bin of the smaller budget. So a rank's pieces fit both budgets, and
    their number is feasible on every rank.
    """
    if not isinstance(batching.train, PackedTokens):
        # By cost and not by tokens: attention's squared lengths decide how long a rank computes.
        parts = balance([batching.cost([sample]) for sample in samples], num_ranks)
        shares = [[samples[i] for i in part] for part in parts]
        if (whole := _share_groups(samples, num_ranks, batching)) is not None:
            shares = min(whole, shares, key=lambda shares: max(map(batching.cost, shares)))
        return [[[sample] for sample in share] for share in shares]
    assert isinstance(batching.logprobs, PackedTokens)
    # Bins of the smaller budget fit into both passes, so a rank that gets whole bins can always run both.
    rule = min(batching.train, batching.logprobs, key=lambda rule: rule.tokens)
    # As many bins on each rank, and a multiple that pipeline schedules take.
    multiple = num_ranks * batching.micro_batch_multiple
    units, tokens, bins = _pack(samples, rule, batching)
    if round_up(len(bins), multiple) > len(units):
        # Samples are such a multiple, units need not be.
        units, tokens, bins = _pack(samples, rule, batching, at_least=len(samples))
    bins = split_fullest(bins, tokens, round_up(len(bins), multiple))
    pieces = _even_out(units, tokens, bins, rule, batching, group=num_ranks)
    parts = balance([batching.cost(piece) for piece in pieces], num_ranks)
    return [[pieces[k] for k in part] for part in parts]


def _share_groups(samples: Sequence[PlannedSample], num_ranks: int, batching: Batching) -> list[MicroBatch] | None:
    """Whole groups by rank, where their samples share a prompt; None if that gives the ranks unequal numbers."""
    groups: dict[int, MicroBatch] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    members = list(groups.values())
    if not batching.shares_prompts or len(members) % num_ranks or len({len(group) for group in members}) > 1:
        return None
    parts = balance([batching.cost(group) for group in members], num_ranks)
    return [[sample for i in part for sample in members[i]] for part in parts]


def _fill(shares: list[list[MicroBatch]], rule: MicroBatching, batching: Batching) -> list[list[MicroBatch]]:
    """Micro-batches of every rank's share, costliest first and the same number on all ranks."""
    if isinstance(rule, PackedTokens):
        return _fill_packed(shares, rule, batching)
    ranks = []
    for share in shares:
        mine = [sample for piece in share for sample in piece]
        # Similar lengths side by side pad little. Group and index make the order, and so the plan, deterministic.
        mine.sort(key=lambda s: (-s.longest, s.group, s.index))
        if batching.shares_prompts and isinstance(rule, FixedSize):  # nothing is padded then: groups side by side
            first = {sample.group: k for k, sample in reversed(list(enumerate(mine)))}
            mine.sort(key=lambda s: first[s.group])
        ranks.append(mine)
    # All ranks get one division into micro-batches, because they meet in collectives at each of them. The division fits
    # every rank if it fits the longest of the k-th samples of all ranks, for each k.
    longest = [max(lap, key=lambda sample: sample.longest) for lap in zip(*ranks, strict=True)]
    sizes = rule.sizes(longest, batching.micro_batch_multiple)
    ends = np.cumsum(sizes).tolist()
    return [[mine[end - size : end] for end, size in zip(ends, sizes, strict=True)] for mine in ranks]


def _fill_packed(shares: list[list[MicroBatch]], rule: PackedTokens, batching: Batching) -> list[list[MicroBatch]]:
    """Each rank's samples packed again into fewer bins than pieces if that is possible on all ranks, else the pieces.

    Every rank has at least as many units as pieces, so every rank can fill the number of bins that one rank needs.
    """
    num_pieces = len(shares[0])
    ranks = [
        _pack([sample for piece in share for sample in piece], rule, batching, at_least=num_pieces) for share in shares
    ]
    # The rank that needs most bins decides, because every rank must run as many.
    count = min(round_up(max(len(bins) for _, _, bins in ranks), batching.micro_batch_multiple), num_pieces)
    filled = []
    for (units, tokens, bins), share in zip(ranks, shares, strict=True):
        micro_batches = share
        if count < num_pieces:
            micro_batches = _even_out(units, tokens, split_fullest(bins, tokens, count), rule, batching)
        # Costliest first: ranks meet at micro-batches of similar work, and memory runs out at the first one or never.
        filled.append(sorted(micro_batches, key=batching.cost, reverse=True))
    return filled


def _pack(
    samples: Sequence[PlannedSample], rule: PackedTokens, batching: Batching, *, at_least: int = 0
) -> tuple[list[MicroBatch], list[int], Bins]:
    """At least `at_least` units, the tokens of each, and the units of each bin."""
    units = _units(samples, rule, batching, at_least=at_least)
    tokens = [_tokens(unit, rule, batching) for unit in units]
    return units, tokens, get_packer(rule.algorithm, rule.tokens).pack(tokens)


def _units(
    samples: Sequence[PlannedSample], rule: PackedTokens, batching: Batching, *, at_least: int
) -> list[MicroBatch]:
    """The units of packing: samples that share a prompt and together take at most a quarter of the budget.

    Each sample alone if prompts are not shared or there would be fewer units than `at_least`.
    """
    alone = [[sample] for sample in samples]
    if not batching.shares_prompts:
        return alone
    units: list[MicroBatch] = []
    for sample in sorted(samples, key=lambda s: (s.group, -s.length, s.index)):
        joined = [*units[-1], sample] if units and units[-1][0].group == sample.group and sample.prompt else []
        if joined and 4 * _tokens(joined, rule, batching) <= rule.tokens:
            units[-1] = joined
        else:
            units.append([sample])
    return units if len(units) >= at_least else alone


def _tokens(unit: MicroBatch, rule: PackedTokens, batching: Batching) -> int:
    return sum(map(rule.tokens_of, unit)) - batching.saved_tokens(unit)


def _even_out(
    units: list[MicroBatch], tokens: list[int], bins: Bins, rule: PackedTokens, batching: Batching, group: int = 1
) -> list[MicroBatch]:
    # Bins are filled by tokens, which the memory bounds, and evened out by cost, for which ranks wait.
    bins = even_out(bins, tokens, [batching.cost(unit) for unit in units], rule.tokens, group)
    return [[sample for i in members for sample in units[i]] for members in bins]

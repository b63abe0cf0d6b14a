"""Groups and advantages -> a plan: which sample goes to which rank, optimizer step and micro-batch.

The plan is made from lengths; tokens stay in the object store. Losses are sums over a global count, so every plan of
the same samples gives the same gradient, and this one may pad little and load the ranks evenly. Ranks enter the same
collectives: all have the same number of micro-batches in every optimizer step and for logprobs, none of them empty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from nemo_rl.config.rules import round_up
from nemo_rl.data.packing import (
    Bins,
    PackingAlgorithm,
    balance,
    even_out,
    get_packer,
    sequence_cost,
    split_fullest,
)
from nemo_rl.models.policy.config import PolicyConfig, sequence_chunks, token_budgets
from nemo_rl.models.policy.flops import CostWeights
from nemo_rl.types import BatchPlan, GroupHandle, MicroBatch, PlannedSample, RankPlan


@dataclass(frozen=True)
class FixedSize:
    """Micro-batches of at most `samples` samples of similar lengths."""

    samples: int

    def sizes(self, longest: Sequence[PlannedSample], multiple: int) -> list[int]:
        """Samples of each micro-batch: even sizes, and the smallest number of micro-batches that is a multiple."""
        count = round_up(-(-len(longest) // self.samples), multiple)
        size, left_over = divmod(len(longest), count)
        # The larger micro-batches come last, where the samples are shorter.
        return [size] * (count - left_over) + [size + 1] * left_over


@dataclass(frozen=True, kw_only=True)
class PaddedTokens:
    """Dynamic batching: samples of similar lengths, number x padded length of the longest at most `tokens`.

    Lengths are padded to a multiple of `length_round`, but not beyond `tokens`, for pairs not beyond half of it.
    """

    tokens: int
    length_round: int
    key: str = "policy.dynamic_batching"

    def padded_length(self, sample: PlannedSample) -> int:
        """Length to which each sequence of the sample is padded if no other of its micro-batch is longer."""
        # A longest sequence that just fits the budget must not be rounded out of it.
        room = max(self.tokens // len(sample.lengths), sample.longest)
        return min(round_up(sample.longest, self.length_round), room)

    def tokens_of(self, sample: PlannedSample) -> int:
        """Tokens that the sample takes if no other sample of its micro-batch is longer."""
        return len(sample.lengths) * self.padded_length(sample)

    def sizes(self, longest: Sequence[PlannedSample], multiple: int) -> list[int]:
        """Samples of each micro-batch, for lengths in descending order: each takes as many as the budget allows.

        This greedy division has the fewest micro-batches: whichever of them holds the longest sample left is padded to
        that length, so no division can put more samples beside it.
        """
        sizes, starts, start = [], [], 0
        while start < len(longest):
            sizes.append(min(self.tokens // self.tokens_of(longest[start]), len(longest) - start))
            starts.append(start)
            start += sizes[-1]
        # Pipeline schedules need the multiple. Splitting costs no padding: the halves keep their samples' lengths.
        while len(sizes) % multiple:  # split the micro-batch with the most padded tokens
            padded = [size * self.tokens_of(longest[start]) for size, start in zip(sizes, starts, strict=True)]
            k = max((k for k in range(len(sizes)) if sizes[k] > 1), key=lambda k: padded[k])
            half = sizes[k] // 2
            starts[k : k + 1] = [starts[k], starts[k] + half]
            sizes[k : k + 1] = [half, sizes[k] - half]
        return sizes


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Sequence packing: samples end to end, at most `tokens` together, chosen by `algorithm`.

    A sequence is padded to a multiple of `length_multiple`, because context parallelism cuts it into equal chunks.
    """

    tokens: int
    algorithm: PackingAlgorithm
    length_multiple: int = 1
    key: str = "policy.sequence_packing"

    def tokens_of(self, sample: PlannedSample) -> int:
        """Tokens that the sample takes."""
        return sum(round_up(length, self.length_multiple) for length in sample.lengths)


MicroBatching = FixedSize | PaddedTokens | PackedTokens


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How micro-batches are made for training and for logprobs, with two sizes of one rule.

    Attributes:
        quadratic_weight: cost of a squared token relative to a token, see `models.policy.flops`.
        pixel_weight: cost of a pixel of an image relative to a token.
        shares_prompts: samples of a group that are in one micro-batch compute their prompt once.
        micro_batch_multiple: pipeline schedules need a number of micro-batches that is a multiple of this.
    """

    train: MicroBatching
    logprobs: MicroBatching
    quadratic_weight: float
    pixel_weight: float = 0.0
    shares_prompts: bool = False
    micro_batch_multiple: int = 1

    def __post_init__(self) -> None:
        assert type(self.train) is type(self.logprobs)

    @classmethod
    def of(cls, policy: PolicyConfig, *, sequences_per_sample: int = 1, **weights: Unpack[CostWeights]) -> Batching:
        """By `policy.sequence_packing`, `policy.dynamic_batching` or numbers of samples. A pair has two sequences.

        `weights`: attributes of the same names, see `ModelFlops.cost_weights`.
        """
        packing, dynamic, chunks = policy.sequence_packing, policy.dynamic_batching, sequence_chunks(policy)
        budgets = token_budgets(policy, sequences_per_sample)
        train: MicroBatching = FixedSize(policy.train_micro_batch_size)
        logprobs: MicroBatching = FixedSize(policy.logprob_batch_size)
        if packing.enabled:
            how = {"algorithm": PackingAlgorithm(packing.algorithm), "key": policy.key("sequence_packing")}
            train, logprobs = (PackedTokens(tokens=n, length_multiple=chunks, **how) for n in budgets)
        elif dynamic.enabled:
            # One length that kernels, tensor parallelism and context parallelism can all cut evenly.
            multiples = (dynamic.sequence_length_round, policy.make_sequence_length_divisible_by, chunks)
            how = {"length_round": math.lcm(*multiples), "key": policy.key("dynamic_batching")}
            train, logprobs = (PaddedTokens(tokens=n, **how) for n in budgets)
        multiple = policy.backend_cfg.micro_batch_multiple
        return cls(train=train, logprobs=logprobs, micro_batch_multiple=multiple, **weights)

    def of_scoring(self) -> Batching:
        """For a model that only scores: its optimizer steps, which never run, get the sizes of the logprobs."""
        return replace(self, train=self.logprobs)

    def cost(self, micro_batch: Sequence[PlannedSample]) -> float:
        """Work of a micro-batch without its padding, in units of a token."""
        weight = self.quadratic_weight
        text = sum(sequence_cost(n, quadratic_weight=weight) for sample in micro_batch for n in sample.lengths)
        images = self.pixel_weight * sum(sample.num_pixels for sample in micro_batch)
        return text + images - self.saved_tokens(micro_batch)

    def saved_tokens(self, samples: Sequence[PlannedSample]) -> int:
        """Tokens of prompts that a micro-batch does not compute, because other samples of the group do."""
        if not self.shares_prompts:
            return 0
        prompts = {sample.group: sample.prompt for sample in samples}
        return sum(sample.prompt for sample in samples) - sum(prompts.values())


def plan_batch(
    groups: Sequence[GroupHandle], advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[float]], **how: Any
) -> BatchPlan:
    """`plan_samples` of finished groups, whose samples fill the optimizer steps in order.

    `advantages` and `masks` are per group and row; mask 0.0 leaves a row out of the loss, not out of the batch. An
    optimizer step has `global_batch_size` samples, with all their rows.
    """
    # A masked sample is planned too, because steps need a multiple of ranks and micro-batches.
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
    return plan_episodes(episodes, [(group.ref, group.place) for group in groups], **how)


def plan_samples(
    samples: Sequence[PlannedSample],
    groups: Sequence[Any],
    *,
    num_ranks: int,
    global_batch_size: int,
    batching: Batching,
) -> BatchPlan:
    """Plan one step. O(n log n) in the number of samples.

    Args:
        samples: in the order in which they fill the optimizer steps; a multiple of `global_batch_size`.
        groups: ray.ObjectRef of each group, by the number that samples have.
        num_ranks: data-parallel ranks.
        global_batch_size: samples per optimizer step; a multiple of `num_ranks` x `batching.micro_batch_multiple`.

    Raises:
        ValueError: a sample is longer than any micro-batch may be.
    """
    alone = [[sample] for sample in samples]
    return plan_episodes(alone, groups, num_ranks=num_ranks, global_batch_size=global_batch_size, batching=batching)


def plan_episodes(
    episodes: Sequence[Sequence[PlannedSample]],
    groups: Sequence[Any],
    *,
    num_ranks: int,
    global_batch_size: int,
    batching: Batching,
) -> BatchPlan:
    """`plan_samples` of samples with several rows each: an optimizer step has `global_batch_size` of them.

    A step whose number of rows the ranks cannot share evenly is filled up with copies of rows, with mask 0.
    """
    multiple = batching.micro_batch_multiple
    assert len(episodes) % global_batch_size == 0 and global_batch_size % (num_ranks * multiple) == 0
    sizes = Counter(row.group for episode in episodes for row in episode)
    steps = []
    for start in range(0, len(episodes), global_batch_size):
        rows = [row for episode in episodes[start : start + global_batch_size] for row in episode]
        steps.append([*rows, *_fillers(rows, -len(rows) % (num_ranks * multiple), sizes)])
    samples = [row for rows in steps for row in rows]
    # A model that only scores uses the logprob budget for both, so that one is named first.
    for name, rule in (("logprob_mb_tokens", batching.logprobs), ("train_mb_tokens", batching.train)):
        if isinstance(rule, FixedSize):
            continue
        needed, tokens = max((max(rule.tokens_of(sample), sample.length), sample.length) for sample in samples)
        if needed > rule.tokens:
            raise ValueError(
                f"a sample of {tokens} tokens is longer than any micro-batch may be ({rule.tokens}); raise "
                f"{rule.key}.{name} to at least {needed}"
            )
    ranks = [RankPlan(train=[], logprobs=[]) for _ in range(num_ranks)]
    owned: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for rows in steps:
        shares = _share(rows, num_ranks, batching, multiple)
        trained = _fill(shares, batching.train, batching, multiple)
        for plan, mine, share, micro_batches in zip(ranks, owned, shares, trained, strict=True):
            # A rank trains on the rows that it scores, so that logprobs never travel between ranks.
            plan.train.append(micro_batches)
            mine.extend(share)
    # Logprobs need no optimizer step in between: the samples of all steps share micro-batches.
    scored = _fill(owned, batching.logprobs, batching, multiple)
    for plan, micro_batches in zip(ranks, scored, strict=True):
        plan.logprobs = micro_batches
    return BatchPlan(groups=list(groups), ranks=ranks)


def _fillers(rows: Sequence[PlannedSample], num: int, sizes: Mapping[int, int]) -> list[PlannedSample]:
    """Copies of the `num` shortest rows, with mask 0. Their indices count from the end of the rows of their group,
    whose number is in `sizes`."""
    shortest = sorted(rows, key=lambda row: (row.length, row.group, row.index))[:num]
    assert len(shortest) == num
    return [replace(row, index=row.index - sizes[row.group], advantage=0.0, mask=0.0) for row in shortest]


def _share(
    samples: Sequence[PlannedSample], num_ranks: int, batching: Batching, multiple: int
) -> list[list[MicroBatch]]:
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
    units = _units(samples, rule, batching, at_least=num_ranks * multiple)
    bins = _pack(units, rule, batching, bin_count_multiple=num_ranks * multiple)
    pieces = _even_out(units, bins, rule, batching, group=num_ranks)
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


def _fill(
    shares: list[list[MicroBatch]], rule: MicroBatching, batching: Batching, multiple: int
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank's share, costliest first and the same number on all ranks."""
    if isinstance(rule, PackedTokens):
        return _fill_packed(shares, rule, batching, multiple)
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
    sizes = rule.sizes(longest, multiple)
    ends = np.cumsum(sizes).tolist()
    return [[mine[end - size : end] for end, size in zip(ends, sizes, strict=True)] for mine in ranks]


def _fill_packed(
    shares: list[list[MicroBatch]], rule: PackedTokens, batching: Batching, multiple: int
) -> list[list[MicroBatch]]:
    """Each rank's samples packed again into fewer bins than pieces if that is possible on all ranks, else the pieces.

    Every rank has at least as many units as pieces, so every rank can fill the number of bins that one rank needs.
    """
    num_pieces = len(shares[0])
    ranks = [
        _units([sample for piece in share for sample in piece], rule, batching, at_least=num_pieces) for share in shares
    ]
    bins = [_pack(mine, rule, batching) for mine in ranks]
    # The rank that needs most bins decides, because every rank must run as many.
    count = min(round_up(max(len(mine) for mine in bins), multiple), num_pieces)
    filled = []
    for mine, own_bins, share in zip(ranks, bins, shares, strict=True):
        micro_batches = share
        if count < num_pieces:
            lengths = [_tokens(unit, rule, batching) for unit in mine]
            micro_batches = _even_out(mine, split_fullest(own_bins, lengths, count), rule, batching)
        # Costliest first: ranks meet at micro-batches of similar work, and memory runs out at the first one or never.
        filled.append(sorted(micro_batches, key=batching.cost, reverse=True))
    return filled


def _units(
    samples: Sequence[PlannedSample], rule: PackedTokens, batching: Batching, *, at_least: int
) -> list[MicroBatch]:
    """What is packed as one: samples that share a prompt, as far as they take a quarter of the budget together.

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


def _pack(
    units: Sequence[MicroBatch], rule: PackedTokens, batching: Batching, bin_count_multiple: int | None = None
) -> Bins:
    packer = get_packer(rule.algorithm, rule.tokens, bin_count_multiple=bin_count_multiple)
    return packer.pack([_tokens(unit, rule, batching) for unit in units])


def _even_out(
    units: Sequence[MicroBatch], bins: Bins, rule: PackedTokens, batching: Batching, group: int = 1
) -> list[MicroBatch]:
    # Bins are filled by tokens, which the memory bounds, and evened out by cost, for which ranks wait.
    lengths = [_tokens(unit, rule, batching) for unit in units]
    costs = [batching.cost(unit) for unit in units]
    return [
        [sample for i in members for sample in units[i]]
        for members in even_out(bins, lengths, costs, rule.tokens, group)
    ]

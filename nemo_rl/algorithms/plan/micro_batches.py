"""How micro-batches are made, by samples, padded tokens or packed tokens, and the work that each of them is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from nemo_rl.config.rules import round_up
from nemo_rl.distributed.packing import PackingAlgorithm, sequence_cost
from nemo_rl.models.policy.config import PolicyConfig, sequence_chunks, token_budgets
from nemo_rl.models.policy.flops import CostWeights
from nemo_rl.types import PlannedSample


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

        This greedy division has the fewest micro-batches: the one with the longest remaining sample is padded to its
        length, so no division can put more samples beside it.
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

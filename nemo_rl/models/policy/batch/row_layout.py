"""Sequences -> the physical rows of a micro-batch: padded or end to end, whole or one rank's part of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.models.policy.attention import ContextKeys, CuSeqlens

# -- One micro-batch as the model sees it: which tokens, at which positions, attending to which, scored where.


@dataclass(frozen=True, kw_only=True)
class ModelBatch:
    """Input of `LogprobModel`. R x W is the physical layout, B x S that of the losses (right-padded, S the longest).

    Padded layout: R = B, `cu_seqlens` None. Padding-free layout: R = 1 and the sequences lie end to end, kept apart by
    `cu_seqlens`. With context parallelism the positions of this rank only. N are the scored tokens of this rank.
    """

    input_ids: torch.Tensor  # int64 [R, W]
    position_ids: torch.Tensor  # int64 [R, W]; begins at 0 for every sequence
    is_token: torch.Tensor  # bool [R, W]; False on padding
    cu_seqlens: CuSeqlens | None
    states: torch.Tensor  # int64 [N]; flat position in R x W of the hidden state that the token is judged from
    targets: torch.Tensor  # int64 [N]; the token
    rows: torch.Tensor  # int64 [N]; where its logprob stands in B x S
    positions: torch.Tensor  # int64 [N]
    shape: tuple[int, int]  # B, S
    columns: dict[str, torch.Tensor] = field(default_factory=dict)  # [N, ...]; what a head needs of each scored token
    routed_experts: torch.Tensor | None = None  # int16 [R, W, layers, K]; those to take, -1 where the router chooses

    def to(self, device: torch.device) -> ModelBatch:
        """A copy on `device`; from pinned memory it does not wait."""
        return self._moved(lambda tensors: tensors.to(device, non_blocking=True))

    def pin_memory(self) -> ModelBatch:
        """A copy in page-locked memory, from where `to` does not wait."""
        return self._moved(lambda tensors: tensors.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> ModelBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: move(value) for name, value in values.items() if isinstance(value, torch.Tensor | CuSeqlens)}
        columns = {name: move(value) for name, value in self.columns.items()}
        return replace(self, **moved, columns=columns)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How micro-batches lie in memory.

    With context parallelism every sequence is cut into 2 * context_size equal chunks, and rank c holds chunks c and
    2 * context_size - 1 - c: early tokens have few keys and late ones many, so together each rank has the same work.

    Attributes:
        padding_free: sequences end to end in one row, instead of one right-padded row each.
        divisible_by: the physical width W is a multiple of it.
        context_group: needed when context_size is above 1.
        own_states: a scored token is judged from its own state, not from that of the token before (reward models).
    """

    padding_free: bool
    divisible_by: int = 1
    context_size: int = 1
    context_rank: int = 0
    context_group: dist.ProcessGroup | None = None
    own_states: bool = False

    @property
    def _chunks(self) -> int:
        return 2 * self.context_size if self.context_size > 1 else 1

    def local_length(self, length: int) -> int:
        """Tokens of a row that a sequence of `length` takes on each rank."""
        return -(-length // self._chunks) * self._chunks // self.context_size

    def width(self, lengths: Sequence[int]) -> int:
        """The smallest W that holds sequences of these lengths."""
        local = [self.local_length(length) for length in lengths]
        if self.padding_free:
            return _round_up(sum(local), self.divisible_by)
        return _round_up(max(local), math.lcm(self.divisible_by, min(2, self._chunks)))

    def build(
        self,
        sequences: Sequence[tuple[torch.Tensor, torch.Tensor]],
        columns: Mapping[str, Sequence[torch.Tensor]] | None = None,
        routed_experts: Sequence[torch.Tensor | None] | None = None,
    ) -> ModelBatch:
        """The batch of sequences (ids int64 [T], mask bool [T]), on the CPU. Cost is linear in the tokens.

        Scored are the tokens where the mask is True, except, unless `own_states`, a sequence's first, which nothing
        predicts; of these, the ones whose state is on this rank. `columns` are what the head needs of each token, by
        name one tensor [T, ...] per sequence. `routed_experts`: of each sequence the experts of its first tokens,
        integers [at most T, layers, K], or None.
        """
        assert sequences and all(len(ids) == len(mask) > 0 for ids, mask in sequences)
        lengths = [len(ids) for ids, _ in sequences]
        width = self.width(lengths)
        rows = 1 if self.padding_free else len(lengths)
        spans = _Spans.of(self, lengths, width)
        ids = torch.cat([ids for ids, _ in sequences])
        mask = torch.cat([mask for _, mask in sequences])
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        position = _ranges(torch.tensor(lengths))
        owner, place = spans.locate(number, position)
        is_here = owner == self.context_rank
        input_ids = torch.zeros(rows * width, dtype=torch.int64)
        input_ids[place[is_here]] = ids[is_here]
        is_token = torch.zeros(rows * width, dtype=torch.bool)
        is_token[place[is_here]] = True
        experts = _experts_of_tokens(routed_experts, lengths)
        if experts is not None:
            held = torch.full((rows * width, *experts.shape[1:]), -1, dtype=torch.int16)
            held[place[is_here]] = experts[is_here]
            experts = held.view(rows, width, *experts.shape[1:])
        back = 0 if self.own_states else 1
        scored = (mask & (position >= back)).nonzero()[:, 0]
        scored = scored[is_here[scored - back]]
        return ModelBatch(
            input_ids=input_ids.view(rows, width),
            position_ids=spans.positions().view(rows, width),
            is_token=is_token.view(rows, width),
            cu_seqlens=spans.cu_seqlens(),
            states=place[scored - back],
            targets=ids[scored],
            rows=number[scored],
            positions=position[scored],
            shape=(len(lengths), max(lengths)),
            columns={name: torch.cat(list(values))[scored] for name, values in (columns or {}).items()},
            routed_experts=experts,
        )


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Where sequences lie in the rows of each rank. int64 [sequences] each."""

    layout: RowLayout
    chunk: torch.Tensor  # tokens per chunk
    start: torch.Tensor  # first place in the flattened rows; the same on every rank
    tokens: int  # R * W

    @classmethod
    def of(cls, layout: RowLayout, lengths: list[int], width: int) -> _Spans:
        if not layout.padding_free:
            local = torch.full((len(lengths),), width)
        else:
            local = torch.tensor([layout.local_length(length) for length in lengths])
        return cls(
            layout=layout,
            chunk=local * layout.context_size // layout._chunks,
            start=local.cumsum(0) - local,
            tokens=width if layout.padding_free else width * len(lengths),
        )

    def locate(self, number: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, place in its flattened rows) of tokens, given their sequence and the position in it."""
        size, chunk = self.layout.context_size, self.chunk[number]
        piece = position // chunk
        is_late = piece >= size
        owner = torch.where(is_late, 2 * size - 1 - piece, piece)
        return owner, self.start[number] + position % chunk + chunk * is_late

    def _pieces(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence, tokens and first position of what lies one after the other on this rank."""
        size, rank = self.layout.context_size, self.layout.context_rank
        held = torch.tensor([0] if size == 1 else [rank, 2 * size - 1 - rank])
        number = torch.arange(len(self.chunk)).repeat_interleave(len(held))
        length = self.chunk[number]
        return number, length, length * held.repeat(len(self.chunk))

    def positions(self) -> torch.Tensor:
        """int64 [R * W]. Padding at the end of a padding-free row counts from 0."""
        _, length, first = self._pieces()
        taken = _ranges(length) + first.repeat_interleave(length)
        return torch.cat([taken, torch.arange(self.tokens - len(taken))])

    def cu_seqlens(self) -> CuSeqlens | None:
        """Padding at the end of a padding-free row is a segment of its own: attention is defined there too."""
        layout = self.layout
        if layout.context_size == 1 and not layout.padding_free:
            return None
        number, length, first = self._pieces()
        keys = first + length
        taken = int(length.sum())
        tail = [self.tokens - taken] if self.tokens > taken else []
        queries = length.tolist() + tail
        if layout.context_size == 1:
            return CuSeqlens.of(queries)
        owner, place = self.locate(number.repeat_interleave(keys), _ranges(keys))
        own_tail = layout.context_rank * self.tokens + torch.arange(taken, self.tokens)
        assert layout.context_group is not None
        index = torch.cat([owner * self.tokens + place, own_tail])
        return CuSeqlens.of(queries, keys.tolist() + tail, ContextKeys(group=layout.context_group, index=index))


def _experts_of_tokens(
    routed_experts: Sequence[torch.Tensor | None] | None, lengths: Sequence[int]
) -> torch.Tensor | None:
    """Experts of all tokens of the sequences, int16 [sum of T, layers, K], -1 without a record; None: of no token."""
    known = [experts for experts in routed_experts or () if experts is not None]
    if not known:
        return None
    assert routed_experts is not None
    out = torch.full((sum(lengths), *known[0].shape[1:]), -1, dtype=torch.int16)
    for part, experts in zip(out.split(list(lengths)), routed_experts, strict=True):
        if experts is not None:
            part[: len(experts)] = experts
    return out


def _ranges(lengths: torch.Tensor) -> torch.Tensor:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

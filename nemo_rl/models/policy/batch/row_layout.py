"""Sequences -> one micro-batch as the model sees it: padded or packed rows, whole or one rank's part of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nemo_rl.config.rules import round_up
from nemo_rl.models.policy.attention import CuSeqlens, WholeSpans, moved


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """The images of a micro-batch; see `VisionInputs`. F is the number of tokens of its distinct images."""

    pixels: dict[str, torch.Tensor]  # inputs of the tower, of all distinct images
    features: torch.Tensor  # int64 [R, W]; in 0 ... F - 1, -1 where a token stands for no image
    positions: torch.Tensor  # int64 [3, R, W]; of time, height and width
    num_distinct: int  # images; 0 if `pixels` are of a blank image
    whole_spans: WholeSpans | None = None  # the images, for a model that sees them in both directions


@dataclass(frozen=True, kw_only=True)
class ModelBatch:
    """Input of `LogprobModel`. R x W is the physical layout, B x S the losses' (right-padded, S the longest sequence).

    Padded layout: R = B and `cu_seqlens` is None. Padding-free layout: R = 1, the sequences lie end to end, and
    `cu_seqlens` keeps them apart. With context parallelism, only this rank's positions. N is the number of this rank's
    scored tokens.
    """

    input_ids: torch.Tensor  # int64 [R, W]
    position_ids: torch.Tensor  # int64 [R, W]; begins at 0 for every sequence
    is_token: torch.Tensor  # bool [R, W]; False on padding
    cu_seqlens: CuSeqlens | None
    states: torch.Tensor  # int64 [N]; flat position in R x W of the hidden state that scores the token
    targets: torch.Tensor  # int64 [N]; the token
    rows: torch.Tensor  # int64 [N]; row of its logprob in B x S
    positions: torch.Tensor  # int64 [N]; column of its logprob in B x S
    shape: tuple[int, int]  # B, S
    columns: dict[str, torch.Tensor] = field(default_factory=dict)  # [N, ...]; what a head needs of each scored token
    routed_experts: torch.Tensor | None = None  # int16 [R, W, layers, K]; experts to use, -1 where the router chooses
    images: ImageBatch | None = None  # of a vision-language model

    def to(self, device: torch.device) -> ModelBatch:
        """A copy on `device`; from pinned memory the call does not wait."""
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> ModelBatch:
        """A copy in page-locked memory, from which `to` does not wait."""
        return moved(self, torch.Tensor.pin_memory)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How micro-batches lie in memory.

    With context parallelism every sequence is cut into 2 * context_size equal chunks, and rank c holds chunks c and
    2 * context_size - 1 - c. Under causal attention early tokens have few keys and late tokens have many, so an early
    and a late chunk together give every rank the same work.

    Attributes:
        padding_free: sequences lie end to end in one row, instead of one right-padded row each.
        divisible_by: the physical width W is a multiple of it.
        context_group: required if context_size is above 1.
        own_states: a token is scored from its own state (reward models), not from the state of the token before it.
        shares_prompts: sequences that begin with the same unscored tokens have them once, in a segment that they all
            attend to ("shared prefix", arXiv 2506.05433). Needs `padding_free` and whole sequences.
    """

    padding_free: bool
    divisible_by: int = 1
    context_size: int = 1
    context_rank: int = 0
    context_group: dist.ProcessGroup | None = None
    own_states: bool = False
    shares_prompts: bool = False

    @property
    def _chunks(self) -> int:
        return 2 * self.context_size if self.context_size > 1 else 1

    def local_length(self, length: int) -> int:
        """Tokens that a sequence of `length` takes on each rank, the padding of its last chunk included."""
        return -(-length // self._chunks) * self._chunks // self.context_size

    def width(self, lengths: Sequence[int]) -> int:
        """The smallest W that holds sequences of these lengths."""
        local = [self.local_length(length) for length in lengths]
        if self.padding_free:
            return round_up(sum(local), self.divisible_by)
        return round_up(max(local), math.lcm(self.divisible_by, min(2, self._chunks)))

    def place(self, values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
        """Values of the tokens of each sequence, [T, ...], where `build` puts the tokens: [R, W, ...]; else `fill`."""
        lengths = [len(own) for own in values]
        spans = _Spans.of(self, lengths)
        owner, slot = spans.locate(*_tokens_of(lengths))
        is_here = owner == self.context_rank
        return _put(torch.cat(list(values))[is_here], slot[is_here], spans.shape, fill)

    def whole_spans(self, lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]]) -> WholeSpans | None:
        """The spans of sequences of these lengths, given (first position, position after the last) of each.

        None if no span has a token on this rank.
        """
        placed, parts = _Spans.of(self, lengths), []
        for number, own in enumerate(spans):
            for first, end in own:
                position = torch.arange(end)
                owner, slot = placed.locate(torch.full((end,), number), position)
                is_here = (owner == self.context_rank) & (position >= first)
                if is_here.any():
                    parts.append((slot[is_here], position[is_here], owner * math.prod(placed.shape) + slot))
        if not parts:
            return None
        queries, positions, keys = zip(*parts, strict=True)
        return WholeSpans(
            queries=torch.cat(queries),
            positions=torch.cat(positions),
            query_lengths=tuple(map(len, queries)),
            keys=torch.cat(keys),
            key_lengths=tuple(map(len, keys)),
        )

    def build(
        self,
        sequences: Sequence[tuple[torch.Tensor, torch.Tensor]],
        columns: Mapping[str, Sequence[torch.Tensor]] | None = None,
        routed_experts: Sequence[torch.Tensor | None] | None = None,
        images: ImageBatch | None = None,
    ) -> ModelBatch:
        """Build the batch on the CPU. The cost is linear in the number of tokens.

        The scored tokens are those where the mask is True. Unless `own_states`, a sequence's first token is not scored,
        because nothing predicts it. Each rank scores the tokens whose states it has.

        Args:
            sequences: (ids int64 [T], mask bool [T]) each.
            columns: what the head needs of each token; by name, one tensor [T, ...] per sequence.
            routed_experts: per sequence the experts of its first tokens, integers [at most T, layers, K], or None.
            images: of the sequences; see `VisionInputs`.
        """
        assert sequences and all(len(ids) == len(mask) > 0 for ids, mask in sequences)
        lengths = [len(ids) for ids, _ in sequences]
        prompts = _shared_prompts(sequences) if self.shares_prompts else []
        spans = _SharedSpans.sharing(self, lengths, prompts) if prompts else _Spans.of(self, lengths)
        ids = torch.cat([ids for ids, _ in sequences])
        mask = torch.cat([mask for _, mask in sequences])
        number, position = _tokens_of(lengths)
        owner, slot = spans.locate(number, position)
        is_here = owner == self.context_rank
        own, shape = slot[is_here], spans.shape
        experts = _experts_of_tokens(routed_experts or (), lengths)
        # The state that scores a token may lie on another rank than the token: at the border of two chunks.
        back = 0 if self.own_states else 1
        scored = (mask & (position >= back)).nonzero()[:, 0]
        scored = scored[is_here[scored - back]]
        return ModelBatch(
            input_ids=_put(ids[is_here], own, shape, 0),
            position_ids=spans.positions(),
            is_token=_put(torch.ones(len(own), dtype=torch.bool), own, shape, False),
            cu_seqlens=spans.cu_seqlens(),
            states=slot[scored - back],
            targets=ids[scored],
            rows=number[scored],
            positions=position[scored],
            shape=(len(lengths), max(lengths)),
            columns={name: torch.cat(list(values))[scored] for name, values in (columns or {}).items()},
            routed_experts=None if experts is None else _put(experts[is_here], own, shape, -1),
            images=images,
        )


def _put(values: torch.Tensor, slots: torch.Tensor, shape: tuple[int, int], fill: int) -> torch.Tensor:
    """`values` [n, ...] in the `slots` of flattened rows, as rows [R, W, ...]; `fill` in the other slots."""
    out = torch.full((shape[0] * shape[1], *values.shape[1:]), fill, dtype=values.dtype)
    out[slots] = values
    return out.view(*shape, *values.shape[1:])


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """The places of the tokens of sequences in the rows of each rank.

    The rows of this rank consist of pieces of sequences, in this order, and of padding at the end.
    """

    layout: RowLayout
    shape: tuple[int, int]  # R, W
    start: torch.Tensor  # int64 [sequences]; first slot in the flattened rows, equal on all ranks
    chunk: torch.Tensor  # int64 [sequences]; tokens per chunk
    number: torch.Tensor  # int64 [pieces]; sequence of the piece
    length: torch.Tensor  # int64 [pieces]
    first: torch.Tensor  # int64 [pieces]; position of the first token

    @classmethod
    def of(cls, layout: RowLayout, lengths: Sequence[int]) -> _Spans:
        width = layout.width(lengths)
        local = torch.full((len(lengths),), width)
        if layout.padding_free:
            local = torch.tensor([layout.local_length(length) for length in lengths])
        size, rank = layout.context_size, layout.context_rank
        chunk = local * size // layout._chunks
        held = torch.tensor([0] if size == 1 else [rank, 2 * size - 1 - rank])
        number = torch.arange(len(lengths)).repeat_interleave(len(held))
        return cls(
            layout=layout,
            shape=(1 if layout.padding_free else len(lengths), width),
            start=local.cumsum(0) - local,
            chunk=chunk,
            number=number,
            length=chunk[number],
            first=chunk[number] * held.repeat(len(lengths)),
        )

    def locate(self, number: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, slot in its flattened rows) of tokens, given their sequence and the position in it."""
        size, chunk = self.layout.context_size, self.chunk[number]
        piece = position // chunk
        is_late = piece >= size  # the second of the two chunks that a rank has of each sequence
        owner = torch.where(is_late, 2 * size - 1 - piece, piece)
        return owner, self.start[number] + position % chunk + chunk * is_late

    def positions(self) -> torch.Tensor:
        """int64 [R, W]. The padding at the end of a padding-free row counts from 0."""
        used = _ranges(self.length) + self.first.repeat_interleave(self.length)
        return torch.cat([used, torch.arange(math.prod(self.shape) - len(used))]).view(self.shape)

    def cu_seqlens(self) -> CuSeqlens | None:
        """The padding at the end of a padding-free row is a segment of its own: the kernels need every token in one."""
        layout, tokens = self.layout, math.prod(self.shape)
        if layout.context_size == 1 and not layout.padding_free:
            return None
        used = int(self.length.sum())
        tail = [tokens - used] if tokens > used else []
        queries = self.length.tolist() + tail
        if not self.first.any():  # every piece is a whole sequence
            return CuSeqlens.of(queries)
        assert layout.context_size == 1 or layout.context_group is not None
        keys = self.first + self.length  # a piece sees every token of its sequence up to its own end
        owner, slot = self.locate(self.number.repeat_interleave(keys), _ranges(keys))
        own_tail = layout.context_rank * tokens + torch.arange(used, tokens)
        index = torch.cat([owner * tokens + slot, own_tail])
        return CuSeqlens.of(queries, keys.tolist() + tail, index, layout.context_group)


def _shared_prompts(sequences: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, list[int]]]:
    """(tokens, sequences) of each prompt, the tokens before the first scored one, that several sequences begin with."""
    owners: dict[bytes, list[int]] = {}
    for number, (ids, mask) in enumerate(sequences):
        if length := int(mask.int().argmax()):  # 0 also where nothing is scored
            owners.setdefault(ids[:length].numpy().tobytes(), []).append(number)
    return [(len(ids) // 8, numbers) for ids, numbers in owners.items() if len(numbers) > 1]


@dataclass(frozen=True, kw_only=True)
class _SharedSpans(_Spans):
    """One row in which shared prompts come first, each once, then the rest of each sequence, from `start` on."""

    shared: torch.Tensor  # int64 [sequences]; tokens of the shared prompt, or 0
    prompt: torch.Tensor  # int64 [sequences]; first slot of the shared prompt

    @classmethod
    def sharing(cls, layout: RowLayout, lengths: list[int], prompts: Sequence[tuple[int, list[int]]]) -> _SharedSpans:
        assert layout.padding_free and layout.context_size == 1
        shared, prompt, start, end = [0] * len(lengths), [0] * len(lengths), [0] * len(lengths), 0
        pieces = []  # number, length, first
        for tokens, numbers in sorted(prompts):  # equal lengths side by side share a product of attention on a CPU
            for number in numbers:
                shared[number], prompt[number] = tokens, end
            pieces.append((numbers[0], tokens, 0))
            end += tokens
        for number in sorted(range(len(lengths)), key=lambda number: (lengths[number], shared[number])):
            start[number] = end
            pieces.append((number, lengths[number] - shared[number], shared[number]))
            end += lengths[number] - shared[number]
        tensors = {"start": start, "chunk": lengths, "shared": shared, "prompt": prompt}
        tensors |= dict(zip(("number", "length", "first"), zip(*pieces, strict=True), strict=True))
        shape = (1, round_up(end, layout.divisible_by))
        return cls(layout=layout, shape=shape, **{name: torch.tensor(own) for name, own in tensors.items()})

    def locate(self, number: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        behind = position - self.shared[number]
        slot = torch.where(behind < 0, self.prompt[number] + position, self.start[number] + behind)
        return torch.zeros_like(slot), slot


def _experts_of_tokens(routed_experts: Sequence[torch.Tensor | None], lengths: list[int]) -> torch.Tensor | None:
    """Experts of all tokens, int16 [sum of T, layers, K], -1 without a record; None if no token has a record."""
    known = next((experts for experts in routed_experts if experts is not None), None)
    if known is None:
        return None
    out = torch.full((sum(lengths), *known.shape[1:]), -1, dtype=torch.int16)
    for part, experts in zip(out.split(lengths), routed_experts, strict=True):
        if experts is not None:
            part[: len(experts)] = experts
    return out


def _tokens_of(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence, position in it) of every token of sequences of these lengths."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), _ranges(torch.tensor(lengths))


def _ranges(lengths: torch.Tensor) -> torch.Tensor:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)

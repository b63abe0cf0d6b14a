"""Sequences -> one micro-batch as the model sees it: padded or packed rows, whole or one rank's part of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemo_rl.config.rules import round_up
from nemo_rl.models.policy.attention import ContextKeys, CuSeqlens, WholeSpans


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """The images of a micro-batch; see `VisionInputs`. F is the number of tokens of its distinct images."""

    pixels: dict[str, torch.Tensor]  # inputs of the tower, of all distinct images
    features: torch.Tensor  # int64 [R, W]; in 0 ... F - 1, -1 where a token stands for no image
    positions: torch.Tensor  # int64 [3, R, W]; of time, height and width
    num_distinct: int  # images; 0 if `pixels` are those of a blank one
    whole_spans: WholeSpans | None = None  # the images, for a model that sees them in both directions

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> ImageBatch:
        pixels = {name: move(value) for name, value in self.pixels.items()}
        spans = None if self.whole_spans is None else self.whole_spans.moved(move)
        moved = {"features": move(self.features), "positions": move(self.positions)}
        return replace(self, pixels=pixels, whole_spans=spans, **moved)


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
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> ModelBatch:
        """A copy in page-locked memory, from which `to` does not wait."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> ModelBatch:
        moved = {name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        columns = {name: move(value) for name, value in self.columns.items()}
        cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.moved(move)
        images = None if self.images is None else self.images.moved(move)
        return replace(self, **moved, columns=columns, cu_seqlens=cu_seqlens, images=images)


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
        width = self.width(lengths)
        rows = 1 if self.padding_free else len(lengths)
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        owner, slot = _Spans.of(self, lengths, width).locate(number, _ranges(torch.tensor(lengths)))
        is_here = owner == self.context_rank
        joined = torch.cat(list(values))
        out = torch.full((rows * width, *joined.shape[1:]), fill, dtype=joined.dtype)
        out[slot[is_here]] = joined[is_here]
        return out.view(rows, width, *joined.shape[1:])

    def whole_spans(self, lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]]) -> WholeSpans | None:
        """Of sequences of these lengths, whose `spans` go from a position to the one behind their last; None for none.

        Those of which no token is here are left out.
        """
        placed, parts = _Spans.of(self, list(lengths), self.width(lengths)), []
        for number, own in enumerate(spans):
            for first, end in own:
                position = torch.arange(end)
                owner, slot = placed.locate(torch.full((end,), number), position)
                is_here = (owner == self.context_rank) & (position >= first)
                if is_here.any():
                    parts.append((slot[is_here], position[is_here], owner * placed.tokens + slot))
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
        spans = _SharedSpans.of(self, lengths, prompts) if prompts else _Spans.of(self, lengths, self.width(lengths))
        rows = 1 if self.padding_free else len(lengths)
        width = spans.tokens // rows
        ids = torch.cat([ids for ids, _ in sequences])
        mask = torch.cat([mask for _, mask in sequences])
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        position = _ranges(torch.tensor(lengths))
        owner, slot = spans.locate(number, position)
        is_here = owner == self.context_rank
        own = slot[is_here]
        input_ids = torch.zeros(rows * width, dtype=torch.int64)
        input_ids[own] = ids[is_here]
        is_token = torch.zeros(rows * width, dtype=torch.bool)
        is_token[own] = True
        experts = _experts_of_tokens(routed_experts or (), lengths)
        if experts is not None:
            held = torch.full((rows * width, *experts.shape[1:]), -1, dtype=torch.int16)
            held[own] = experts[is_here]
            experts = held.view(rows, width, *experts.shape[1:])
        # The state that scores a token may lie on another rank than the token: at the border of two chunks.
        back = 0 if self.own_states else 1
        scored = (mask & (position >= back)).nonzero()[:, 0]
        scored = scored[is_here[scored - back]]
        return ModelBatch(
            input_ids=input_ids.view(rows, width),
            position_ids=spans.positions().view(rows, width),
            is_token=is_token.view(rows, width),
            cu_seqlens=spans.cu_seqlens(),
            states=slot[scored - back],
            targets=ids[scored],
            rows=number[scored],
            positions=position[scored],
            shape=(len(lengths), max(lengths)),
            columns={name: torch.cat(list(values))[scored] for name, values in (columns or {}).items()},
            routed_experts=experts,
            images=images,
        )


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Where sequences lie in the rows of each rank. int64 [sequences] each."""

    layout: RowLayout
    chunk: torch.Tensor  # tokens per chunk
    start: torch.Tensor  # first slot in the flattened rows; equal on all ranks
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
        """(rank, slot in its flattened rows) of tokens, given their sequence and the position in it."""
        size, chunk = self.layout.context_size, self.chunk[number]
        piece = position // chunk
        is_late = piece >= size  # the second of the two chunks that a rank has of each sequence
        owner = torch.where(is_late, 2 * size - 1 - piece, piece)
        return owner, self.start[number] + position % chunk + chunk * is_late

    def _pieces(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence, tokens and first position of the chunks on this rank, in the order in which they lie."""
        size, rank = self.layout.context_size, self.layout.context_rank
        held = torch.tensor([0] if size == 1 else [rank, 2 * size - 1 - rank])
        number = torch.arange(len(self.chunk)).repeat_interleave(len(held))
        length = self.chunk[number]
        return number, length, length * held.repeat(len(self.chunk))

    def positions(self) -> torch.Tensor:
        """int64 [R * W]. The padding at the end of a padding-free row counts from 0."""
        _, length, first = self._pieces()
        used = _ranges(length) + first.repeat_interleave(length)
        return torch.cat([used, torch.arange(self.tokens - len(used))])

    def cu_seqlens(self) -> CuSeqlens | None:
        """The padding at the end of a padding-free row is a segment of its own: the kernels need every token in one."""
        layout = self.layout
        if layout.context_size == 1 and not layout.padding_free:
            return None
        number, length, first = self._pieces()
        keys = first + length  # a chunk sees every token of its sequence up to its own end
        used = int(length.sum())
        tail = [self.tokens - used] if self.tokens > used else []
        queries = length.tolist() + tail
        if layout.context_size == 1:
            return CuSeqlens.of(queries)
        owner, slot = self.locate(number.repeat_interleave(keys), _ranges(keys))
        own_tail = layout.context_rank * self.tokens + torch.arange(used, self.tokens)
        assert layout.context_group is not None
        index = torch.cat([owner * self.tokens + slot, own_tail])
        return CuSeqlens.of(queries, keys.tolist() + tail, ContextKeys(group=layout.context_group, index=index))


def _shared_prompts(sequences: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, list[int]]]:
    """(tokens, sequences) of each prompt, the tokens before the first scored one, that several sequences begin with."""
    owners: dict[bytes, list[int]] = {}
    for number, (ids, mask) in enumerate(sequences):
        if length := int(mask.int().argmax()):  # 0 also where nothing is scored
            owners.setdefault(ids[:length].numpy().tobytes(), []).append(number)
    return [(len(ids) // 8, numbers) for ids, numbers in owners.items() if len(numbers) > 1]


@dataclass(frozen=True, kw_only=True)
class _SharedSpans:
    """Where sequences lie in one row in which shared prompts come first, each once. int64 [sequences] each."""

    length: torch.Tensor
    shared: torch.Tensor  # tokens of the shared prompt, or 0
    prompt: torch.Tensor  # first slot of the shared prompt
    rest: torch.Tensor  # first slot of the sequence's other tokens
    order: torch.Tensor  # of the sequences in the row
    prompts: torch.Tensor  # tokens of each shared prompt, in order
    tokens: int

    @classmethod
    def of(cls, layout: RowLayout, lengths: list[int], prompts: Sequence[tuple[int, list[int]]]) -> _SharedSpans:
        assert layout.padding_free and layout.context_size == 1
        prompts = sorted(prompts)  # segments of equal lengths side by side go into one product of attention on a CPU
        shared, prompt, start = [0] * len(lengths), [0] * len(lengths), 0
        for tokens, numbers in prompts:
            for number in numbers:
                shared[number], prompt[number] = tokens, start
            start += tokens
        order = sorted(range(len(lengths)), key=lambda number: (lengths[number], shared[number]))
        rest = [0] * len(lengths)
        for number in order:
            rest[number] = start
            start += lengths[number] - shared[number]
        numbers = (torch.tensor(values) for values in (lengths, shared, prompt, rest, order))
        tensors = dict(zip(("length", "shared", "prompt", "rest", "order"), numbers, strict=True))
        tokens = round_up(start, layout.divisible_by)
        return cls(**tensors, prompts=torch.tensor([tokens for tokens, _ in prompts]), tokens=tokens)

    def locate(self, number: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_Spans.locate`."""
        behind = position - self.shared[number]
        slot = torch.where(behind < 0, self.prompt[number] + position, self.rest[number] + behind)
        return torch.zeros_like(slot), slot

    def _queries(self) -> torch.Tensor:
        """Tokens of the segments, without the padding."""
        return torch.cat([self.prompts, (self.length - self.shared)[self.order]])

    def positions(self) -> torch.Tensor:
        """See `_Spans.positions`."""
        queries = self._queries()
        first = F.pad(self.shared[self.order], (len(self.prompts), 0))
        used = _ranges(queries) + first.repeat_interleave(queries)
        return torch.cat([used, torch.arange(self.tokens - len(used))])

    def cu_seqlens(self) -> CuSeqlens:
        """See `_Spans.cu_seqlens`."""
        queries, lengths = self._queries(), self.length[self.order]
        used = int(queries.sum())
        tail = [self.tokens - used] if self.tokens > used else []
        _, slot = self.locate(self.order.repeat_interleave(lengths), _ranges(lengths))
        index = torch.cat([torch.arange(int(self.prompts.sum())), slot, torch.arange(used, self.tokens)])
        keys = [*self.prompts.tolist(), *lengths.tolist(), *tail]
        return CuSeqlens.of([*queries.tolist(), *tail], keys, ContextKeys(group=None, index=index))


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


def _ranges(lengths: torch.Tensor) -> torch.Tensor:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)

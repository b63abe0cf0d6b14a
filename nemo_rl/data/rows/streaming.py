"""Batches of prompts from datasets that are never loaded whole: read front to back, shuffled block by block."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from nemo_rl.data.rows.dataloader import PromptSource, rows_digest
from nemo_rl.data.rows.setup import StreamedRows
from nemo_rl.types import Prompt

SHUFFLE_BLOCK = 10_000
NUM_HASHED_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class _Position:
    """The beginning of a block of an epoch."""

    block: int = 0  # number of the block
    stream: int = 0  # index of the stream
    row: int = 0  # rows of the stream before it
    idx: int = 0  # rows of the epoch before it
    rows_state: dict[str, Any] | None = None  # of the stream's table; None at its beginning


def _blocks(
    streams: Sequence[StreamedRows], start: _Position, num_rows: int
) -> Iterator[tuple[_Position, list[Prompt]]]:
    """Blocks of `num_rows` prompts (the last one smaller) with the positions where they begin, from `start` on."""
    here, rows, rest = start, None, iter(())
    while True:
        begin, prompts = here, []
        while len(prompts) < num_rows and here.stream < len(streams):
            stream = streams[here.stream]
            if rows is None:
                rows = copy.deepcopy(stream.table)  # shallow copies of a table share its position
                if here.rows_state is not None:
                    rows.load_state_dict(here.rows_state)
                rest = iter(rows)
            row = next(rest, None)
            if row is None:
                here, rows = replace(here, stream=here.stream + 1, row=0, rows_state=None), None
                continue
            prompts.append(stream.prompt(row, here.row, here.idx))
            here = replace(here, row=here.row + 1, idx=here.idx + 1)
        if not prompts:
            return
        yield begin, prompts
        state = rows.state_dict() if rows is not None else None
        here = replace(here, block=here.block + 1, rows_state=state)


class StreamedPrompts(PromptSource):
    """Prompts of streamed data: one stream after another, again in every epoch.

    Rows are shuffled within blocks of `shuffle_block` rows, by a permutation that depends on seed, epoch and number of
    the block alone. The rows of one block are in memory. Resuming reads that block again, and nothing before it.

    The table itself must not be shuffled: the buffer of such a shuffle is in no saved state. `options` are arguments of
    `PromptSource`. Raises ValueError while iterating, if an epoch has less than one batch.
    """

    def __init__(
        self,
        streams: Sequence[StreamedRows],
        num_prompts_per_step: int,
        *,
        shuffle_block: int = SHUFFLE_BLOCK,
        **options: Any,
    ) -> None:
        self.streams = list(streams)
        self.shuffle_block = shuffle_block
        names = [f"{stream.name} x 1" for stream in self.streams]
        super().__init__(num_prompts_per_step, **options, streams=names, shuffle_block=shuffle_block)
        self._block = _Position()  # the block of the last row that was yielded
        self._position = 0  # rows of the block that were yielded

    def __iter__(self) -> Iterator[list[Prompt]]:
        first, batch = self._position, []
        block_size = self.shuffle_block if self.shuffle else self.num_prompts_per_step
        for begin, prompts in _blocks(self.streams, self._block, block_size):
            order = np.arange(len(prompts))
            if self.shuffle:
                order = np.random.default_rng([self.seed, self.epoch, begin.block]).permutation(len(prompts))
            for position in range(first, len(prompts)):
                batch.append(prompts[order[position]])
                if len(batch) == self.num_prompts_per_step:
                    # Only here, so that the state always is the one after the last batch.
                    self._block, self._position = begin, position + 1
                    self.batches_done += 1
                    yield batch
                    batch = []
            first = 0
        if self.batches_done == 0 and (self.drop_last or not batch):
            raise ValueError(
                f"the streamed training data has {len(batch)} rows, fewer than one step takes: set {self.size_key} "
                f"(now {self.num_prompts_per_step}) to at most that, or name more data"
            )
        self.epoch, self.batches_done, self._block, self._position = self.epoch + 1, 0, _Position(), 0
        if batch and not self.drop_last:
            yield batch

    def fingerprint(self) -> dict[str, Any]:
        """Per stream its name, and a hash of its first 100 rows."""
        first = {stream.name: islice(copy.deepcopy(stream.table), NUM_HASHED_ROWS) for stream in self.streams}
        return {name: {"repeat": 1, "first_rows_hash": rows_digest(rows)} for name, rows in first.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "block": asdict(self._block), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._block = _Position(**state["block"])
        self._position = int(state["position"])

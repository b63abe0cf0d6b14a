"""Prompts of datasets that do not fit: read once from front to back, shuffled block by block, resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from nemo_rl.data.interfaces import Row
from nemo_rl.data.rows.dataloader import check_same_order, rows_digest
from nemo_rl.types import Prompt

SHUFFLE_BLOCK = 10_000
NUM_HASHED_ROWS = 100


@runtime_checkable
class ResumableRows(Protocol):
    """Rows that go on from a saved place without reading what lies before it, as `datasets.IterableDataset` does.

    `state_dict` is the place behind the rows that the last iteration has given; JSON-able.
    """

    def __iter__(self) -> Iterator[Row]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NamedStream:
    """A stream of rows under a name (unique among the datasets of a run, part of every prompt id)."""

    name: str
    task_name: str
    open_rows: Callable[[], Iterable[Row]]
    """Gives the rows from the first on, the same at every call; of a `datasets.IterableDataset`
    `partial(copy.deepcopy, table)`, for shallow copies share their place. Not shuffled by itself: the buffer of such a
    shuffle is in no saved state."""
    convert: Callable[[Row], Row] | None = None  # applied to each row
    repeat: int = 1


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a block of an epoch begins."""

    block: int = 0  # number of the block
    stream: int = 0  # index of the stream, repetitions counted
    row: int = 0  # rows of the stream before
    idx: int = 0  # rows of the epoch before
    rows_state: dict[str, Any] | None = None  # of ResumableRows


class _Reader:
    """Reads the streams one after another, from a place on, in blocks."""

    def __init__(self, streams: Sequence[NamedStream], place: _Place) -> None:
        self._passes = [(stream, number) for stream in streams for number in range(stream.repeat)]
        self._place = place
        self._open(place.stream, place.row, place.rows_state)
        self._idx = place.idx
        self._block = place.block

    def _open(self, stream: int, row: int = 0, state: dict[str, Any] | None = None) -> None:
        self._stream, self._row = stream, row
        self._rows: Iterable[Row] = self._passes[stream][0].open_rows() if stream < len(self._passes) else []
        if state is not None:
            assert isinstance(self._rows, ResumableRows), "a stream with a saved state stays one that has states"
            self._rows.load_state_dict(state)
        self._iterator = iter(self._rows) if state is not None else islice(self._rows, row, None)

    def read(self, num_rows: int) -> tuple[_Place, list[Prompt]]:
        """The next rows, fewer where the last stream ends, and the place where they begin."""
        begin = self._here()
        prompts: list[Prompt] = []
        while len(prompts) < num_rows and self._stream < len(self._passes):
            row = next(self._iterator, None)
            if row is None:
                self._open(self._stream + 1)
            else:
                prompts.append(self._prompt(row))
                self._row += 1
                self._idx += 1
        self._block += 1
        return begin, prompts

    def _here(self) -> _Place:
        rows = self._rows
        return _Place(
            block=self._block,
            stream=self._stream,
            row=self._row,
            idx=self._idx,
            rows_state=rows.state_dict() if self._row > 0 and isinstance(rows, ResumableRows) else None,
        )

    def _prompt(self, row: Row) -> Prompt:
        stream, repetition = self._passes[self._stream]
        return Prompt(
            prompt_id=f"{stream.name}:{self._row}" + (f"/{repetition}" if repetition else ""),
            row=row if stream.convert is None else stream.convert(row),
            idx=self._idx,
            task_name=stream.task_name,
        )


class StreamedPrompts:
    """The `PromptSource` of data that is read as a stream: one stream after another, every epoch anew.

    Rows are shuffled within blocks of `shuffle_block` rows; the permutation depends on seed, epoch and number of the
    block alone. Memory: the rows of one block. Resuming reads that block again; of what lies before it nothing where
    the rows have states of their own (`ResumableRows`), otherwise the rows are read and left out.

    `drop_last` leaves out the incomplete batch at the end of an epoch. `size_key` as in `PromptDataLoader`.

    Raises:
        ValueError: while iterating, when an epoch has less than one batch.
    """

    num_batches: int | None = None

    def __init__(
        self,
        streams: Sequence[NamedStream],
        num_prompts_per_step: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = True,
        shuffle_block: int = SHUFFLE_BLOCK,
        size_key: str = "policy.train_global_batch_size",
    ) -> None:
        self.streams = list(streams)
        self.num_prompts_per_step = num_prompts_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.shuffle_block = shuffle_block
        self.size_key = size_key
        self.epoch = 0
        self.batches_done = 0  # of the current epoch
        self._block = _Place()  # the block of the row that was handed out last
        self._position = 0  # rows of it that were handed out

    def __iter__(self) -> Iterator[list[Prompt]]:
        reader = _Reader(self.streams, self._block)
        first, batch = self._position, []
        block_size = self.shuffle_block if self.shuffle else self.num_prompts_per_step
        while True:
            begin, prompts = reader.read(block_size)
            if not prompts:
                break
            order = self._order(begin.block, len(prompts))
            for position in range(first, len(prompts)):
                batch.append(prompts[order[position]])
                if len(batch) == self.num_prompts_per_step:
                    # Only here, so that the state always is the one behind the last batch.
                    self._block, self._position = begin, position + 1
                    self.batches_done += 1
                    yield batch
                    batch = []
            first = 0
        if self.batches_done == 0 and (self.drop_last or not batch):
            raise ValueError(
                f"the streamed training data has {len(batch)} rows, fewer than one step takes: set {self.size_key} "
                f"(now {self.num_prompts_per_step}) to at most that, or repeat the dataset (data.train.repeat)"
            )
        self.epoch, self.batches_done, self._block, self._position = self.epoch + 1, 0, _Place(), 0
        if batch and not self.drop_last:
            yield batch

    def _order(self, block: int, num_rows: int) -> list[int]:
        if not self.shuffle:
            return list(range(num_rows))
        return np.random.default_rng([self.seed, self.epoch, block]).permutation(num_rows).tolist()

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the data, for checkpoints: per stream its name, repeat, and a hash of its first 100 rows."""
        return {
            stream.name: {
                "repeat": stream.repeat,
                "first_rows_hash": rows_digest(islice(stream.open_rows(), NUM_HASHED_ROWS)),
            }
            for stream in self.streams
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the source is and what decides the order; JSON-able."""
        return {
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "block": asdict(self._block),
            "position": self._position,
            **self._settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: when the settings that decide the order are not those of the state; it lists the differences.
        """
        check_same_order(state, self._settings())
        self.epoch = int(state["epoch"])
        self.batches_done = int(state["batches_done"])
        self._block = _Place(**state["block"])
        self._position = int(state["position"])

    def _settings(self) -> Mapping[str, Any]:
        return {
            "streams": [f"{stream.name} x {stream.repeat}" for stream in self.streams],
            "num_prompts_per_step": self.num_prompts_per_step,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "shuffle_block": self.shuffle_block,
        }

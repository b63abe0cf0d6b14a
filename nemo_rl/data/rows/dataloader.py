"""Prompts in batches, in an order that depends on seed and epoch alone and resumes exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from nemo_rl.data.interfaces import Row, Rows
from nemo_rl.data.rows.mixing import MixedOrder
from nemo_rl.types import Prompt

MAX_HASHED_ROWS = 10_000


class PromptSource(Protocol):
    """Batches of prompts, epoch after epoch, from a place that can be saved.

    Iterating yields the rest of the current epoch and moves to the next. What was yielded counts as consumed: after
    each batch, `state_dict` is that of a source whose next batch is the one behind it.
    """

    @property
    def epoch(self) -> int:
        """Passes over the data that are behind us."""
        ...

    @property
    def batches_done(self) -> int:
        """Of the current epoch."""
        ...

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch; None where only reading all of it would tell."""
        ...

    def __iter__(self) -> Iterator[list[Prompt]]: ...

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the data, for checkpoints; JSON-able."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the source is and what decides the order; JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; ValueError when the settings that decide the order are others."""
        ...


def check_same_order(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError, listing the differences, when a setting that decides the order is not what was saved."""
    differences = [f"{k}: was {saved.get(k)}, now {v}" for k, v in now.items() if saved.get(k) != v]
    if differences:
        raise ValueError(
            "the saved place in the data cannot be continued, the data or its order changed: "
            + "; ".join(differences)
            + ". Restore these settings, or start a new run in another checkpoint directory"
        )


def rows_digest(rows: Iterator[Row]) -> str:
    """16 hexadecimal digits over the content of rows, in their order."""
    digest = xxhash.xxh64()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str, ensure_ascii=False).encode())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class NamedRows:
    """Rows under a name (unique among the datasets of a run, part of every prompt id) and the task they belong to."""

    name: str
    task_name: str
    rows: Rows
    repeat: int = 1
    weight: float | None = None  # of its prompts among those of all datasets; None: as many as it has

    def __len__(self) -> int:
        return len(self.rows) * self.repeat


class PromptDataset:
    """Several named datasets, one after another, as a sequence of prompts."""

    def __init__(self, parts: Sequence[NamedRows]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    @property
    def weights(self) -> list[float] | None:
        """One per part; None where parts are as likely as they are long."""
        weights = [part.weight for part in self.parts if part.weight is not None]
        assert len(weights) in (0, len(self.parts)), "weights for all parts or for none"
        return weights or None

    @property
    def task_names(self) -> list[str]:
        """The tasks of its parts, each once."""
        return list(dict.fromkeys(part.task_name for part in self.parts))

    def start_of(self, number: int) -> int:
        """The index of the first prompt of a part."""
        return int(self._ends[number - 1]) if number else 0

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        part = self.parts[number]
        offset = index - self.start_of(number)
        repetition, row_index = divmod(offset, len(part.rows))
        prompt_id = f"{part.name}:{row_index}" + (f"/{repetition}" if repetition else "")
        return Prompt(prompt_id=prompt_id, row=part.rows[row_index], idx=index, task_name=part.task_name)

    def fingerprint(self) -> dict[str, Any]:
        """What makes this the same data: per dataset its name, number of rows, repeat, and a hash of the rows.

        All rows are hashed up to 10,000; of larger datasets, 10,000 spread evenly.
        """
        return {part.name: _identity(part) for part in self.parts}


def _identity(part: NamedRows) -> dict[str, Any]:
    count = len(part.rows)
    indices = np.linspace(0, count - 1, min(count, MAX_HASHED_ROWS)).round().astype(int)
    return {
        "num_rows": count,
        "repeat": part.repeat,
        "hash": rows_digest(part.rows[int(index)] for index in indices),
    }


class PromptDataLoader:
    """The `PromptSource` of data with a length: batches of `num_prompts_per_step` prompts.

    `drop_last` leaves out the incomplete batch at the end of an epoch. `size_key` is the key of the configuration that
    sets the size of a batch, for messages.

    Where parts of the dataset have weights, every batch is shared out by them (see `mixing.py`). An epoch is then as
    many prompts as without weights, and the passes over each part go on over its end: a part with more weight than rows
    comes more than once in an epoch, another one not whole.

    Raises:
        ValueError: when the dataset is empty, or smaller than one batch with `drop_last`.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        num_prompts_per_step: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = True,
        size_key: str = "grpo.num_prompts_per_step",
    ) -> None:
        if len(dataset) == 0:
            raise ValueError("the dataset is empty: there is no prompt in it")
        if drop_last and len(dataset) < num_prompts_per_step:
            raise ValueError(
                f"the training data has {len(dataset)} prompts, fewer than one step takes: set "
                f"{size_key} (now {num_prompts_per_step}) to at most {len(dataset)}, or repeat the dataset "
                "(data.train.repeat)"
            )
        self.dataset = dataset
        self.num_prompts_per_step = num_prompts_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.batches_done = 0  # of the current epoch
        self.mixed: MixedOrder | None = None
        if dataset.weights is not None:
            lengths = [len(part) for part in dataset.parts]
            self.mixed = MixedOrder(lengths, dataset.weights, shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.dataset), self.num_prompts_per_step)
        return full if self.drop_last else full + (rest > 0)

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch."""
        return len(self)

    def __iter__(self) -> Iterator[list[Prompt]]:
        order = self._order(self.epoch) if self.mixed is None else None
        while self.batches_done < len(self):
            batch = [self.dataset[index] for index in self._next_indices(order)]
            self.batches_done += 1
            if self.batches_done == len(self):
                self.epoch, self.batches_done = self.epoch + 1, 0
                yield batch
                return
            yield batch

    def _next_indices(self, order: np.ndarray | None) -> list[int]:
        """Of the next batch in the dataset; `order` is that of an epoch without weights."""
        start = self.batches_done * self.num_prompts_per_step
        end = start + self.num_prompts_per_step
        if self.mixed is None:
            assert order is not None
            return [int(index) for index in order[start:end]]
        per_epoch = len(self.dataset)
        if self.drop_last:
            per_epoch -= per_epoch % self.num_prompts_per_step
        positions = range(self.epoch * per_epoch + start, self.epoch * per_epoch + min(end, per_epoch))
        rows = [self.mixed.row(position) for position in positions]
        return [self.dataset.start_of(number) + index for number, index in rows]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the data, for checkpoints; see `PromptDataset.fingerprint`."""
        return self.dataset.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is and what decides the order; JSON-able."""
        return {"epoch": self.epoch, "batches_done": self.batches_done, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: when the settings that decide the order are not those of the state; it lists the differences.
        """
        check_same_order(state, self._settings())
        self.epoch = int(state["epoch"])
        self.batches_done = int(state["batches_done"])

    def _settings(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self.dataset),
            "num_prompts_per_step": self.num_prompts_per_step,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "weights": self.mixed.weights if self.mixed is not None else None,
        }

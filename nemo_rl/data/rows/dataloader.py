"""Rows -> batches of prompts, in an order that depends on seed and epoch alone and resumes exactly.

Where datasets have weights, position p = 0, 1, 2, ... counts the prompts of a run. With shares s_i that add up to 1,
dataset i has within one of s_i * p of the first p prompts, for every p. So any n consecutive prompts hold within two of
s_i * n from it, and a batch holds exactly its share wherever that is a whole number. The schedule is R. Tijdeman, "The
chairman assignment problem", Discrete Mathematics 32 (1980).
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from nemo_rl.data.chat.images import image_digest, read_image
from nemo_rl.data.config import whole_weights
from nemo_rl.data.interfaces import Row, Rows
from nemo_rl.types import Prompt
from nemo_rl.utils.registry import import_object

MAX_HASHED_ROWS = 10_000
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # in the text of an object: its place in memory


class PromptSource(ABC):
    """Batches of `num_prompts_per_step` prompts, epoch after epoch, with a position that can be saved.

    Iterating yields the rest of the current epoch and moves to the next epoch. A yielded batch counts as consumed:
    after it, `state_dict` describes a source whose next batch is the following one.

    `drop_last` omits the incomplete batch at the end of an epoch. `size_key` is the configuration key of the batch
    size, for messages.
    """

    num_batches: int | None = None
    """Batches in an epoch; None for a stream, whose length is not known."""

    def __init__(
        self,
        num_prompts_per_step: int,
        *,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = True,
        size_key: str = "policy.train_global_batch_size",
        **order: Any,
    ) -> None:
        self.num_prompts_per_step = num_prompts_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.size_key = size_key
        self.epoch = 0  # completed passes over the data
        self.batches_done = 0  # batches of the current epoch that were yielded
        # Everything that determines the order of prompts.
        size = {"num_prompts_per_step": num_prompts_per_step}
        self._settings = {**order, **size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}

    @abstractmethod
    def __iter__(self) -> Iterator[list[Prompt]]: ...

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Identity of the data, for checkpoints; JSON-able."""

    def state_dict(self) -> dict[str, Any]:
        """The position and the settings that determine the order; JSON-able."""
        return {"epoch": self.epoch, "batches_done": self.batches_done, **self._settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises ValueError if a setting that determines the order has changed; it lists the differences.
        """
        changed = [f"{k}: was {state.get(k)}, now {v}" for k, v in self._settings.items() if state.get(k) != v]
        if changed:
            raise ValueError(
                "the saved position in the data cannot be continued, the data or its order changed: "
                + "; ".join(changed)
                + ". Restore these settings, or start a new run in another checkpoint directory"
            )
        self.epoch = int(state["epoch"])
        self.batches_done = int(state["batches_done"])


def rows_digest(rows: Iterator[Row]) -> str:
    """A hash of the rows' content, in their order: 16 hexadecimal digits."""
    digest = xxhash.xxh64()
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=_text_of, ensure_ascii=False)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _text_of(value: Any) -> str:
    """A value that JSON lacks, as a text that is the same in every process: of an image its pixels, no address."""
    from PIL import Image

    return image_digest(read_image(value)) if isinstance(value, Image.Image) else _ADDRESS.sub("", str(value))


@dataclass(frozen=True, kw_only=True)
class NamedRows:
    """Rows under a name (unique among the datasets of a run, part of every prompt id) and the task they belong to."""

    name: str
    task_name: str
    rows: Rows
    repeat: int = 1
    weight: float | None = None  # share of the prompts, relative to the other datasets; None: its number of rows

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
    def task_names(self) -> list[str]:
        """The tasks of the parts, each once."""
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

    def first(self, num: int) -> list[Prompt]:
        """At most `num` prompts: the first ones of each part, equally many of each as far as they last."""
        in_turn = sorted((i, number) for number, part in enumerate(self.parts) for i in range(min(num, len(part))))
        return [self[self.start_of(number) + i] for number, i in sorted((number, i) for i, number in in_turn[:num])]

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the data: per dataset its name, number of rows, repeat, and a hash of the rows.

        All rows are hashed up to 10,000; of larger datasets, 10,000 spread evenly.
        """
        identity = {}
        for part in self.parts:
            count = len(part.rows)
            indices = np.linspace(0, count - 1, min(count, MAX_HASHED_ROWS)).round().astype(int)
            digest = rows_digest(part.rows[int(index)] for index in indices)
            identity[part.name] = {"num_rows": count, "repeat": part.repeat, "hash": digest}
        return identity


class PromptDataLoader(PromptSource):
    """Prompts of a dataset with a length.

    If parts of the dataset have weights, every batch is divided by them (`MixedOrder`). An epoch has as many prompts as
    without weights, and the passes over each part continue across epochs: a part with a large weight and few rows is
    read more than once in an epoch, another part not completely. `options` are arguments of `PromptSource`. Raises
    ValueError if the dataset is empty, or smaller than one batch with `drop_last`.
    """

    def __init__(self, dataset: PromptDataset, num_prompts_per_step: int, **options: Any) -> None:
        weights = [part.weight for part in dataset.parts if part.weight is not None]
        assert len(weights) in (0, len(dataset.parts)), "weights for all parts or for none"
        whole = whole_weights(weights) if weights else None
        own = None if type(self) is PromptDataLoader else f"{type(self).__module__}:{type(self).__qualname__}"
        order = {"num_prompts": len(dataset), "weights": whole, "custom_dataloader": own}
        super().__init__(num_prompts_per_step, **options, **order)
        if len(dataset) == 0:
            raise ValueError("the dataset is empty: there is no prompt in it")
        if self.drop_last and len(dataset) < num_prompts_per_step:
            raise ValueError(
                f"the training data has {len(dataset)} prompts, fewer than one step takes: set "
                f"{self.size_key} (now {num_prompts_per_step}) to at most {len(dataset)}, or repeat the dataset "
                "(data.train.repeat)"
            )
        self.dataset = dataset
        full, rest = divmod(len(dataset), num_prompts_per_step)
        self.num_batches: int = full if self.drop_last else full + (rest > 0)
        lengths = [len(part) for part in dataset.parts]
        self.mixed = MixedOrder(lengths, whole, shuffle=self.shuffle, seed=self.seed) if whole else None

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[Prompt]]:
        size, per_epoch = self.num_prompts_per_step, len(self.dataset)
        if self.drop_last:
            per_epoch -= per_epoch % size
        order = self.order()
        while self.batches_done < len(self):
            positions = range(self.batches_done * size, min((self.batches_done + 1) * size, per_epoch))
            if self.mixed is None:
                batch = [self.dataset[int(order[position])] for position in positions]
            else:
                rows = [self.mixed.row(self.epoch * per_epoch + position) for position in positions]
                batch = [self.dataset[self.dataset.start_of(number) + index] for number, index in rows]
            self.batches_done += 1
            is_last = self.batches_done == len(self)
            if is_last:
                self.epoch, self.batches_done = self.epoch + 1, 0
            yield batch
            if is_last:
                return

    def order(self) -> np.ndarray:
        """Numbers of the prompts in the order of this epoch, int64 [len(dataset)]; unused where parts have weights.

        A subclass may choose another one, from `dataset`, `seed` and `epoch` alone, so that a resumed run continues it.
        """
        if self.shuffle:
            return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))
        return np.arange(len(self.dataset))

    def fingerprint(self) -> dict[str, Any]:
        return self.dataset.fingerprint()


def prompt_loader(path: str | None, dataset: PromptDataset, num_prompts: int, **options: Any) -> PromptDataLoader:
    """`PromptDataLoader`, or what `path`, the value of `data.custom_dataloader`, makes of the same arguments.

    Raises ValueError if it cannot be imported, or does not make a `PromptDataLoader`.
    """
    if path is None:
        return PromptDataLoader(dataset, num_prompts, **options)
    loader = import_object(path, "data.custom_dataloader")(dataset, num_prompts, **options)
    if not isinstance(loader, PromptDataLoader):
        raise ValueError(
            f"data.custom_dataloader={path!r} made a {type(loader).__name__}; it must make a subclass of "
            "nemo_rl.data.rows.dataloader.PromptDataLoader, whose position a checkpoint keeps"
        )
    return loader


def schedule(weights: Sequence[int]) -> np.ndarray:
    """Dataset numbers, int16 [sum(weights)], one for each position; the schedule then repeats.

    Each position goes to the dataset with the earliest deadline among those that lag far enough behind their share
    (Tijdeman 1980): this keeps every dataset within one prompt of its share at every position.
    """
    total, count = sum(weights), len(weights)
    order = np.zeros(total, dtype=np.int16)
    if count == 1:
        return order
    # The algorithm compares fractions. All of them are multiplied by total * scale, so that integers stay exact.
    scale = 2 * count - 2
    taken = [0] * count
    for position in range(total):
        best, best_due = -1, 0  # deadlines are compared as due / weight
        for i, weight in enumerate(weights):
            lag = weight * (position + 1) - taken[i] * total
            if scale * lag < total:  # below 1 / scale prompts: choosing it now would take it too far ahead
                continue
            due = scale - 1 + scale * taken[i]
            if best < 0 or due * weights[best] < best_due * weight:
                best, best_due = i, due
        assert best >= 0
        taken[best] += 1
        order[position] = best
    assert taken == list(weights)
    return order


class MixedOrder:
    """Positions of a run -> (dataset, row), without state: every position is the same after a restart.

    The order depends on seed, weights and lengths alone. Each dataset is read in passes, each pass a permutation of its
    rows, whatever the other datasets do. Without `shuffle`, passes are in the order of the rows.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[int], *, shuffle: bool, seed: int) -> None:
        self.lengths = list(lengths)
        self.weights = list(weights)
        self.shuffle = shuffle
        self.seed = seed
        self._permutation = lru_cache(maxsize=2 * len(self.lengths))(self._make_permutation)
        self._period = schedule(self.weights)
        # How many prompts of its own dataset precede each position of the schedule.
        self._taken_before = np.zeros(len(self._period), dtype=np.int32)
        for i, weight in enumerate(self.weights):
            self._taken_before[self._period == i] = np.arange(weight)

    def row(self, position: int) -> tuple[int, int]:
        """(number of the dataset, index of its row)."""
        rounds, offset = divmod(position, len(self._period))
        number = int(self._period[offset])
        taken = rounds * self.weights[number] + int(self._taken_before[offset])
        pass_number, index = divmod(taken, self.lengths[number])
        return number, int(self._permutation(number, pass_number)[index])

    def _make_permutation(self, number: int, pass_number: int) -> np.ndarray:
        rows = np.arange(self.lengths[number])
        return np.random.default_rng([self.seed, number, pass_number]).permutation(rows) if self.shuffle else rows

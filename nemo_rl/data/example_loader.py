"""Batches of tokenised rows, made one batch ahead of the training, in an order that resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl.data.dataloader import PromptSource
from nemo_rl.types import ExampleHandle, Prompt


class ExamplePool(Protocol):
    """Who tokenises: `start` returns at once, `finish` waits for what `start` began."""

    def start(self, prompts: Sequence[Prompt]) -> Any: ...

    def finish(self, pending: Any) -> list[ExampleHandle]:
        """The rows of all prompts, in the order of the prompts."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    """A batch that is being made, and the source's state behind it."""

    pending: Any
    state: dict[str, Any]


class ExampleLoader:
    """Batches of a `PromptSource` as handles to tokenised rows, for `max_num_epochs` epochs.

    While one batch trains, the next is tokenised. `state_dict` knows nothing of that: it is the state behind the last
    batch that `next` returned. The source belongs to the loader alone.
    """

    def __init__(self, prompts: PromptSource, pool: ExamplePool, *, max_num_epochs: int) -> None:
        self.prompts = prompts
        self.pool = pool
        self.max_num_epochs = max_num_epochs
        self._state = prompts.state_dict()
        self._batches = self._remaining()
        self._ahead: _Ahead | None = None

    def next(self) -> list[ExampleHandle] | None:
        """The next batch; None after the last epoch. An error leaves the loader behind the last batch returned."""
        ahead = self._ahead if self._ahead is not None else self._start()
        if ahead is None:
            return None
        try:
            handles = self.pool.finish(ahead.pending)
            following = self._start()
        except BaseException:
            self.load_state_dict(self._state)
            raise
        self._state, self._ahead = ahead.state, following
        return handles

    def _start(self) -> _Ahead | None:
        prompts = next(self._batches, None)
        if prompts is None:
            return None
        return _Ahead(pending=self.pool.start(prompts), state=self.prompts.state_dict())

    def _remaining(self) -> Iterator[list[Prompt]]:
        while self.prompts.epoch < self.max_num_epochs:
            yield from self.prompts

    def state_dict(self) -> dict[str, Any]:
        """The state of the source behind the last batch that `next` returned; JSON-able."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. What was tokenised ahead is dropped.

        Raises:
            ValueError: when the settings that decide the order are not those of the state.
        """
        self.prompts.load_state_dict(state)
        self._state = state
        self._batches = self._remaining()
        self._ahead = None

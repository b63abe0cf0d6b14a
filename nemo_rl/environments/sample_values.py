"""Numbers that an environment finds in a step and reports later, when the finished samples of a batch are known."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

MAX_REMEMBERED = 200_000  # conversations: more than any step has, and some 100 MB at most


class SampleValues:
    """Remembers named numbers by conversation, the newest `max_remembered` of them.

    The same conversation again replaces what was known of it. What a process knew is gone when it dies.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self.max_remembered = max_remembered
        self._known: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def remember(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, float]) -> None:
        """Keep the numbers of a conversation as a step sees it."""
        key = _digest(messages)
        self._known[key] = dict(values)
        self._known.move_to_end(key)
        while len(self._known) > self.max_remembered:
            self._known.popitem(last=False)

    def of(self, logs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, float] | None]:
        """The numbers of finished conversations (`batch["message_log"]`); None where nothing is known."""
        return [self._known.get(_digest(log)) for log in logs]

    def means(self, logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
        """The mean of each number over the conversations of which it is known."""
        found: dict[str, list[float]] = {}
        for values in self.of(logs):
            for name, value in (values or {}).items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}


def _digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    said = [[message["role"], message["content"]] for message in messages]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()

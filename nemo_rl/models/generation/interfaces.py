"""What the rest of the library knows of generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TENANT = "generation"
"""Its name at the accelerator."""


@dataclass
class DraftCounts:
    """What became of the drafts of speculative decoding."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._combined(other, 1)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return self._combined(other, -1)

    def _combined(self, other: DraftCounts, sign: int) -> DraftCounts:
        return DraftCounts(
            num_drafts=self.num_drafts + sign * other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + sign * other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + sign * other.num_accepted_tokens,
        )


class EngineDied(RuntimeError):
    """The engine process of a generation worker is gone. The worker must be restarted and given the weights again."""


class GenerationInterface(ABC):
    """Replicas of an engine that completes token sequences.

    Whoever plays episodes hands lists of `GenerationRequest` to `worker.call.remote("submit", requests)` on one of
    `workers`, and awaits `worker.call.remote("drain")` for lists of `GenerationAnswer`. Which replica answers, and what
    else it does at that moment, changes nothing in a completion. `"abort"` with request ids stops sampling for requests
    that nobody waits for any more; `"check_health"` answers while the engine does anything else.

    A sync of weights is `init_weight_transfer` once, then `start_weight_update`, one `receive_bucket_async` per bucket,
    `finish_weight_update`.
    """

    @property
    @abstractmethod
    def workers(self) -> list[Any]:
        """Actor handles, one per data-parallel replica."""

    @property
    @abstractmethod
    def name_prefix(self) -> str:
        """What the names of its workers begin with; errors name workers."""

    @property
    @abstractmethod
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""

    @abstractmethod
    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Tell every engine where the weights will lie; the keys are those of the transport. Again when one is new."""

    @abstractmethod
    def start_weight_update(self, *, clear_cache: bool = True) -> None:
        """Stop sampling and make ready for buckets. Requests under way wait and then go on with the new weights.

        With `clear_cache` their KV cache is computed anew with the new weights; otherwise they keep it. Requests that
        begin later never use what was computed with the old ones.
        """

    @abstractmethod
    def receive_bucket_async(self, info: dict[str, Any], *, turn: int) -> list[Any]:
        """Begin to read one bucket on every replica; one future per replica, for `wait`.

        `turn` counts the buckets of a sync from 0: they are read in this order, whatever order calls arrive in.
        """

    @abstractmethod
    def wait(self, futures: Sequence[Any]) -> None:
        """Wait for what `receive_bucket_async` returned."""

    @abstractmethod
    def finish_weight_update(self, version: int) -> None:
        """Make the new weights valid as `version` (stamped on every later request) and sample again."""

    @abstractmethod
    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Bring onto the device what is off it: "weights", "kv_cache", or both (None)."""

    @abstractmethod
    def offload(self) -> None:
        """Free the device. No request may be under way."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget the KV cache of finished requests."""

    @abstractmethod
    def dead_workers(self) -> list[int]:
        """Replicas whose process or engine is gone."""

    @abstractmethod
    def abandon_requests(self) -> None:
        """Forget the requests under way on every replica."""

    @abstractmethod
    def restart_worker(self, index: int) -> None:
        """End replica `index`, dead or alive, and start it anew. It holds no weights until the next sync."""

    @abstractmethod
    def num_generated_tokens(self) -> int:
        """Tokens sampled by all replicas since they were started."""

    def draft_counts(self) -> DraftCounts:
        """What became of drafts since the replicas were started; nothing without speculative decoding."""
        return DraftCounts()

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and their engines. May be called again."""

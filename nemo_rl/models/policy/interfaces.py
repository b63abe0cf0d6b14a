"""The interface of a policy's workers: what the controller calls in their processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.settings import SampleSettings
from nemo_rl.types import ExampleGroup, LossFunction, RankPlan, RolloutGroup, RowKey, TokenAdvantages, TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest

T = TypeVar("T")


class PolicyWorkerInterface(ABC):
    """One rank of a policy. Every method is a collective: all ranks call it in the same order.

    One step: `load`, then the logprob passes, then `train`. `Policy` calls all ranks as one.
    """

    # -- residency

    @abstractmethod
    def offload(self, *, with_weights: bool = True) -> None:
        """Move optimizer state and, unless a refit follows, weights to the host, which frees the device."""

    @abstractmethod
    def onload(self, *, with_optimizer: bool) -> None:
        """Move weights, and optimizer state if it will be used, back to the device."""

    @abstractmethod
    def device_name(self) -> str:
        """The vendor's name of the device."""

    # -- rows of the step

    @abstractmethod
    def load(
        self, plan: RankPlan, places: Mapping[int, tuple[int, int]], *stored: Sequence[RolloutGroup | ExampleGroup]
    ) -> None:
        """Take the rows of `plan`. `places`: number of a group -> (number of its list among `stored`, place in it)."""

    @abstractmethod
    def keep_samples(self, settings: SampleSettings) -> None:
        """From the next `load` on, keep the values that `write_samples` writes of the reported rows."""

    @abstractmethod
    def write_samples(self, step: int) -> str | None:
        """Write the reported rows of the loaded plan. Returns why it cannot be done."""

    @abstractmethod
    def compute(self, task: HeadTask, column: str) -> None:
        """Fill `column` of every row with the output of `task` for its tokens, [T] or [T, C], under current weights."""

    @abstractmethod
    def compute_reference_logprobs(self) -> None:
        """Fill `reference_policy_logprobs` of every row; temperature is applied, top-k and top-p are not."""

    @abstractmethod
    def sum_column(self, column: str, total: str) -> dict[RowKey, float]:
        """See `Policy.sum_column`. The result is empty on all but one of the ranks that have the same rows."""

    @abstractmethod
    def share(self, column: str) -> dict[RowKey, Any]:
        """See `Policy.share`. The result is empty on all but one of the ranks that have the same rows."""

    @abstractmethod
    def attach(self, column: str, keys: list[RowKey], *values: np.ndarray) -> None:
        """Fill `column` of the rows `keys` with values that another group shared."""

    @abstractmethod
    def mask_sequences_by_importance(self, threshold: float) -> dict[str, float]:
        """See `Policy.mask_sequences_by_importance`."""

    @abstractmethod
    def set_token_advantages(self, advantages: TokenAdvantages) -> None:
        """See `TokenAdvantages`. Statistics are computed over all ranks."""

    @abstractmethod
    def inspect(self, function: Callable[..., T], *args: Any) -> T:
        """See `Policy.inspect`."""

    # -- training

    @abstractmethod
    def train(self, loss_fn: LossFunction, task: HeadTask, is_last_pass: bool = True) -> TrainResult:
        """Take the optimizer steps of the loaded plan, in order. The loss gets the output of `task` for each token.

        `is_last_pass`: of the training step, which may have several over one plan.
        """

    @abstractmethod
    def evaluate(self, loss_fn: LossFunction, task: HeadTask) -> dict[str, float]:
        """Metrics of the loaded plan, which has one optimizer step, without gradients. `loss` is one of them."""

    # -- checkpoints

    @abstractmethod
    def sees(self, file: Path) -> bool:
        """Whether the file exists on this node, for `require_shared`."""

    @abstractmethod
    def save_checkpoint(self, directory: Path, request: SaveRequest) -> None:
        """Write this rank's part under `directory/<folder>`, and its random generators under `directory/rng`.

        With `request.in_background`, `finish_save_checkpoint` waits for weights and optimizer.
        """

    @abstractmethod
    async def finish_save_checkpoint(self) -> None:
        """Wait for the background save, while the worker does other work. Raises its errors."""

    @abstractmethod
    def inspect_weights(self) -> None:
        """Raises RuntimeError if weights of this rank are not finite."""

    @abstractmethod
    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        """Inverse of `save_checkpoint`. Random generators are restored if this rank existed in the saving run."""

    # -- refit

    @abstractmethod
    def prepare_refit(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build a sender in place of the previous one. Returns its layout and buffer handles."""

    @abstractmethod
    def pack(self, bucket: int) -> dict[str, Any]:
        """Fill bucket number `bucket`. Collective: sharded parameters are gathered."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free transfer buffers and leave the process group."""

"""One micro-batch as the model sees it: which tokens, at which positions, attending to which, scored where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from nemo_rl.models.policy.attention import Segments


@dataclass(frozen=True, kw_only=True)
class ModelBatch:
    """Input of `LogprobModel`. R x W is the physical layout, B x S that of the losses (right-padded, S the longest).

    Padded layout: R = B, `segments` None. Padding-free layout: R = 1 and the sequences lie end to end, kept apart by
    `segments`. With context parallelism the positions of this rank only. N are the scored tokens of this rank.
    """

    input_ids: torch.Tensor  # int64 [R, W]
    position_ids: torch.Tensor  # int64 [R, W]; begins at 0 for every sequence
    is_token: torch.Tensor  # bool [R, W]; False on padding
    segments: Segments | None
    states: torch.Tensor  # int64 [N]; flat position in R x W of the hidden state that the token is judged from
    targets: torch.Tensor  # int64 [N]; the token
    rows: torch.Tensor  # int64 [N]; where its logprob stands in B x S
    positions: torch.Tensor  # int64 [N]
    shape: tuple[int, int]  # B, S
    columns: dict[str, torch.Tensor] = field(default_factory=dict)  # [N, ...]; what a head needs of each scored token
    routed_experts: torch.Tensor | None = None  # int16 [R, W, layers, K]; those to take, -1 where the router chooses

    def to(self, device: torch.device) -> ModelBatch:
        """A copy on `device`; from pinned memory it does not wait."""
        return self._moved(lambda tensors: tensors.to(device, non_blocking=True))

    def pin_memory(self) -> ModelBatch:
        """A copy in page-locked memory, from where `to` does not wait."""
        return self._moved(lambda tensors: tensors.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> ModelBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: move(value) for name, value in values.items() if isinstance(value, torch.Tensor | Segments)}
        columns = {name: move(value) for name, value in self.columns.items()}
        return replace(self, **moved, columns=columns)

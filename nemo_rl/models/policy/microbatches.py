"""Rows of the object store -> micro-batches for the model and for the loss.

A `Row` is what a policy worker keeps of one sample during one step: the tokens it fetched and the logprobs it computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nemo_rl.types import LossInputs, MicroBatch, PlannedSample, RankPlan, RolloutGroup


@dataclass(kw_only=True)
class Row:
    """One sample on its policy worker. Tensors are CPU, [T]."""

    sample_id: str
    token_ids: torch.Tensor  # int64
    token_mask: torch.Tensor  # bool; True on tokens the policy sampled
    generation_logprobs: torch.Tensor  # float32
    advantages: torch.Tensor  # float32; one value per token
    mask: float  # 0.0: carries no gradient
    prev_logprobs: torch.Tensor | None = None
    reference_policy_logprobs: torch.Tensor | None = None


RowKey = tuple[int, int]
"""(number of the group in the plan, index of the sample in it)."""


def key_of(planned: PlannedSample) -> RowKey:
    return planned.group, planned.index


def rows_of_plan(plan: RankPlan, groups: dict[int, RolloutGroup]) -> dict[RowKey, Row]:
    """The rows this rank owns. `groups`: number in the plan -> fetched group."""
    rows = {}
    for planned in (planned for batch in plan.logprobs for planned in batch):
        sample = groups[planned.group].samples[planned.index]
        mask = torch.from_numpy(sample.token_mask.copy())
        rows[key_of(planned)] = Row(
            sample_id=sample.meta.sample_id,
            token_ids=torch.from_numpy(sample.token_ids.copy()),
            token_mask=mask,
            generation_logprobs=torch.from_numpy(sample.generation_logprobs.copy()),
            advantages=torch.full(mask.shape, planned.advantage, dtype=torch.float32),
            mask=planned.mask,
        )
    return rows


def pad(tensors: list[torch.Tensor], length: int) -> torch.Tensor:
    """Right-pad 1-D tensors with zeros to [B, length]."""
    out = torch.zeros(len(tensors), length, dtype=tensors[0].dtype)
    for row, tensor in enumerate(tensors):
        out[row, : len(tensor)] = tensor
    return out


def scored_sequences(rows: Sequence[Row]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, mask of the tokens to score) of each row, as a `RowLayout` takes them."""
    return [(row.token_ids, row.token_mask) for row in rows]


def loss_inputs(rows: Sequence[Row], device: torch.device) -> LossInputs:
    """One micro-batch as a loss sees it, [B, longest row]. Logprobs that were not computed are zeros."""
    width = max(len(row.token_ids) for row in rows)

    def padded(
        name: Literal["generation_logprobs", "advantages", "prev_logprobs", "reference_policy_logprobs"],
    ) -> torch.Tensor:
        values = [getattr(row, name) for row in rows]
        values = [torch.zeros(len(row.token_ids)) if v is None else v for row, v in zip(rows, values, strict=True)]
        return moved(pad(values, width))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        # From pageable memory the copy would wait for the forward pass that is under way.
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    return LossInputs(
        input_ids=moved(pad([row.token_ids for row in rows], width)),
        token_mask=moved(pad([row.token_mask for row in rows], width).float()),
        sample_mask=moved(torch.tensor([row.mask for row in rows])),
        advantages=padded("advantages"),
        prev_logprobs=padded("prev_logprobs"),
        generation_logprobs=padded("generation_logprobs"),
        reference_policy_logprobs=padded("reference_policy_logprobs"),
    )


def select(rows: dict[RowKey, Row], batch: MicroBatch) -> list[Row]:
    return [rows[key_of(planned)] for planned in batch]

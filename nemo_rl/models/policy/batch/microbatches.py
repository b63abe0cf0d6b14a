"""Rows of the object store -> micro-batches for the model and for the loss.

A `Row` is what a policy worker keeps of one sample during one step: the tokens it fetched and what it computed of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.types import (
    Example,
    ExampleGroup,
    LossInputs,
    LossMetrics,
    MicroBatch,
    PlannedSample,
    RankPlan,
    RolloutGroup,
    Sample,
)

# -- Adding up what losses report, over micro-batches, ranks and optimizer steps.


def reduction_of(name: str) -> str:
    """`min`, `max` or `sum`, by the suffix of the name (see `LossMetrics`)."""
    for suffix in ("min", "max"):
        if name.endswith("_" + suffix):
            return suffix
    return "sum"


COUNTS = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "num_unmasked_tokens")

_COMBINE = {"min": torch.amin, "max": torch.amax, "sum": torch.sum}
_COLLECTIVE = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


def reduce_micro_batches(parts: Sequence[LossMetrics]) -> LossMetrics:
    """One value per name from those of all micro-batches of a rank."""
    return {
        name: _COMBINE[reduction_of(name)](torch.stack([p[name].float() for p in parts]), dim=0) for name in parts[0]
    }


def all_reduce(metrics: LossMetrics, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """The same over ranks: three collectives, whatever the number of metrics."""
    out: dict[str, float] = {}
    for how, op in _COLLECTIVE.items():
        names = [name for name in metrics if reduction_of(name) == how]
        if not names:
            continue
        values = torch.stack([metrics[name].double() for name in names])
        dist.all_reduce(values, op=op, group=group)
        out.update(zip(names, values.tolist(), strict=True))
    return out


def reduce_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One value per name over the steps of a `train` call: counts add up, means are averaged, else min or max."""
    out = {}
    for name in steps[0] if steps else ():
        values = [step[name] for step in steps]
        if name in COUNTS:
            out[name] = sum(values)
        else:
            out[name] = {"min": min, "max": max, "sum": lambda v: sum(v) / len(v)}[reduction_of(name)](values)
    return out


InputsT = TypeVar("InputsT", bound=LossInputs)


@dataclass(kw_only=True)
class Row:
    """One sequence on its policy worker. Tensors are CPU.

    `columns` hold a number per token [T], several [T, C], or one for the sequence (0-d): float32, or int64 for token
    ids. Losses name those they need (`LossFunction.inputs_type`).
    """

    sample_id: str
    token_ids: torch.Tensor  # int64 [T]
    token_mask: torch.Tensor  # bool [T]; True on tokens that carry loss
    mask: float  # 0.0: carries no gradient
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    routed_experts: torch.Tensor | None = None  # uint8 or int16 [at most T, layers, K]; see `Sample`


RowKey = tuple[int, int]
"""(number of the group in the plan, index of the sample in it)."""


def keys_of(planned: PlannedSample) -> list[RowKey]:
    """The rows of a planned sample: one, or the two of a pair."""
    return [(planned.group, planned.index + number) for number in range(len(planned.lengths))]


def rows_of_plan(plan: RankPlan, groups: Mapping[int, RolloutGroup | ExampleGroup]) -> dict[RowKey, Row]:
    """The rows this rank owns. `groups`: number in the plan -> fetched group."""
    rows = {}
    for planned in (planned for batch in plan.logprobs for planned in batch):
        for group, index in keys_of(planned):
            sample = groups[group].samples[index]
            rows[group, index] = Row(
                sample_id=sample.sample_id,
                token_ids=torch.from_numpy(sample.token_ids.astype(np.int64)),
                token_mask=torch.from_numpy(sample.token_mask.copy()),
                mask=planned.mask,
                columns=_first_columns(sample, planned),
                routed_experts=_routed_experts(sample),
            )
    return rows


def _first_columns(sample: Sample | Example, planned: PlannedSample) -> dict[str, torch.Tensor]:
    if isinstance(sample, Example):
        return {"margin": torch.tensor(sample.margin)}
    return {
        "generation_logprobs": torch.from_numpy(sample.generation_logprobs.copy()),
        "advantages": torch.full(sample.token_mask.shape, planned.advantage, dtype=torch.float32),
    }


def _routed_experts(sample: Sample | Example) -> torch.Tensor | None:
    if isinstance(sample, Example) or sample.routed_experts is None:
        return None
    return torch.from_numpy(sample.routed_experts.copy())


def pad(tensors: list[torch.Tensor], length: int) -> torch.Tensor:
    """Right-pad tensors [T, ...] with zeros to [B, length, ...]."""
    out = torch.zeros(len(tensors), length, *tensors[0].shape[1:], dtype=tensors[0].dtype)
    for row, tensor in enumerate(tensors):
        out[row, : len(tensor)] = tensor
    return out


def scored_sequences(
    rows: Sequence[Row], *, last_token_only: bool, pad_token_id: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, mask of the tokens to score) of each row, as a `RowLayout` takes them.

    `last_token_only`: the last one that is not `pad_token_id`, which is where the classifiers of transformers look;
    it matters where sequences end with the token that is also used for padding.
    """
    if not last_token_only:
        return [(row.token_ids, row.token_mask) for row in rows]
    scored = []
    for row in rows:
        last = torch.zeros(len(row.token_ids), dtype=torch.bool)
        is_text = row.token_ids != pad_token_id if pad_token_id is not None else torch.ones_like(last)
        last[int(is_text.nonzero().max()) if is_text.any() else 0] = True
        scored.append((row.token_ids, last))
    return scored


def loss_inputs(rows: Sequence[Row], inputs_type: type[InputsT], device: torch.device) -> InputsT:
    """One micro-batch as a loss sees it, [B, longest row]."""
    width = max(len(row.token_ids) for row in rows)

    def column(name: str) -> torch.Tensor:
        values = [row.columns[name] for row in rows if name in row.columns]
        if not values:
            assert name in inputs_type.optional, f"{name} was not computed"
            return torch.zeros(len(rows), width)
        assert len(values) == len(rows), f"some rows have no {name}"
        return torch.stack(values) if values[0].ndim == 0 else pad(values, width)

    tensors = {
        "input_ids": pad([row.token_ids for row in rows], width),
        "token_mask": pad([row.token_mask for row in rows], width).float(),
        "sample_mask": torch.tensor([row.mask for row in rows]),
    }
    tensors |= {f.name: column(f.name) for f in fields(inputs_type) if f.name not in tensors}
    # From pageable memory the copy would wait for the forward pass that is under way.
    is_cuda = device.type == "cuda"
    moved = {k: (v.pin_memory() if is_cuda else v).to(device, non_blocking=True) for k, v in tensors.items()}
    return inputs_type(**moved)


def select(rows: dict[RowKey, Row], batch: MicroBatch) -> list[Row]:
    """The rows of a micro-batch in order, the two of a pair next to each other."""
    return [rows[key] for planned in batch for key in keys_of(planned)]


MicroBatchLoss = Callable[[int, torch.Tensor], torch.Tensor]
"""(number of the micro-batch, what the head says with gradient) -> scalar loss, a part of the step's sum."""


class MicroBatchRunner(Protocol):
    """Both methods are collectives over all ranks that work on the same parameters."""

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        """What `task` says of each micro-batch, in order, float32 [B, S] or [B, S, C] on the device, no gradients."""
        ...

    def train(self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters, reduced over ranks once."""
        ...


class SequentialRunner:
    """Every micro-batch goes through the whole model before the next. Waits for the device nowhere.

    `defer_reduction`: gradients stay whole on every rank until the last micro-batch, instead of being reduced to shards
    after each: less traffic, more memory.
    """

    def __init__(
        self, model: LogprobModel, device: torch.device, *, defer_reduction: bool, clear_cache_every: int | None
    ) -> None:
        self.model = model
        self.device = device
        self.defer_reduction = defer_reduction
        self.clear_cache_every = clear_cache_every

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        with torch.no_grad():
            for batch in self._prefetched(batches):
                yield self.model(batch, task)

    def train(self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask) -> None:
        for number, batch in enumerate(self._prefetched(batches)):
            is_last = number == len(batches) - 1
            if self.defer_reduction:
                self.model.set_requires_gradient_sync(is_last)
            else:  # shards of the gradient every time; between copies of the model (HSDP) once
                self.model.set_requires_all_reduce(is_last)
            loss(number, self.model(batch, task)).backward()

    def _prefetched(self, batches: Sequence[ModelBatch]) -> Iterator[ModelBatch]:
        """Batches on the device; the next one is on its way while the present one is computed on."""
        following = batches[0].to(self.device) if batches else None
        for number in range(len(batches)):
            present, following = following, None
            if number + 1 < len(batches):
                following = batches[number + 1].to(self.device)
            assert present is not None
            yield present
            if self.clear_cache_every is not None and (number + 1) % self.clear_cache_every == 0:
                torch.cuda.empty_cache()


def from_last_stage(values: dict[str, float], pipeline: dist.ProcessGroup) -> dict[str, float]:
    """What the last pipeline rank knows, such as metrics of the loss, on all pipeline ranks. Collective."""
    carrier = [values]
    dist.broadcast_object_list(carrier, src=dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline)
    return carrier[0]


def scored_by_last_stage(
    scored: Sequence[torch.Tensor],
    batches: Sequence[ModelBatch],
    task: HeadTask,
    pipeline: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """What `task` says of each micro-batch, in order, on all pipeline ranks. Collective.

    `scored`: on the last of them all of that, [B, S] or [B, S, C] each, elsewhere nothing.
    """
    trailing = () if task.num_values is None else (task.num_values,)
    shapes = [(*batch.shape, *trailing) for batch in batches]
    sizes = [math.prod(shape) for shape in shapes]
    if scored:
        flat = torch.cat([values.flatten() for values in scored])
    else:
        flat = torch.empty(sum(sizes), dtype=task.dtype, device=device)
    dist.broadcast(flat, src=dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline)
    for shape, part in zip(shapes, flat.split(sizes), strict=True):
        yield part.view(shape)

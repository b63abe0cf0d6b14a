"""Rows of the object store -> micro-batches for the model and the loss -> passes through the model -> metrics.

A `LoadedRow` is one sample on a policy worker during one step: the tokens it fetched and the values it computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import islice
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.distributed.errors import UserCodeError
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.types import (
    Example,
    ExampleGroup,
    ImageSpan,
    LossFunction,
    LossInputs,
    LossMetrics,
    MicroBatch,
    Pixels,
    RankPlan,
    RolloutGroup,
    RowKey,
    loss_name,
    reduction_of,
)

# -- rows


@dataclass(kw_only=True)
class LoadedRow:
    """One sequence on its policy worker. Tensors are on the CPU.

    `columns` hold one number per token [T], several [T, C], or one for the sequence (0-d): float32, or int64 for token
    ids. A loss names the columns it needs (`LossFunction.inputs_type`).
    """

    sample_id: str
    token_ids: torch.Tensor  # int64 [T]
    token_mask: torch.Tensor  # bool [T]; True on tokens that carry loss
    mask: float  # 0.0: carries no gradient
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    routed_experts: torch.Tensor | None = None  # uint8 or int16 [at most T, layers, K]; see `Sample`
    images: list[tuple[ImageSpan, Pixels]] = field(default_factory=list)


def select(rows: dict[RowKey, LoadedRow], batch: MicroBatch) -> list[LoadedRow]:
    """The rows of a micro-batch in order, the two of a pair next to each other."""
    return [rows[key] for planned in batch for key in planned.keys]


def rows_of_plan(plan: RankPlan, groups: Mapping[int, RolloutGroup | ExampleGroup]) -> dict[RowKey, LoadedRow]:
    """The rows this rank owns. `groups`: number in the plan -> fetched group."""
    rows = {}
    for planned in (planned for batch in plan.logprobs for planned in batch):
        for group, index in planned.keys:
            sample = groups[group].rows[index]
            rows[group, index] = row = LoadedRow(
                sample_id=sample.sample_id,
                token_ids=torch.from_numpy(sample.token_ids.astype(np.int64)),
                token_mask=torch.from_numpy(sample.token_mask.copy()),
                mask=planned.mask,
                images=[(span, groups[group].pixels[span.digest]) for span in sample.images],
            )
            if isinstance(sample, Example):
                row.columns["margin"] = torch.tensor(sample.margin)
                continue
            row.columns["generation_logprobs"] = torch.from_numpy(sample.generation_logprobs.copy())
            row.columns["advantages"] = torch.full(row.token_mask.shape, planned.advantage, dtype=torch.float32)
            if planned.nll_weight is not None:
                row.columns["nll_weights"] = torch.tensor(planned.nll_weight)
            if planned.reward is not None:
                row.columns["final_reward"] = torch.tensor(planned.reward)
            if sample.routed_experts is not None:
                row.routed_experts = torch.from_numpy(sample.routed_experts.copy())
    return rows


def scored_sequences(
    rows: Sequence[LoadedRow], *, last_token_only: bool, pad_token_id: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, mask of the tokens to score) of each row, as `RowLayout.build` takes them.

    `last_token_only`: score the last token that is not `pad_token_id`, as the classifiers of transformers do. The
    condition matters if sequences end with the token that is also used for padding.
    """
    scored = []
    for row in rows:
        mask = row.token_mask
        if last_token_only:
            is_text = row.token_ids != pad_token_id if pad_token_id is not None else torch.ones_like(mask)
            mask = torch.zeros_like(mask)
            mask[int(is_text.nonzero().max()) if is_text.any() else 0] = True
        scored.append((row.token_ids, mask))
    return scored


def loss_inputs[InputsT: LossInputs](
    rows: Sequence[LoadedRow], inputs_type: type[InputsT], device: torch.device
) -> InputsT:
    """One micro-batch as a loss sees it, [B, longest row]. UserCodeError if it needs a column that no row has."""
    width = max(len(row.token_ids) for row in rows)

    def column(name: str) -> torch.Tensor:
        values = [row.columns[name] for row in rows if name in row.columns]
        if not values:
            if name not in inputs_type.optional:
                raise UserCodeError(
                    f"no row has the column {name!r} that the loss needs ({inputs_type.__name__}): compute or attach "
                    f"it before policy.train, or name it in {inputs_type.__name__}.optional, which makes it zeros"
                )
            return torch.zeros(len(rows), width)
        assert len(values) == len(rows), f"some rows have no {name}"
        return torch.stack(values) if values[0].ndim == 0 else pad_sequence(values, batch_first=True)

    tensors = {
        "input_ids": pad_sequence([row.token_ids for row in rows], batch_first=True),
        "token_mask": pad_sequence([row.token_mask for row in rows], batch_first=True).float(),
        "sample_mask": torch.tensor([row.mask for row in rows]),
    }
    tensors |= {f.name: column(f.name) for f in fields(inputs_type) if f.name not in tensors}
    # A copy from pageable memory would wait for the forward pass that is running.
    is_cuda = device.type == "cuda"
    moved = {k: (v.pin_memory() if is_cuda else v).to(device, non_blocking=True) for k, v in tensors.items()}
    return inputs_type(**moved)


# -- passes through the model

MicroBatchLoss = Callable[[int, torch.Tensor], torch.Tensor]
"""(number of the micro-batch, the head's output with gradient) -> scalar loss, one summand of the step's loss."""


class MicroBatchRunner(Protocol):
    """Passes micro-batches through the model. A runner knows the layout of the ranks; the worker need not.

    Both methods are collectives over all ranks that work on the same parameters.
    """

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        """The output of `task` for each micro-batch, in order: float32 [B, S] or [B, S, C], on the device, no grad."""
        ...

    def train(
        self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask, *, forward_only: int = 0
    ) -> None:
        """Forward and backward of all micro-batches. Gradients add up in the parameters, reduced over ranks once.

        The first `forward_only` micro-batches have no gradient: `loss` sees their outputs, without a backward pass.
        """


@dataclass(eq=False)
class SequentialRunner:
    """Passes every micro-batch through the whole model before the next. Never waits for the device.

    `keeps_whole`: weights stay gathered and gradients stay whole on every rank until the last micro-batch, instead of
    being gathered and reduced to shards for each. This takes less traffic and more memory.
    """

    model: LogprobModel
    device: torch.device
    keeps_whole: bool
    clear_cache_every: int | None

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        is_kept = self.keeps_whole and len(batches) > 1
        with torch.no_grad(), kept_gathered([self.model]) if is_kept else nullcontext():
            for batch in self._prefetched(batches):
                yield self.model(batch, task)

    def train(
        self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask, *, forward_only: int = 0
    ) -> None:
        with kept_gathered([self.model]) if self.keeps_whole else nullcontext():
            for number, batch in enumerate(self._prefetched(batches)):
                if number < forward_only:
                    with torch.no_grad():
                        loss(number, self.model(batch, task))
                    continue
                is_last = number == len(batches) - 1
                if self.keeps_whole:
                    self.model.set_requires_gradient_sync(is_last)
                    self.model.set_reshard_after_backward(is_last)
                else:  # reduce to shards after every micro-batch, but between copies of the model (HSDP) once
                    self.model.set_requires_all_reduce(is_last)
                loss(number, self.model(batch, task)).backward()

    def _prefetched(self, batches: Sequence[ModelBatch]) -> Iterator[ModelBatch]:
        """Batches on the device. The next one is copied while the model computes on the current one."""
        moved = (batch.to(self.device) for batch in batches)
        ahead = deque(islice(moved, 1))
        for number in range(len(batches)):
            ahead.extend(islice(moved, 1))
            yield ahead.popleft()
            clear_cache(number, self.clear_cache_every)


@contextmanager
def kept_gathered(roots: Sequence[nn.Module]) -> Generator[None]:
    """Keep the parameters that FSDP gathers until the block ends; the roots' own stay gathered anyway."""
    modules = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    modules = [module for module in modules if module not in roots]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def clear_cache(number: int, every: int | None) -> None:
    """Return unused memory to the device after micro-batch `number`, if it is the last of `every`."""
    if every is not None and (number + 1) % every == 0:
        torch.cuda.empty_cache()


def from_last_stage(values: dict[str, float], pipeline: dist.ProcessGroup) -> dict[str, float]:
    """The values of the last pipeline rank, such as metrics of the loss, on all pipeline ranks. Collective."""
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
    """The outputs of `task` for all micro-batches, in order, on all pipeline ranks. Collective.

    `scored`: on the last pipeline rank all outputs, [B, S] or [B, S, C] each; empty on the others.
    """
    trailing = () if task.num_values is None else (task.num_values,)
    shapes = [(*batch.shape, *trailing) for batch in batches]
    sizes = [math.prod(shape) for shape in shapes]
    # One broadcast for all micro-batches: each would have to wait for the slowest rank.
    flat = torch.empty(sum(sizes), dtype=task.dtype, device=device)
    if scored:
        flat = torch.cat([values.flatten() for values in scored])
    dist.broadcast(flat, src=dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline)
    for shape, part in zip(shapes, flat.split(sizes), strict=True):
        yield part.view(shape)


# -- losses


def call_loss(
    loss_fn: LossFunction, outputs: torch.Tensor, inputs: LossInputs, seqs: torch.Tensor, toks: torch.Tensor
) -> tuple[torch.Tensor, LossMetrics]:
    """The loss of a micro-batch and its metrics, `loss` among them, 0-d and detached.

    UserCodeError, naming the loss, if it returns anything but a scalar with a graph and numbers by name.
    """
    returned: Any = loss_fn(outputs, inputs, seqs, toks)
    if (problem := _loss_problem(returned, outputs)) is not None:
        raise UserCodeError(f"loss {loss_name(loss_fn)} returned {problem}")
    loss, metrics = returned
    scalars = {str(name): torch.as_tensor(value, device=loss.device).detach() for name, value in metrics.items()}
    return loss, scalars | {"loss": loss.detach()}


def _loss_problem(returned: Any, outputs: torch.Tensor) -> str | None:
    """The fault in the result of a loss, and the remedy."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        return f"a {type(returned).__name__}, not (loss, metrics)"
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or not isinstance(metrics, Mapping):
        return f"({type(loss).__name__}, {type(metrics).__name__}), not a tensor and a dictionary of metrics"
    if loss.ndim != 0 or not loss.is_floating_point():
        return f"a loss of shape {list(loss.shape)} and {loss.dtype}; sum it up, and divide by a global count"
    if outputs.requires_grad and not loss.requires_grad:
        return "a loss without gradient; compute it from the first argument, without detach() and item()"
    bad = [str(name) for name, value in metrics.items() if not _is_scalar(value)]
    return f"metrics that are no single numbers: {', '.join(bad)}; sum them up" if bad else None


def _is_scalar(value: object) -> bool:
    return value.ndim == 0 if isinstance(value, torch.Tensor) else isinstance(value, Real)


# -- metrics of losses, reduced over micro-batches and ranks

_COMBINE = {"min": torch.amin, "max": torch.amax, "sum": torch.sum}
_COLLECTIVE = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


def reduce_micro_batches(parts: Sequence[LossMetrics]) -> LossMetrics:
    """One value per metric from the values of all micro-batches of a rank."""
    return {
        name: _COMBINE[reduction_of(name)](torch.stack([p[name].float() for p in parts]), dim=0) for name in parts[0]
    }


def reduce_ranks(metrics: LossMetrics, group: dist.ProcessGroup) -> dict[str, float]:
    """One value per metric over ranks: at most three collectives for any number of metrics."""
    out: dict[str, float] = {}
    for how, op in _COLLECTIVE.items():
        if names := [name for name in metrics if reduction_of(name) == how]:
            values = torch.stack([metrics[name].double() for name in names])
            dist.all_reduce(values, op=op, group=group)
            out.update(zip(names, values.tolist(), strict=True))
    return out

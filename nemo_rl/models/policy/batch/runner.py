"""How the micro-batches of a step pass through the model.

A runner knows the layout of the ranks; the worker only knows rows, losses and optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import HeadTask

# -- What the routers of mixture-of-experts layers did, as metrics: the same sums whatever trains the model.
#
# Of each layer a float64 vector [E + 2]: how many tokens each expert got, then tokens, then their summed entropy.
# Vectors of micro-batches and ranks add up; `layer_values` makes metrics of what they come to.

LOAD_METRICS = ("load_max_over_mean", "load_min_over_mean", "dead_expert_fraction", "router_entropy")
"""Tokens of the busiest and of the idlest expert over those of the mean expert; experts without a token; entropy of the
router's distribution over experts, in nats, mean over tokens."""


def count_sorted(sorted_ids: torch.Tensor, num_bins: int) -> torch.Tensor:
    """How often each of 0..num_bins-1 stands in a sorted int64 [N]: int64 [num_bins], without waiting for a device."""
    edges = torch.arange(num_bins + 1, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, edges).diff()


@torch.no_grad()
def choice_counts(
    logits: torch.Tensor, chosen: torch.Tensor, is_token: torch.Tensor, *, is_independent: bool
) -> torch.Tensor:
    """The vector of one layer and micro-batch: logits [T, E], chosen experts int64 [T, K], is_token bool [T].

    `is_independent`: experts are scored on their own, by a sigmoid (DeepSeek-V3), not by one softmax.
    """
    bins = logits.shape[-1]
    logits = logits.float()
    if is_independent:
        logits = F.logsigmoid(logits)
    entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    ids = chosen.masked_fill(~is_token[:, None], bins).view(-1).sort().values
    sums = torch.stack([is_token.sum(), (entropy * is_token).sum()]).double()
    return torch.cat([count_sorted(ids, bins).double(), sums])


def layer_values(counts: torch.Tensor) -> torch.Tensor:
    """Float64 [L, E + 2] -> `LOAD_METRICS` of each layer, float64 [L, 4]."""
    load, tokens, entropy = counts[:, :-2], counts[:, -2], counts[:, -1]
    mean = load.mean(dim=1)
    values = [load.amax(dim=1) / mean, load.amin(dim=1) / mean, (load == 0).double().mean(dim=1), entropy / tokens]
    return torch.stack(values, dim=1)


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

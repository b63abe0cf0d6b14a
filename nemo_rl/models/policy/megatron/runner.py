"""Micro-batches through Megatron's schedules: one stage, 1F1B, or interleaved stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl.models.policy.head_tasks import HeadTask
from nemo_rl.models.policy.megatron.mesh import MegatronMesh
from nemo_rl.models.policy.micro_batch_runner import MicroBatchLoss
from nemo_rl.models.policy.model_batch import ModelBatch


class MegatronRunner:
    """A `MicroBatchRunner` over `chunks`, the stages of this rank in order, wrapped for gradient reduction.

    Losses are sums, and so are gradients, over micro-batches and ranks: Megatron's own divisions are switched off
    (`calculate_per_token_loss` with a count of tokens that is never handed on).
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: TransformerConfig,
        mesh: MegatronMesh,
        device: torch.device,
    ) -> None:
        assert config.calculate_per_token_loss
        self.chunks: list[Any] = list(chunks)
        self.mesh = mesh
        self.device = device
        config.finalize_model_grads_func = _finalize
        self._run = get_forward_backward_func()

    def train(self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask) -> None:
        """Forward and backward of all micro-batches. `loss` is called on the last pipeline rank only."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._schedule(batches, task, loss)

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        """What `task` says of each micro-batch, in order, on all pipeline ranks, without gradients."""
        if not batches:
            return
        with torch.no_grad():
            scored: list[torch.Tensor] = self._schedule(batches, task, None)
        pipeline = self.mesh.pipeline_group
        if pipeline is None:
            yield from scored
            return
        trailing = () if task.num_values is None else (task.num_values,)
        shapes = [(*batch.shape, *trailing) for batch in batches]
        sizes = [math.prod(shape) for shape in shapes]
        if scored:
            flat = torch.cat([values.flatten() for values in scored])
        else:
            flat = torch.empty(sum(sizes), dtype=task.dtype, device=self.device)
        dist.broadcast(flat, src=dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline)
        for shape, part in zip(shapes, flat.split(sizes), strict=True):
            yield part.view(shape)

    def _schedule(self, batches: Sequence[ModelBatch], task: HeadTask, loss: MicroBatchLoss | None) -> list[Any]:
        def step(numbered: Iterator[tuple[int, ModelBatch]], model: Any) -> tuple[torch.Tensor, Any]:
            number, batch = next(numbered)

            def part_of_loss(outputs: torch.Tensor, non_loss_data: bool = False) -> Any:
                if loss is None:
                    return outputs
                return loss(number, outputs), torch.ones((), dtype=torch.int, device=self.device), {}

            return model(batch.to(self.device), task), part_of_loss

        iterators: list[Any] = [enumerate(batches) for _ in self.chunks]
        several = len(self.chunks) > 1
        return self._run(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],  # of one stage alone; stages tell each other theirs
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )


def _finalize(chunks: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's last reductions, without its division by the number of tokens."""
    finalize_model_grads(chunks, None, **{name: value for name, value in kwargs.items() if name != "num_tokens"})

"""Micro-batches through Megatron's schedules: one stage, 1F1B, or interleaved stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as megatron_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl.models.policy.head_tasks import HeadTask
from nemo_rl.models.policy.megatron.balance import BalancedRouter, set_step_tokens
from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel
from nemo_rl.models.policy.megatron.mesh import MegatronMesh
from nemo_rl.models.policy.megatron.stage_links import StageLinks
from nemo_rl.models.policy.megatron_config import MegatronConfig
from nemo_rl.models.policy.micro_batch_runner import MicroBatchLoss, scored_by_last_stage
from nemo_rl.models.policy.model_batch import ModelBatch

parallel_state: Any = megatron_state  # whose types say int | None of what is there


class MegatronRunner:
    """A `MicroBatchRunner` over `chunks`, the stages of this rank in order, wrapped for gradient reduction.

    Losses are sums, and so are gradients, over micro-batches and ranks: Megatron's own divisions are switched off
    (`calculate_per_token_loss` with a count of tokens that is never handed on). Stages are in training mode while they
    train and no longer: then Megatron recomputes activations, balances experts, and adapters drop out.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: TransformerConfig,
        settings: MegatronConfig,
        mesh: MegatronMesh,
        device: torch.device,
    ) -> None:
        assert config.calculate_per_token_loss
        self.chunks: list[Any] = list(chunks)
        self.mesh = mesh
        self.device = device
        self.width_divisor = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.empty_level = settings.empty_unused_memory_level if device.type == "cuda" else 0
        self.gathers_late = settings.distributed_data_parallel_config.overlap_param_gather
        self.groups: Any = _groups()
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        self.balanced = [m for m in modules if isinstance(m, BalancedRouter) and m.is_aux_loss_enabled()]
        self.links: StageLinks | None = None
        if mesh.pipeline_group is not None:
            assert mesh.gradient_group is not None
            self.links = StageLinks(mesh.pipeline_group, mesh.gradient_group, config, device)
        config.finalize_model_grads_func = _finalize
        if settings.distributed_data_parallel_config.overlap_grad_reduce:
            self._overlap(config)
        if self.gathers_late:
            for chunk in self.chunks:
                _wait_for_head(chunk)
        self._run = get_forward_backward_func()
        for chunk in self.chunks:
            chunk.eval()
        self.gather_parameters()

    def _overlap(self, config: TransformerConfig) -> None:
        """Reduce gradients while the backward pass of the last micro-batch runs, or in the pipeline's bubble."""
        several = len(self.chunks) > 1
        without_sync = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = without_sync if several else without_sync[0]  # pyright: ignore[reportAttributeAccessIssue]
        if self.links is not None:
            starts = [chunk.start_grad_sync for chunk in self.chunks]
            config.grad_sync_func = starts if several else starts[0]  # pyright: ignore[reportAttributeAccessIssue]

    def gather_parameters(self) -> None:
        """With `overlap_param_gather`, optimizer steps leave it to the next forward pass to gather what they updated.

        This gathers now: before weights are read by anything but a forward pass. Collective.
        """
        if self.gathers_late:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def train(self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask) -> None:
        """Forward and backward of all micro-batches. `loss` is called on the last pipeline rank only."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.balanced:
            set_step_tokens(self.balanced, batches, self.groups.dp_cp, self.device)
        with self._training():
            self._schedule(batches, task, loss)
        if self.empty_level >= 1:
            torch.cuda.empty_cache()

    @contextmanager
    def _training(self) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.train()
        try:
            yield
        finally:
            for chunk in self.chunks:
                chunk.eval()

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        """What `task` says of each micro-batch, in order, on all pipeline ranks, without gradients."""
        if self.mesh.pipeline_group is None:
            for batch in batches:
                with torch.no_grad():
                    (scored,) = self._schedule([batch], task, None)
                yield scored
        elif batches:
            with torch.no_grad():
                scored = self._schedule(batches, task, None)
            yield from scored_by_last_stage(scored, batches, task, self.mesh.pipeline_group, self.device)
        if self.empty_level >= 2:
            torch.cuda.empty_cache()

    def _schedule(self, batches: Sequence[ModelBatch], task: HeadTask, loss: MicroBatchLoss | None) -> list[Any]:
        def step(numbered: Iterator[tuple[int, ModelBatch]], model: Any) -> tuple[torch.Tensor, Any]:
            number, batch = next(numbered)

            def part_of_loss(outputs: torch.Tensor, non_loss_data: bool = False) -> Any:
                if loss is None:
                    return outputs
                return loss(number, outputs), torch.ones((), dtype=torch.int, device=self.device), {}

            return model(batch.to(self.device), task), part_of_loss

        if self.links is not None:
            widths = [batch.input_ids.shape[1] // self.width_divisor for batch in batches]
            self.links.expect(widths, forward_only=loss is None)
        iterators: list[Any] = [enumerate(batches) for _ in self.chunks]
        several = len(self.chunks) > 1
        done = self._run(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],  # not used: `links` know every width
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
            p2p_communicator=self.links,
            pg_collection=self.groups,
        )
        if self.links is not None:
            self.links.assert_idle()
        return done


def _wait_for_head(chunk: Any) -> None:
    """Have the head's parameters waited for like those of modules that are called: tasks only read its weight."""
    wait = chunk._make_forward_pre_hook()
    for stage in chunk.modules():
        if isinstance(stage, PolicyGPTModel) and stage.post_process:
            head, norm = stage.output_layer, stage.decoder.final_layernorm
            assert norm is not None
            norm.register_forward_pre_hook(lambda module, inputs, head=head: wait(head))


def _groups() -> ProcessGroupCollection:
    """The groups that Megatron's schedules ask for by name."""
    groups: Any = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return groups


def _finalize(chunks: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's last reductions, without its division by the number of tokens."""
    finalize_model_grads(chunks, None, **kwargs)

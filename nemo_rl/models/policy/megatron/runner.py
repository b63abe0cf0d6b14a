"""Runs micro-batches through Megatron's schedules: one stage, 1F1B, or interleaved stages."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl.models.policy.batch.microbatches import MicroBatchLoss, scored_by_last_stage
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel
from nemo_rl.models.policy.megatron.mesh import MegatronMesh
from nemo_rl.models.policy.megatron.moe import routers


class MegatronRunner:
    """A `MicroBatchRunner` over `chunks`, the stages of this rank in order, wrapped for gradient reduction.

    Losses and gradients are sums over micro-batches and ranks: Megatron's own divisions are switched off
    (`calculate_per_token_loss` with a token count that is never passed on). Stages are in training mode only during
    `train`, because then Megatron recomputes activations and balances experts, and adapters apply dropout.
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
        self.groups: Any = ProcessGroupCollection.use_mpu_process_groups(
            ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp", "tp_dp_cp"]
        )
        self.balanced = [router for router in routers(self.chunks) if router.is_aux_loss_enabled()]
        self.communicator: StageCommunicator | None = None
        if mesh.pipeline_group is not None:
            self.communicator = StageCommunicator(mesh.pipeline_group, config)
        # Megatron's final reductions, without its division by the number of tokens: losses are divided already.
        config.finalize_model_grads_func = lambda chunks, num_tokens=None, **others: finalize_model_grads(
            chunks, None, **others
        )
        if settings.distributed_data_parallel_config.overlap_grad_reduce:
            # While the backward pass of the last micro-batch runs or, in a pipeline, in its bubble.
            syncs: Any = config
            syncs.no_sync_func = self._of_chunks([chunk.no_sync for chunk in self.chunks])
            if self.communicator is not None:
                syncs.grad_sync_func = self._of_chunks([chunk.start_grad_sync for chunk in self.chunks])
        if self.gathers_late:
            for chunk in self.chunks:
                _wait_for_head(chunk)
        self._run = get_forward_backward_func()
        for chunk in self.chunks:
            chunk.eval()
        self.gather_parameters()

    def _of_chunks(self, values: list[Any]) -> Any:
        """Megatron's form of one value per chunk: a list only for interleaved stages."""
        return values if len(self.chunks) > 1 else values[0]

    def gather_parameters(self) -> None:
        """Gather updated parameters before anything but a forward pass reads them. Collective.

        With `overlap_param_gather`, optimizer steps leave that to the next forward pass.
        """
        if self.gathers_late:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def train(
        self, batches: Sequence[ModelBatch], loss: MicroBatchLoss, task: HeadTask, *, forward_only: int = 0
    ) -> None:
        """See `MicroBatchRunner`. With a gradient, `loss` is called on the last pipeline rank only."""
        for number, outputs in enumerate(self.forward(batches[:forward_only], task)):
            loss(number, outputs)
        batches = batches[forward_only:]
        for chunk in self.chunks:
            # Gradients add up in these buffers over the micro-batches of the step.
            chunk.zero_grad_buffer()
            chunk.train()
        if self.balanced:  # their losses are divided by the tokens of the whole step
            tokens = torch.tensor(float(sum(int(batch.is_token.sum()) for batch in batches)), device=self.device)
            dist.all_reduce(tokens, group=self.groups.dp_cp)
            for router in self.balanced:
                router.step_tokens = tokens
        try:
            self._schedule(batches, task, lambda number, outputs: loss(forward_only + number, outputs))
        finally:
            for chunk in self.chunks:
                chunk.eval()
        if self.empty_level >= 1:
            torch.cuda.empty_cache()

    def forward(self, batches: Sequence[ModelBatch], task: HeadTask) -> Iterator[torch.Tensor]:
        """The output of `task` for each micro-batch, in order, on all pipeline ranks, without gradients."""
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

        if self.communicator is not None:
            widths = [batch.input_ids.shape[1] // self.width_divisor for batch in batches]
            self.communicator.expect(widths, forward_only=loss is None)
        return self._run(
            forward_step_func=step,
            data_iterator=self._of_chunks([enumerate(batches) for _ in self.chunks]),
            model=self._of_chunks(self.chunks),
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],  # not used: `communicator` knows every width
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )


def _wait_for_head(chunk: Any) -> None:
    """Gather the head's parameters in time: Megatron gathers on calls of a module, and tasks only read its weight."""
    wait = chunk._make_forward_pre_hook()
    for stage in chunk.modules():
        if isinstance(stage, PolicyGPTModel) and stage.post_process:
            head, norm = stage.output_layer, stage.decoder.final_layernorm
            assert isinstance(norm, torch.nn.Module)
            norm.register_forward_pre_hook(lambda module, inputs, head=head: wait(head))


# -- point-to-point messages between pipeline stages: hidden states forward, their gradients backward


class StageCommunicator(P2PCommunicator):
    """Megatron's communicator, which receives without asking for shapes. `expect` precedes each pass.

    Every rank knows all micro-batches of a pass and the order in which the schedules process them, so it knows the
    shape of each message. Megatron sends shapes first, and waits for the device to read them.
    """

    def __init__(self, group: dist.ProcessGroup, config: TransformerConfig) -> None:
        super().__init__(pp_group=group, config=config)
        self.stages_per_rank = config.virtual_pipeline_model_parallel_size or 1
        self.hidden_size = config.hidden_size
        self.states: deque[int] = deque()  # widths of the messages that the previous stage will send
        self.gradients: deque[int] = deque()  # and the next stage

    def expect(self, widths: Sequence[int], *, forward_only: bool) -> None:
        """The next pass has micro-batches of `widths` positions on this rank."""
        assert not self.states and not self.gradients, "not all messages of the last pass have arrived"
        table = [(number, 0) for number in range(len(widths))]
        if self.stages_per_rank > 1:
            table = get_schedule_table(len(widths), self.stages_per_rank, self.pp_group.size())
        # The very first stage receives no states, and the very last no gradients. Gradients also come in the order of
        # the table, with the stages of a rank reversed: number 0 is then the last.
        is_first, is_last = self.pp_group.rank() == 0, self.pp_group.rank() == self.pp_group.size() - 1
        self.states.extend(widths[number] for number, stage in table if stage > 0 or not is_first)
        if not forward_only:
            self.gradients.extend(widths[number] for number, stage in table if stage > 0 or not is_last)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        states = [self.states.popleft() if recv_prev else 0, 1, self.hidden_size]
        gradients = [self.gradients.popleft() if recv_next else 0, 1, self.hidden_size]
        return states, gradients

"""What pipeline stages hand each other: hidden states forwards, their gradients backwards.

Every rank knows all micro-batches of a pass and the order in which Megatron's schedules take them, so that the shape of
what arrives next is known without being sent. Megatron's own communicator sends shapes first, and on two ranks with
several stages each mixes up the two directions: both lead to the same rank, and messages are told apart by their order
alone. Here each direction has process groups, or neighbours, of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig


class StageLinks(P2PCommunicator):
    """The communicator of Megatron's schedules, one for all passes. `expect` comes before each, `assert_idle` after."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        backward_group: dist.ProcessGroup,
        config: TransformerConfig,
        device: torch.device,
    ) -> None:
        """`backward_group`: the ranks of `group` once more; `group` itself where neighbours tell directions apart."""
        super().__init__(pp_group=group, config=config)
        self.stages_per_rank = config.virtual_pipeline_model_parallel_size or 1
        self.hidden_size = config.hidden_size
        self.dtype = config.pipeline_dtype
        self.device = device
        self.backward_group = backward_group
        assert backward_group is not group or self.stages_per_rank == 1 or group.size() > 2
        self.states: deque[int] = deque()  # widths of what the previous stage will send
        self.gradients: deque[int] = deque()  # and of what the next one will

    def expect(self, widths: Sequence[int], *, forward_only: bool) -> None:
        """The pass that follows takes micro-batches of `widths` positions on this rank."""
        table = [(number, 0) for number in range(len(widths))]
        if self.stages_per_rank > 1:
            table = get_schedule_table(len(widths), self.stages_per_rank, self.pp_group.size())
        # The first stage of all receives no states, and the last no gradients. Gradients come in the order of the
        # table too, with the stages of a rank turned round: number 0 of it is the last.
        is_first, is_last = self.pp_group.rank() == 0, self.pp_group.rank() == self.pp_group.size() - 1
        self.states.extend(widths[number] for number, stage in table if stage > 0 or not is_first)
        if not forward_only:
            self.gradients.extend(widths[number] for number, stage in table if stage > 0 or not is_last)

    def assert_idle(self) -> None:
        """All that was expected has come."""
        assert not self.states and not self.gradients, (list(self.states), list(self.gradients))

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Everything given is sent, and what is asked for has come, on return (on a GPU: in the current stream)."""
        assert wait_on_reqs, "overlap_p2p_comm is not used"
        states = self._empty(self.states) if recv_prev else None
        gradients = self._empty(self.gradients) if recv_next else None
        forward = self._ops(tensor_send_next, self.next_rank, states, self.prev_rank, self.pp_group)
        backward = self._ops(tensor_send_prev, self.prev_rank, gradients, self.next_rank, self.backward_group)
        batches = [forward + backward] if self.backward_group is self.pp_group else [forward, backward]
        works = [work for ops in batches if ops for work in dist.batch_isend_irecv(ops)]
        for work in works:
            work.wait()
        return states, gradients, None

    def _empty(self, widths: deque[int]) -> torch.Tensor:
        shape = (widths.popleft(), 1, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def _ops(
        self,
        sent: torch.Tensor | None,
        receiver: int | None,
        received: torch.Tensor | None,
        sender: int | None,
        group: dist.ProcessGroup,
    ) -> list[dist.P2POp]:
        assert receiver is not None and sender is not None
        ops = []
        if sent is not None:
            ops.append(dist.P2POp(dist.isend, sent.detach().contiguous(), receiver, group))
        if received is not None:
            ops.append(dist.P2POp(dist.irecv, received.detach(), sender, group))
        return ops

"""Balancing losses of routers, as means over the tokens of an optimizer step.

The loss of T tokens on E experts, of which each token has K, is L = E * sum_e f_e P_e: f_e is the share of the T * K
choices that fell on expert e, P_e the mean score of e (Fedus et al. 2021, arXiv 2101.03961, section 2.2). A step with N
tokens over all micro-batches and ranks, padding left out, adds to its loss `moe_aux_loss_coeff` times

    aux_loss, global_aux_loss   sum over micro-batches of T / N * L of the micro-batch (global: of all ranks together)
    seq_aux_loss                sum over sequences of T / N * L of the sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17)

for every layer. So the weight of balancing does not change with the number of micro-batches or ranks; `seq_aux_loss` is
the same number however sequences are put into micro-batches. Megatron multiplies by the tokens of one rank and counts
on a division by all of them, which tensor- and context-parallel ranks, each with its part of T, do not bring back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter

from nemo_rl.models.policy.model_batch import ModelBatch


class BalancedRouter(TopKRouter):
    """A router whose balancing loss is the module's. `step_tokens` is set before a step, the others before `routing`.

    Attributes:
        step_tokens: float32 scalar, N above.
        sequences: int64 [S], the sequence of each of this rank's positions, numbered over all ranks that share them.
        num_sequences: how many there are, with one for padding.
        own_tokens: int64 scalar, how many of this rank's positions are no padding.
    """

    step_tokens: torch.Tensor | None = None
    sequences: torch.Tensor | None = None
    num_sequences: int = 0
    own_tokens: torch.Tensor | None = None

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        reduce_group_has_dp: bool = False,
        valid_token_count: Any = None,
    ) -> torch.Tensor:
        """`activation`, with the gradient of this rank's part of the loss of the tokens of `reduce_group` behind it.

        `valid_token_count` is not read: Megatron adds it up over the group or not, by what a sum happens to share.
        """
        assert self.own_tokens is not None and self.step_tokens is not None
        tokens = self.own_tokens.to(aux_loss.dtype)  # a copy: they are integers
        dist.all_reduce(tokens, group=reduce_group)
        part = aux_loss * (tokens / self.step_tokens)
        return self._attach(activation, aux_loss_coeff, part, aux_loss_name, reduce_group, reduce_group_has_dp)

    def _attach(
        self,
        activation: torch.Tensor,
        coeff: float,
        part: torch.Tensor,
        name: str,
        group: dist.ProcessGroup,
        has_data_ranks: bool,
    ) -> torch.Tensor:
        save_to_aux_losses_tracker(
            name,
            part / coeff,
            self.layer_number,  # pyright: ignore[reportArgumentType]
            self.config.num_layers,
            reduce_group=group,
            reduce_group_has_dp=has_data_ranks,
        )
        return MoEAuxLossAutoScaler.apply(activation, part)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Of scores [S, E] and map [S, E], where padding has neither."""
        coeff = self.get_aux_loss_coeff("seq_aux_loss")
        if coeff == 0:
            return probs
        assert self.sequences is not None and self.step_tokens is not None and self.config.num_moe_experts is not None
        shape = (self.num_sequences, self.config.num_moe_experts)
        chosen = scores_for_aux_loss.new_zeros(shape)
        chosen.index_add_(0, self.sequences, routing_map.to(chosen.dtype))
        dist.all_reduce(chosen, group=self.tp_cp_group)
        # T * L of a sequence is E * sum_e f_e * (sum of scores of e); ranks add up their parts of that sum.
        share = chosen / chosen.sum(dim=1, keepdim=True).clamp(min=1.0)
        summed = scores_for_aux_loss.new_zeros(shape).index_add(0, self.sequences, scores_for_aux_loss)
        part = (share * summed).sum() * (shape[1] * coeff / self.step_tokens)
        return self._attach(probs, coeff, part, "seq_load_balancing_loss", self.tp_cp_group, False)


def sequence_numbers(batch: ModelBatch, context_size: int) -> tuple[torch.Tensor, int]:
    """The sequence of each position of a padding-free row, int64 [W], and how many there are, padding counted."""
    assert batch.segments is not None
    lengths = torch.tensor(batch.segments.query_lengths, device=batch.input_ids.device)
    pieces = 2 if context_size > 1 else 1
    numbers = torch.arange(len(lengths), device=lengths.device) // pieces
    count = -(-len(lengths) // pieces)
    return numbers.repeat_interleave(lengths, output_size=batch.input_ids.shape[1]), count


def set_step_tokens(
    routers: Sequence[BalancedRouter], batches: Sequence[ModelBatch], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Tell the routers of the tokens of an optimizer step. `group`: the ranks with other tokens. Collective."""
    tokens = torch.tensor(float(sum(int(batch.is_token.sum()) for batch in batches)), device=device)
    dist.all_reduce(tokens, group=group)
    for router in routers:
        router.step_tokens = tokens

"""Sequences cut over ranks: what is refused, and how their logprobs come together again.

The cutting is `RowLayout`'s, the exchange of keys and values the attention function's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from nemo_rl.models.policy.attention import supports_segments


def check_context_parallel(config: PretrainedConfig, size: int) -> None:
    """ValueError when tokens of this architecture meet other than in attention that can be cut over `size` ranks."""
    reason = supports_segments(config)
    if size > 1 and reason is not None:
        raise ValueError(
            f"policy.dtensor_cfg.context_parallel_size={size}: sequences of a {config.model_type!r} model cannot be "
            f"cut over ranks, because {reason}; set it to 1 and use tensor_parallel_size or activation_checkpointing "
            "for long sequences"
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def context_sum(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `partial` [B, S] over `group`, on each of its ranks.

    In backward the identity: every rank computes the same loss of the sum, so the gradient it has is already whole.
    """
    total = _Sum.apply(partial, group)
    assert isinstance(total, torch.Tensor)
    return total

"""What a model's head says of each scored token, from the hidden state that the token is judged from.

hidden states [N, H] of the scored tokens -> head -> [N] or [N, C], float32 unless said
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.linear_logprobs import linear_logprobs
from nemo_rl.models.policy.head.logit_tiles import OutputHead


class HeadModel(Protocol):
    """What a task asks of the model whose states it judges.

    Attributes:
        chunk_tokens: the most rows whose logits are in memory at a time; None: by a budget of bytes.
        temperature, top_k, top_p: those of sampling.
    """

    chunk_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float

    def output_head(self) -> OutputHead:
        """The head of a language model, as this rank holds it."""
        ...

    def score_weight(self) -> torch.Tensor:
        """[1, H], the head of a reward or value model."""
        ...


class HeadTask(ABC):
    """Called inside the model's forward, where FSDP has gathered the head. Picklable."""

    @property
    def num_values(self) -> int | None:
        """Numbers per token, C; None: one, without a dimension of its own."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return torch.float32

    @property
    def columns(self) -> tuple[str, ...]:
        """Row columns it needs, as `ModelBatch.columns`."""
        return ()

    @abstractmethod
    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        """Equal on all tensor-parallel ranks."""


@dataclass(frozen=True)
class Logprobs(HeadTask):
    """The logprob of each scored token.

    `filtered=False` leaves out top-k and top-p (for a reference policy, which may give a sampled token no mass at all
    inside the filter).
    """

    filtered: bool = True

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        top_k, top_p = (model.top_k, model.top_p) if self.filtered else (None, 1.0)
        return linear_logprobs(
            states, model.output_head(), batch.targets, top_k=top_k, top_p=top_p, chunk_tokens=model.chunk_tokens
        )


@dataclass(frozen=True)
class Scalars(HeadTask):
    """The score of each scored token: what a reward model says of a sequence, or a value model of a state."""

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        return (states.float() @ model.score_weight().float().T)[:, 0]

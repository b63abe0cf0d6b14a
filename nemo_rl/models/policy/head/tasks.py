"""Outputs of a model's head for each scored token, from the hidden state that predicts the token.

hidden states [N, H] of the scored tokens -> head -> [N] or [N, C], float32 unless said
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.linear import linear_logprobs
from nemo_rl.models.policy.head.logit_tiles import OutputHead
from nemo_rl.types import SamplingParams


class HeadModel(Protocol):
    """The model, as a task uses it.

    Attributes:
        sampling: how its completions are drawn.
    """

    sampling: SamplingParams

    def output_head(self) -> OutputHead:
        """This rank's rows of the head of a language model."""
        ...

    def score_weight(self) -> torch.Tensor:
        """[1, H], the head of a reward or value model."""
        ...


class HeadTask(ABC):
    """A function of hidden states. It runs inside the model's forward, where FSDP has gathered the head. Picklable."""

    num_values: int | None = None
    """Numbers per token, C; None: one, without a dimension of its own."""

    dtype: torch.dtype = torch.float32
    """The dtype of the output."""

    columns: tuple[str, ...] = ()
    """Row columns it needs, as `ModelBatch.columns`."""

    @abstractmethod
    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        """Equal on all tensor-parallel ranks."""


@dataclass(frozen=True)
class Logprobs(HeadTask):
    """The logprob of each scored token.

    `filtered=False` leaves out top-k and top-p. A reference policy needs this: its filter may exclude a sampled token,
    whose logprob would be -inf.
    """

    filtered: bool = True

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        # The engine samples from the filtered distribution, so ratios of probabilities have to use it as well.
        top_k, top_p = (model.sampling.top_k, model.sampling.top_p) if self.filtered else (None, 1.0)
        return linear_logprobs(states, model.output_head(), batch.targets, top_k=top_k, top_p=top_p)


@dataclass(frozen=True)
class LogprobsTwice(HeadTask):
    """The logprobs of each scored token with top-k and top-p, and without: [N, 2]."""

    num_values = 2

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        found = [Logprobs(filtered)(model, states, batch) for filtered in (True, False)]
        return torch.stack(found, dim=1)


@dataclass(frozen=True)
class Scalars(HeadTask):
    """The score of each scored token: the reward of a sequence, or the value of a state."""

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        # In float32: bfloat16 has 8 significant bits, so scores that differ by 0.3% would become equal.
        return (states.float() @ model.score_weight().float().T)[:, 0]

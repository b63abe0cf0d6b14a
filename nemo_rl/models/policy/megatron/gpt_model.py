"""Megatron's GPT model with the heads of this library: hidden states of the last layer -> what a `HeadTask` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel

from nemo_rl.models.policy.context_parallel import context_sum
from nemo_rl.models.policy.head_tasks import HeadTask
from nemo_rl.models.policy.logit_tiles import LogitTransform, OutputHead, whole_logits
from nemo_rl.models.policy.megatron.packed import packed_params
from nemo_rl.models.policy.model_batch import ModelBatch


class PolicyGPTModel(GPTModel):
    """A stage of the model. Its output layer never makes logits: `output_head` hands its weight to the tasks.

    After construction `set_head` says how logits are judged.
    """

    transform: LogitTransform
    true_vocab_size: int
    chunk_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float

    def set_head(
        self,
        *,
        transform: LogitTransform,
        true_vocab_size: int,
        chunk_tokens: int | None,
        temperature: float,
        top_k: int | None,
        top_p: float,
    ) -> None:
        """`true_vocab_size`: without the rows that make the vocabulary divide over tensor-parallel ranks."""
        self.transform = transform
        self.true_vocab_size = true_vocab_size
        self.chunk_tokens = chunk_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p

    def forward(self, batch: ModelBatch, task: HeadTask) -> torch.Tensor:
        """Hidden states [W, 1, H] for the next stage; on the last, what `task` says: float32 [B, S] or [B, S, C]."""
        hidden = super().forward(
            batch.input_ids,
            batch.position_ids,
            attention_mask=None,  # pyright: ignore[reportArgumentType]
            packed_seq_params=packed_params(batch, self.pg_collection.cp.size()),
            padding_mask=~batch.is_token if self.config.num_moe_experts is not None else None,
        )
        return self.score(hidden[:, 0], batch, task) if self.post_process else hidden

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.post_process and self.config.sequence_parallel:
            # The tasks' gradient is whole on every rank, so that each keeps its own positions of it.
            return tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states

    def next_logits(self, tokens: torch.Tensor, cache: StaticInferenceContext, temperature: float) -> torch.Tensor:
        """Logits of the token after the last one of every row of `tokens`, int64 [B, W], which follow those in `cache`:
        float32 [B, V], or this rank's columns of it, divided by the temperature (0: by 1).
        """
        offset = cache.sequence_len_offset
        positions = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        hidden = super().forward(
            tokens,
            positions.expand(len(tokens), -1),
            attention_mask=None,  # pyright: ignore[reportArgumentType]
            inference_context=cache,
            runtime_gather_output=True,
        )
        return whole_logits(hidden[-1], replace(self.output_head(), temperature=temperature or 1.0))

    def score(self, states: torch.Tensor, batch: ModelBatch, task: HeadTask) -> torch.Tensor:
        """`task` of the scored tokens, elsewhere 0, from the last hidden states [W, H]; equal on all tensor- and
        context-parallel ranks."""
        scored = task(self, states.index_select(0, batch.states), batch)
        out = torch.zeros(batch.shape + scored.shape[1:], dtype=scored.dtype, device=scored.device)
        out = out.index_put((batch.rows, batch.positions), scored)
        context = self.pg_collection.cp
        return out if context.size() == 1 else context_sum(out, context)

    def score_weight(self) -> torch.Tensor:
        """[1, H], the head of a reward or value model, which is a `PolicyScalarModel`."""
        raise TypeError("a language model has no score")

    def output_head(self) -> OutputHead:
        """The head as this rank holds it."""
        weight: Any = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        group: dist.ProcessGroup = self.pg_collection.tp
        start = group.rank() * len(weight)
        return OutputHead(
            weight=weight[: self.true_vocab_size - start],
            transform=self.transform,
            temperature=self.temperature,
            group=group if group.size() > 1 else None,
            start=start,
            vocab_size=self.true_vocab_size,
        )

"""Megatron's GPT model with the heads of this library: micro-batch -> hidden states -> the output of a `HeadTask`.

Language models (`PolicyGPTModel`), reward and value models (`PolicyScalarModel`), and generation (`MegatronSequences`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl.models.policy.attention import CuSeqlens
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.generate import Sequences
from nemo_rl.models.policy.head.logit_tiles import LogitTransform, OutputHead, whole_logits
from nemo_rl.models.policy.head.logprobs import put_in_rows
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.types import SamplingParams


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's and our description of packed sequences. Every layer gets it, also when it is recomputed."""

    cu_seqlens: CuSeqlens | None = None
    batch: ModelBatch | None = None


def packed_params(batch: ModelBatch, context_size: int) -> PackedParams:
    """Describes a padding-free batch in Megatron's `thd` layout.

    With context parallelism this rank has two chunks of each sequence; the lengths are of whole sequences, rounded up
    to chunks. The padding at the end counts as a sequence.
    """
    assert batch.cu_seqlens is not None
    queries = batch.cu_seqlens.query_lengths
    if context_size > 1:
        # A sequence has an early and a late chunk on each rank; see `RowLayout`.
        queries = [sum(pair) for pair in zip_longest(queries[::2], queries[1::2], fillvalue=0)]
    lengths = [length * context_size for length in queries]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=batch.input_ids.device)
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cu_seqlens=batch.cu_seqlens,
        batch=batch,
    )


class PolicyGPTModel(GPTModel):
    """A stage of the model. Its output layer never computes logits: `output_head` passes its weight to the tasks.

    `build_stages` sets the attributes, which tell the tasks how to compute with logits.
    """

    transform: LogitTransform
    true_vocab_size: int  # without the padding rows for tensor parallelism
    chunk_tokens: int | None
    sampling: SamplingParams

    def forward(self, batch: ModelBatch, task: HeadTask) -> torch.Tensor:  # pyrefly: ignore[bad-override]  (other arguments)
        """Hidden states [W, 1, H] for the next stage. On the last: the output of `task`, float32 [B, S(, C)]."""
        hidden = super().forward(
            batch.input_ids,
            batch.position_ids,
            attention_mask=None,  # pyrefly: ignore[bad-argument-type]  (annotated Tensor)
            packed_seq_params=packed_params(batch, self.pg_collection.cp.size()),
            padding_mask=~batch.is_token if self.config.num_moe_experts is not None else None,
        )
        return self.score(hidden[:, 0], batch, task) if self.post_process else hidden

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.post_process and self.config.sequence_parallel:
            # The tasks' gradient is whole on every rank, so backward only takes this rank's positions of it.
            return tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states

    def next_logits(self, tokens: torch.Tensor, cache: StaticInferenceContext, temperature: float) -> torch.Tensor:
        """Logits of the next token of every row: float32 [B, V], or this rank's columns, divided by the temperature (0:
        by 1). `tokens`, int64 [B, W], follow those in `cache` and are added to it.
        """
        offset = cache.sequence_len_offset
        positions = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        hidden = super().forward(
            tokens,
            positions.expand(len(tokens), -1),
            attention_mask=None,  # pyrefly: ignore[bad-argument-type]  (annotated Tensor)
            inference_context=cache,
            runtime_gather_output=True,
        )
        cache.sequence_len_offset += tokens.shape[1]
        return whole_logits(hidden[-1], replace(self.output_head(), temperature=temperature or 1.0))

    def score(self, states: torch.Tensor, batch: ModelBatch, task: HeadTask) -> torch.Tensor:
        """The output of `task` for the scored tokens, elsewhere 0, from the last hidden states [W, H]. Equal on all
        tensor- and context-parallel ranks."""
        context = self.pg_collection.cp
        scored = task(self, states.index_select(0, batch.states), batch)
        return put_in_rows(scored, batch, context if context.size() > 1 else None)

    def score_weight(self) -> torch.Tensor:
        """[1, H], the head of a reward or value model, which is a `PolicyScalarModel`."""
        weight: Any = self.output_layer.weight
        assert len(weight) == 1, "a language model has no score"
        return weight

    def output_head(self) -> OutputHead:
        """This rank's shard of the head."""
        weight: Any = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        group: dist.ProcessGroup = self.pg_collection.tp
        start = group.rank() * len(weight)
        return OutputHead(
            # Without padding rows, which would take part in the softmax.
            weight=weight[: self.true_vocab_size - start],
            transform=self.transform,
            temperature=self.sampling.temperature,
            group=group if group.size() > 1 else None,
            start=start,
            vocab_size=self.true_vocab_size,
            chunk_tokens=self.chunk_tokens,
        )


# -- reward and value models: one number per token instead of logits
#
#     last hidden states [N, H] -> output_layer.weight [1, H], whole on every rank -> [N]
#
# Its name in files is `score.weight`, as in the sequence classifiers of transformers.


class ScalarHead(MegatronModule):
    """A linear layer [1, H], replicated on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        vars(self.weight)["is_embedding_or_output_parameter"] = True  # Megatron's mark, which Muon obeys too


class PolicyScalarModel(PolicyGPTModel):
    """A stage of a reward or value model: a `PolicyGPTModel` with a `ScalarHead`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # A score is never tied to the embedding.
        super().__init__(config, *args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ScalarHead(config)


# -- generation: static batches of equally long prompts, with Megatron's KV cache


class MegatronSequences(Sequences):
    """Rows of one length, with the weights of `model`, a single stage."""

    def __init__(
        self, model: PolicyGPTModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, device: torch.device
    ) -> None:
        super().__init__(prompts, device)
        self._model = model
        self._cache = StaticInferenceContext(len(self.prompts), len(self.prompts[0]) + max_new_tokens)

    def first_logits(self, temperature: float) -> torch.Tensor:
        first = self._model.next_logits(torch.tensor(self.prompts, device=self.device), self._cache, temperature)
        self._cache.enable_decode_mode()
        return first

    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        return self._model.next_logits(tokens[:, None], self._cache, temperature)

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        memory = self._cache.key_value_memory_dict
        for layer, (keys, values) in memory.items():
            memory[layer] = (keys.index_select(1, index), values.index_select(1, index))
        self._cache.max_batch_size = len(rows)

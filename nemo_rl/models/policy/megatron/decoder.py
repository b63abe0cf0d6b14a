"""Megatron's model as it generates: static batches of equally long prompts, with Megatron's own KV cache."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext

from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel


class MegatronDecoder:
    """A `Decoder` of `model`, which is one stage. Weights are where they are trained."""

    needs_equal_lengths = True  # the rows of a static batch stand at the same position

    def __init__(self, model: PolicyGPTModel, device: torch.device) -> None:
        self.model = model
        self.device = device

    def active(self) -> contextlib.AbstractContextManager[None]:
        assert not any(module.training for module in self.model.modules())
        return contextlib.nullcontext()

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> _MegatronSequences:
        return _MegatronSequences(self.model, prompts, max_new_tokens, self.device)


class _MegatronSequences:
    """`Sequences` of prompts of one length. Prompts that are equal are computed once."""

    def __init__(
        self, model: PolicyGPTModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, device: torch.device
    ) -> None:
        self._model = model
        self._device = device
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        self._tokens = torch.tensor(distinct, device=device)
        index = {prompt: number for number, prompt in enumerate(distinct)}
        self._prompt_of = [index[tuple(prompt)] for prompt in prompts]
        self._cache = StaticInferenceContext(len(distinct), self._tokens.shape[1] + max_new_tokens)

    def logits(self, temperature: float) -> torch.Tensor:
        first = self._forward(self._tokens, temperature)
        self._cache.enable_decode_mode()
        if self._prompt_of == list(range(len(first))):
            return first
        self.keep(self._prompt_of)
        return first[torch.tensor(self._prompt_of, device=self._device)]

    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        return self._forward(tokens[:, None], temperature)

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._device)
        memory = self._cache.key_value_memory_dict
        for layer, (keys, values) in memory.items():
            memory[layer] = (keys.index_select(1, index), values.index_select(1, index))
        self._cache.max_batch_size = len(rows)

    def _forward(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        logits = self._model.next_logits(tokens, self._cache, temperature)
        self._cache.sequence_len_offset += tokens.shape[1]
        return logits

"""The model of transformers that FSDP shards, as it generates: prompts padded on the left, with a KV cache.

The weights of the whole model, or under tensor parallelism this rank's part of it, stay gathered on every rank while
completions are drawn: no traffic per token, and data-parallel ranks need not keep step with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import DynamicCache

from nemo_rl.models.policy.attention import ATTENTION, causal_mask
from nemo_rl.models.policy.logprobs import LogprobModel


class HfDecoder:
    """A `Decoder` of `model`."""

    needs_equal_lengths = False

    def __init__(self, model: LogprobModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        register_fsdp_forward_method(model, "next_logits")

    def active(self) -> AbstractContextManager[None]:
        return whole_weights(self.model)

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> _HfSequences:
        return _HfSequences(self.model, prompts, self.device)


class _HfSequences:
    """Tokens and KV cache of the rows of a batch, padded on the left to one length."""

    def __init__(self, model: LogprobModel, starts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._model = model
        self._device = device
        # Other implementations of attention take their mask from transformers, and may keep less than everything.
        self._is_ours = model.hf.config._attn_implementation == ATTENTION
        self._cache = DynamicCache() if self._is_ours else DynamicCache(config=model.hf.config)
        prompts = list(dict.fromkeys(map(tuple, starts)))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        self._tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
        for number, prompt in enumerate(prompts):
            self._tokens[number, width - len(prompt) :] = torch.tensor(prompt, device=device)
        self._is_padded = bool((lengths < width).any())
        self._starts = (width - lengths).to(device)
        self._width = width
        index = {prompt: number for number, prompt in enumerate(prompts)}
        self._prompt_of = [index[tuple(prompt)] for prompt in starts]

    def logits(self, temperature: float) -> torch.Tensor:
        """Of the first token of every row. Prompts that are equal are computed once."""
        first = self._forward(self._tokens, temperature)
        if self._prompt_of == list(range(len(first))):
            return first
        self.keep(self._prompt_of)
        return first[torch.tensor(self._prompt_of, device=self._device)]

    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Append `tokens` [B]; the logits of what follows."""
        self._width += 1
        return self._forward(tokens[:, None], temperature)

    def keep(self, rows: list[int]) -> None:
        """The rows are now these of the present ones, some of them perhaps several times."""
        index = torch.tensor(rows, device=self._device)
        self._starts = self._starts[index]
        self._cache.batch_select_indices(index)

    def _forward(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        places = torch.arange(self._width - tokens.shape[1], self._width, device=self._device)
        how = {}
        if self._is_padded:
            how = self._masks(tokens.shape[1])
        return self._model.next_logits(
            tokens, (places - self._starts[:, None]).clamp(min=0), temperature, past_key_values=self._cache, **how
        )

    def _masks(self, queries: int) -> dict[str, torch.Tensor]:
        is_token = torch.arange(self._width, device=self._device) >= self._starts[:, None]
        if not self._is_ours:
            return {"attention_mask": is_token}
        seen = causal_mask(queries, self._width, None, self._device) & is_token[:, None, None]
        # Padding sees itself: a softmax over nothing is no number, and would spread.
        own = torch.eye(self._width, dtype=torch.bool, device=self._device)[-queries:]
        return {"seen": seen | own}


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """FSDP's parameters gathered once, and kept until the block ends. A collective."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()

"""Generation by a rank that trains with PyTorch: prompts padded on the left, with a KV cache.

The weights of the model, or this rank's tensor-parallel part, stay gathered while completions are drawn. This needs no
traffic per token, and data-parallel ranks need not stay in step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import DynamicCache

from nemo_rl.models.policy.attention import ATTENTION, causal_mask
from nemo_rl.models.policy.dtensor.pipeline import kept_gathered
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.generate import GeneratingWorker, Sequences
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.settings import GenerationSettings


class _HfSequences(Sequences):
    """Rows padded on the left to one length."""

    def __init__(self, model: LogprobModel, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        super().__init__(prompts, device)
        self._model = model
        # Other attention implementations get their mask from transformers, and their cache may drop old keys.
        self._is_ours = model.hf.config._attn_implementation == ATTENTION
        self._cache = DynamicCache() if self._is_ours else DynamicCache(config=model.hf.config)
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        self._width = width = int(lengths.max())
        self._is_padded = bool((lengths < width).any())
        self._starts = (width - lengths).to(device)

    def first_logits(self, temperature: float) -> torch.Tensor:
        tokens = torch.tensor([[0] * (self._width - len(prompt)) + [*prompt] for prompt in self.prompts])
        return self._forward(tokens.to(self.device), temperature)

    def step(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        self._width += 1
        return self._forward(tokens[:, None], temperature)

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        self._starts = self._starts[index]
        self._cache.batch_select_indices(index)

    def _forward(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        slots = torch.arange(self._width - tokens.shape[1], self._width, device=self.device)
        positions = (slots - self._starts[:, None]).clamp(min=0)
        masks = self._masks(tokens.shape[1]) if self._is_padded else {}
        return self._model.next_logits(tokens, positions, temperature, past_key_values=self._cache, **masks)

    def _masks(self, queries: int) -> dict[str, torch.Tensor]:
        is_token = torch.arange(self._width, device=self.device) >= self._starts[:, None]
        if not self._is_ours:
            return {"attention_mask": is_token}
        seen = causal_mask(queries, self._width, None, self.device) & is_token[:, None, None]
        # Padding sees itself: a softmax over no keys is NaN, and would spread.
        own = torch.eye(self._width, dtype=torch.bool, device=self.device)[-queries:]
        return {"seen": seen | own}


@contextmanager
def whole_weights(model: torch.nn.Module) -> Generator[None]:
    """Gather FSDP's parameters once, and keep them until the block ends. Collective."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with kept_gathered([model]):
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()


class GeneratingPolicyWorker(GeneratingWorker, DTensorPolicyWorker):
    """A `DTensorPolicyWorker` that draws completions too."""

    def decoding(self) -> AbstractContextManager[None]:
        [stage] = self.stages
        return whole_weights(stage)

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Sequences:
        [stage] = self.stages
        return _HfSequences(stage, prompts, self.device)

    def prepare_generation(self, settings: GenerationSettings) -> None:
        super().prepare_generation(settings)
        [stage] = self.stages
        register_fsdp_forward_method(stage, "next_logits")

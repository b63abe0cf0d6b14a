"""Layers that carry a state from token to token, or count positions by themselves, on packed rows.

Gated delta nets (Yang et al. 2024, arXiv 2412.06464), Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) and convolutions read
a row from its first token. So inside such a layer every sequence gets a row of its own:

    [1, W, H] -> rows of similar lengths [G, L, H] -> the layer -> [1, W, H]

Nothing passes from one sequence to another, and every kernel of transformers serves as it is. The padding, at the
right, reaches no token; it at most doubles the layer's work.
"""

import importlib
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.models.policy.attention import OTHER_MIXERS, CuSeqlens, moved

_SHORTEST = 64
"""Rows up to this length share a call: chunked kernels pad to it anyway."""


def isolate_sequences(model: PreTrainedModel) -> None:
    """Make the layers of `OTHER_MIXERS` keep the sequences of a packed row apart, in place.

    Time steps of Mamba-2 have no lower limit, as in vLLM. transformers takes `time_step_min` for one, which is the
    lower limit of new weights alone: logprobs would be off by 1e-4.
    """
    name = OTHER_MIXERS.get(model.config.get_text_config().model_type)
    for module in model.modules():
        if type(module).__name__ == name:
            mixin = _ChunkedOneRowEach if name == "Llama4TextAttention" else _OneRowEach
            module.__class__ = _combined(mixin, type(module))
            if name == "NemotronHMamba2Mixer":
                module.time_step_limit = (0.0, float("inf"))  # pyrefly: ignore[bad-argument-type]


def mixer_class(config: PretrainedConfig) -> type[nn.Module]:
    """transformers' class of the layers of a stateful model in `OTHER_MIXERS`, which keeps packed sequences apart."""
    modeling = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    return _combined(_OneRowEach, getattr(modeling, OTHER_MIXERS[config.model_type]))


@cache
def _combined(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (mixin, kind), {})


class _OneRowEach:
    """Goes before a layer's own class."""

    @torch.compiler.disable
    def forward(
        self, hidden_states: torch.Tensor, *args: Any, cu_seqlens: CuSeqlens | None = None, **kwargs: Any
    ) -> Any:
        """[R, W, H] -> [R, W, H], or a tuple that begins with it."""
        if cu_seqlens is None:
            return self.run(hidden_states, *args, **kwargs)
        assert cu_seqlens.key_index is None and cu_seqlens.query_lengths == cu_seqlens.key_lengths
        shape = hidden_states.shape[:2]
        groups, inverse = _rows(cu_seqlens.query_lengths, hidden_states.device)
        outs: list[torch.Tensor] = []
        is_tuple = False
        for index in groups:

            def take(value: Any, index: torch.Tensor = index) -> Any:
                is_per_token = isinstance(value, torch.Tensor) and value.shape[:2] == shape
                return value.flatten(0, 1)[index] if is_per_token else value

            own = {name: take(value) for name, value in kwargs.items()}
            out = self.run(take(hidden_states), *(take(value) for value in args), **own)
            is_tuple = isinstance(out, tuple)
            outs.append((out[0] if is_tuple else out).flatten(0, 1))
        joined = torch.cat(outs)[inverse].view(*shape, -1)
        return (joined, None) if is_tuple else joined

    def run(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, every row a sequence."""
        layer: Any = super()
        return layer.forward(hidden_states, *args, **kwargs)


class _ChunkedOneRowEach(_OneRowEach):
    """Llama 4's attention. It counts positions from the beginning of a row, and most layers attend within chunks."""

    def run(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        rows, width, _ = hidden_states.shape
        if layer.config.layer_types[layer.layer_idx] == "chunked_attention" and kwargs["past_key_values"] is None:
            size = layer.config.attention_chunk_size
            pieces = [min(size, width - start) for start in range(0, width, size)]
            kwargs["cu_seqlens"] = _chunks(tuple(pieces) * rows, hidden_states.device)
        return super().run(hidden_states, *args, **kwargs)


@lru_cache(maxsize=8)  # all layers of a micro-batch ask for the same
def _rows(lengths: tuple[int, ...], device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Sequences that lie end to end, as rows: their tokens, int64 [G, L] for each group, and the way back, int64 [W].

    A group holds lengths up to `_SHORTEST`, or up to twice its shortest. Rows end with repetitions of their last token.
    """
    starts = torch.tensor((0, *lengths)).cumsum(0)
    by_size: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_size.setdefault(max(_SHORTEST, 1 << (length - 1).bit_length()), []).append(number)
    groups, inverse, taken = [], torch.empty(int(starts[-1]), dtype=torch.int64), 0
    for numbers in by_size.values():
        widest = max(lengths[number] for number in numbers)
        last = torch.tensor([lengths[number] for number in numbers])[:, None] - 1
        groups.append(starts[numbers][:, None] + torch.minimum(torch.arange(widest), last))
        for row, number in enumerate(numbers):
            first = taken + row * widest
            inverse[starts[number] : starts[number + 1]] = torch.arange(first, first + lengths[number])
        taken += len(numbers) * widest
    return [index.to(device) for index in groups], inverse.to(device)


@lru_cache(maxsize=8)
def _chunks(lengths: tuple[int, ...], device: torch.device) -> CuSeqlens:
    return moved(CuSeqlens.of(lengths), lambda tensor: tensor.to(device))

"""Floating-point operations of a model by sequence length, counted from its layers.

A matrix product of [a, b] and [b, c] takes 2abc operations: per token 2 x the weights of every linear layer and
convolution it passes (of experts, those it is routed to), and per pair of positions that attend to each other 2 x heads
x (query width + value width) in each layer of attention. The backward pass takes twice the forward pass (Kaplan et al.
2020, arXiv 2001.08361, section 2.1; Narayanan et al. 2021, arXiv 2104.04473, appendix). Norms, softmax, the recurrent
states of linear attention and of Mamba, and recomputed activations are not counted, so the utilisation is that of the
model (MFU), not of the hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from nemo_rl.models.policy.pretrained import build_on_meta

BACKWARD_FACTOR = 2

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H800": 989.4e12,
    "NVIDIA GH200": 989.4e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2250e12,
    "NVIDIA B300": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA RTX 6000 Ada": 364e12,
}
"""Dense bfloat16 tensor-core operations per second, by prefix of the device's name (vendor data sheets)."""


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""How configurations call the number of experts that a token is routed to."""

WITHOUT_PAIRS = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}
"""`layer_types` in which no position attends to another."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a GPU; None for CPUs and GPUs outside of the table."""
    matches = [name for name in PEAK_FLOPS if device_name.startswith(name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


@dataclass(frozen=True)
class ModelFlops:
    """Operations of the forward pass: `per_token` outside of attention, `per_pair` of positions in each layer."""

    per_token: float
    per_pair: float
    windows: tuple[int | None, ...]  # of each attention layer: its sliding window, None if unlimited

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelFlops:
        """Count the layers of the model that `config` describes. Allocates nothing."""
        text = config.get_text_config()
        model = build_on_meta(text, torch.float32)
        settings = text.to_dict()
        names = {text.attribute_map.get(name, name) for name in EXPERTS_PER_TOKEN} & settings.keys()
        num_routed = max((settings[name] or 0 for name in names), default=0)
        weights = 0.0
        for module in model.modules():
            for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
                if parameter.ndim == 2 or isinstance(module, nn.Conv1d):
                    weights += parameter.numel()
                elif parameter.ndim == 3:  # experts, fused as [experts, out, in]; without routing, factors of a token
                    weights += parameter.numel() * num_routed / len(parameter)
        if text.attribute_map.get("num_attention_heads", "num_attention_heads") not in settings:
            return cls(per_token=2.0 * weights, per_pair=0.0, windows=())  # Mamba, RWKV
        # Architectures use other names in config.json; transformers maps these three attributes to them.
        heads, num_layers, hidden = text.num_attention_heads, text.num_hidden_layers, text.hidden_size
        if settings.get("qk_head_dim") is not None:  # multi-head latent attention: wider queries than values
            width = settings["qk_head_dim"] + settings["v_head_dim"]
        else:
            width = 2 * (settings.get("head_dim") or hidden // heads)
        window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
        kinds = settings.get("layer_types") or ["sliding_attention" if window else "full_attention"] * num_layers
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds if kind not in WITHOUT_PAIRS)
        return cls(per_token=2.0 * weights, per_pair=2.0 * heads * width, windows=windows)

    @property
    def quadratic_weight(self) -> float:
        """Forward operations per squared token relative to those per token: the weight of attention in the cost."""
        return self.per_pair * self.windows.count(None) / 2 / self.per_token

    def forward(self, length: int) -> float:
        """Operations of one forward pass over a sequence of `length` tokens, causal attention."""
        attention = 0.0
        for window, num_layers in Counter(self.windows).items():
            reach = length if window is None else min(window, length)
            # Queries near the beginning see fewer keys than the window has.
            pairs = reach * (reach + 1) / 2 + (length - reach) * reach
            attention += num_layers * self.per_pair * pairs
        return self.per_token * length + attention

    def train(self, lengths: Iterable[int], *, is_frozen: bool = False) -> float:
        """Operations of forward and backward passes over sequences of these lengths.

        `is_frozen`: base weights get no gradient (LoRA), which saves one product of each layer.
        """
        lengths = list(lengths)
        whole = (1 + BACKWARD_FACTOR) * sum(self.forward(length) for length in lengths)
        return whole - (self.per_token * sum(lengths) if is_frozen else 0.0)

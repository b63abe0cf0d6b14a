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
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from nemo_rl.models.policy.pretrained import build_on_meta

BACKWARD_FACTOR = 2


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, from its vendor's data sheet."""

    flops: float  # dense bfloat16 operations per second of the tensor cores
    memory: float  # bytes per second of the device memory
    memory_gb: float
    link: float  # bytes per second to the other GPUs of the node, one way
    host: float  # bytes per second to pinned host memory, one way


GPUS = {
    "NVIDIA A100": Gpu(312e12, 2.04e12, 80, 300e9, 32e9),
    "NVIDIA H100": Gpu(989.4e12, 3.35e12, 80, 450e9, 64e9),
    "NVIDIA H200": Gpu(989.4e12, 4.8e12, 141, 450e9, 64e9),
    "NVIDIA H800": Gpu(989.4e12, 3.35e12, 80, 200e9, 64e9),
    "NVIDIA GH200": Gpu(989.4e12, 4.0e12, 96, 450e9, 450e9),
    "NVIDIA B200": Gpu(2250e12, 8.0e12, 180, 900e9, 64e9),
    "NVIDIA GB200": Gpu(2250e12, 8.0e12, 186, 900e9, 450e9),
    "NVIDIA B300": Gpu(2250e12, 8.0e12, 270, 900e9, 128e9),
    "NVIDIA L40S": Gpu(362e12, 0.864e12, 48, 32e9, 32e9),
    "NVIDIA L4": Gpu(121e12, 0.3e12, 24, 32e9, 32e9),
    "NVIDIA A10": Gpu(125e12, 0.6e12, 24, 32e9, 32e9),
    "NVIDIA RTX 6000 Ada": Gpu(364e12, 0.96e12, 48, 32e9, 32e9),
}
"""By prefix of the device's name, for the SXM board where there are several."""


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""How configurations call the number of experts that a token is routed to."""

WITHOUT_PAIRS = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}
"""`layer_types` in which no position attends to another."""


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU of this name; None for CPUs and GPUs outside of the table."""
    matches = [name for name in GPUS if device_name.startswith(name)]
    return GPUS[max(matches, key=len)] if matches else None


@dataclass(frozen=True)
class ModelFlops:
    """Operations of the forward pass: `per_token` outside of attention, `per_pair` of positions in each layer."""

    per_token: float
    per_pair: float
    windows: tuple[int | None, ...]  # of each attention layer: its sliding window, None if unlimited
    num_parameters: int
    cache_size: int  # numbers that a token has in the KV cache

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
        counted: dict[str, Any] = {
            "per_token": 2.0 * weights,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        if text.attribute_map.get("num_attention_heads", "num_attention_heads") not in settings:
            return cls(**counted, per_pair=0.0, windows=(), cache_size=0)  # Mamba, RWKV
        # Architectures use other names in config.json; transformers maps these three attributes to them.
        heads, num_layers, hidden = text.num_attention_heads, text.num_hidden_layers, text.hidden_size
        if settings.get("qk_head_dim") is not None:  # multi-head latent attention: wider queries than values
            width = settings["qk_head_dim"] + settings["v_head_dim"]
        else:
            width = 2 * (settings.get("head_dim") or hidden // heads)
        window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
        kinds = settings.get("layer_types") or ["sliding_attention" if window else "full_attention"] * num_layers
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds if kind not in WITHOUT_PAIRS)
        latent = settings.get("kv_lora_rank")
        key_values = 2 * (settings.get("num_key_value_heads") or heads) * (settings.get("head_dim") or hidden // heads)
        cached = latent + settings["qk_rope_head_dim"] if latent else key_values
        return cls(**counted, per_pair=2.0 * heads * width, windows=windows, cache_size=cached * len(windows))

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

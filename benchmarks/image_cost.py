"""The cost of an image in training: seconds, bytes of its pixels, and memory of its activations, against text.

    python benchmarks/image_cost.py [--sides 112,224,336] [--layers 2] [--repeats 3]

The layers are those of Qwen2.5-VL-3B (widths, heads, windows), `--layers` of them in tower and language model, with
random weights in float32 on one thread. Each side of a square image gives: CPU milliseconds of the processor, bytes of
the pixels that travel to engine and policy, tokens, CPU milliseconds of the forward and backward pass of the tower, and
bytes that the pass keeps for its backward pass, beside the weights. The last line compares the seconds of an image, in
those of text tokens, with the weight that the plan of a step gives it (`ModelFlops.cost_weights`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from nemo_rl.models.policy.flops import ModelFlops

TEXT_TOKENS = 64


def model_of(layers: int) -> Qwen2_5_VLForConditionalGeneration:
    """The widths of Qwen2.5-VL-3B; a small vocabulary."""
    text = {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    vision = {"depth": layers, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    config = Qwen2_5_VLConfig(
        text_config={**text, "num_hidden_layers": layers, "vocab_size": 512, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [layers - 1]},
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def measured(forward: Callable[[], torch.Tensor], weights: set[int], repeats: int) -> tuple[float, int]:
    """(least CPU seconds of a forward and backward pass, bytes of the storages that it keeps, without `weights`)."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = forward().square().mean()
        loss.backward()
        seconds.append(time.process_time() - began)
    return min(seconds), sum(kept.values())


def features(model: Any, made: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(model.model.get_image_features(**made).pooler_output))


def read(model: Any, states: torch.Tensor) -> torch.Tensor:
    return model.model.language_model(inputs_embeds=states).last_hidden_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="112,224,336")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(options.layers)
    processor = Qwen2VLImageProcessor(size={"shortest_edge": 56**2, "longest_edge": 2048**2})
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    states = torch.randn(1, TEXT_TOKENS, 2048)
    text_s, text_bytes = measured(partial(read, model, states), weights, options.repeats)
    per_token_s, kept = text_s / TEXT_TOKENS, text_bytes / TEXT_TOKENS
    pixel_weight = ModelFlops.of(model.config).cost_weights["pixel_weight"]
    print(f"text: {1e3 * per_token_s:.2f} ms a token, which keeps {kept / 1e3:.0f} kB")
    ratios = []
    for side in map(int, options.sides.split(",")):
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))
        began = time.process_time()
        made = processor(images=[image], return_tensors="pt")
        processed_s = time.process_time() - began
        seen_s, seen_bytes = measured(partial(features, model, made), weights, options.repeats)
        ratios.append(seen_s / per_token_s / (pixel_weight * side**2))
        tokens = int(made["image_grid_thw"].prod()) // 4
        pixels = made["pixel_values"].numel() * 4
        cost = f"{1e3 * seen_s:.0f} ms, as {seen_s / per_token_s:.1f} text tokens, keeps {seen_bytes / 1e6:.1f} MB"
        sizes = f"processor {1e3 * processed_s:.1f} ms, pixels {pixels / 1e6:.2f} MB, {tokens} tokens"
        print(f"{side} x {side}: {sizes}; tower {cost}")
    print("seconds of an image over its weight in the plan: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()

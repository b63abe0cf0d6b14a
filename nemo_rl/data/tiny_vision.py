"""The model `tiny:shapes`: a Qwen2.5-VL with its processor, which answers questions on images of coloured shapes.

Its image processor turns 16 x 16 pixels into one token. Two layers of vision tower see the patches of 8 x 8 pixels, the
first within windows of 2 x 2 tokens, the second all of them. Everything else is as in `tiny_model.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from nemo_rl.data.chat.images import image_parts, read_image, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_rl.data.tiny_model import TinyVisionRecipe

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    f"{{%- if part['type'] == 'image' -%}}{IMAGE}{{%- else -%}}{{{{- part['text'] -}}}}{{%- endif -%}}"
    "{%- endfor -%}{%- endif -%}{{- '<eos>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
MAX_SIDE = 256  # pixels; larger images are made smaller


def build_processor(recipe: TinyVisionRecipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The processor around a tokenizer that has `VISION_TOKENS`."""
    token = recipe.patch_size * recipe.merge_size
    sizes: dict[str, Any] = {"patch_size": recipe.patch_size, "merge_size": recipe.merge_size}
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size={"shortest_edge": token**2, "longest_edge": MAX_SIDE**2}, **sizes),
        tokenizer,
        Qwen2VLVideoProcessor(**sizes),  # never used; the class requires it
        chat_template=tokenizer.chat_template,
    )


def vision_config(recipe: TinyVisionRecipe, tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]) -> Any:
    """The configuration of the recipe's model; `text` are the settings of its language model."""
    ids = tokenizer.get_vocab()
    quarter = recipe.head_dim // 8  # time gets a quarter of the rotary frequencies, height and width the rest
    half = (recipe.head_dim // 2 - quarter) // 2
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [quarter, half, half]}
    return Qwen2_5_VLConfig(
        text_config={**text, "intermediate_size": 2 * recipe.hidden_size, "rope_parameters": positions},
        vision_config={
            "depth": recipe.vision_layers,
            "hidden_size": recipe.vision_size,
            "intermediate_size": 2 * recipe.vision_size,
            "num_heads": recipe.vision_size // recipe.head_dim,
            "patch_size": recipe.patch_size,
            "spatial_merge_size": recipe.merge_size,
            "window_size": 2 * recipe.merge_size * recipe.patch_size,
            "fullatt_block_indexes": [recipe.vision_layers - 1],
            "out_hidden_size": recipe.hidden_size,
            "initializer_range": recipe.initializer_range,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )


def build_model(recipe: TinyVisionRecipe, config: Any) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained float32 model whose weights depend on `recipe.seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen2_5_VLForConditionalGeneration(config)


def encode(conversations: list[list[dict[str, Any]]], processor: Any) -> dict[str, torch.Tensor]:
    """Inputs of the model for conversations of a question with images and an answer, right-padded; `labels` are -100
    on all but the answer and its end."""
    texts, images, answers = [], [], []
    for user, assistant in conversations:
        parts = image_parts(user["content"])
        images += [read_image(part["image"]) for part in parts]
        answer = f"{assistant['content']}<eos>"
        texts.append(f"<|user|>{IMAGE * len(parts)}{text_of(user['content'])}<eos><|assistant|>{answer}")
        answers.append(len(processor.tokenizer(answer, add_special_tokens=False)["input_ids"]))
    made = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    labels = torch.full_like(made["input_ids"], -100)
    for row, (length, answer) in enumerate(zip(made["attention_mask"].sum(1).tolist(), answers, strict=True)):
        labels[row, length - answer : length] = made["input_ids"][row, length - answer : length]
    return {**made, "labels": labels}


def loss(model: Any, conversations: list[list[dict[str, Any]]], processor: Any) -> torch.Tensor:
    """The mean negative log-likelihood of the answers of a batch."""
    inputs = encode(conversations, processor)
    targets = inputs.pop("labels")[:, 1:]
    hidden = model.model(**inputs).last_hidden_state[:, :-1]
    learned = targets != -100
    return F.cross_entropy(model.lm_head(hidden[learned]), targets[learned])

"""Images of a prompt -> vLLM's form of inputs that are processed already.

The pixels come from the process that made them, through Ray's object store, once for each image and engine. vLLM splits
them by image and batches them as after its own processing, so it needs to know only which of them belong together.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm.config import ModelConfig
from vllm.inputs.engine import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange

from nemo_rl.types import PREVIEW, GenerationRequest, ImageSpan, Pixels

MODALITY = "image"
MAX_KEPT = 256  # images whose pixels are kept for further requests; a group's requests come close together


class ImagePrompts:
    """Makes the prompts of one engine."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._processor: Any = None  # knows which inputs of the model belong to which image
        self._kept: OrderedDict[str, asyncio.Future[MultiModalKwargsItem]] = OrderedDict()  # by digest

    async def items(self, request: GenerationRequest) -> list[MultiModalKwargsItem]:
        """The images of a prompt, in order, once they are here."""
        return [await self._item(span.digest, request.pixels[span.digest]) for span in request.images]

    def prompt(self, request: GenerationRequest, items: list[MultiModalKwargsItem], salt: str) -> Any:
        """The prompt with its images. `salt` names the weights: features of other weights are not used again."""
        token_ids = np.asarray(request.prompt_token_ids)
        return mm_input(
            prompt_token_ids=request.prompt_token_ids,
            mm_kwargs=MultiModalKwargsItems({MODALITY: items}),
            mm_hashes={MODALITY: [f"{span.digest} {salt}" for span in request.images]},
            mm_placeholders={MODALITY: [self._place(span, token_ids) for span in request.images]},
            cache_salt=salt,
        )

    def _place(self, span: ImageSpan, token_ids: np.ndarray) -> PlaceholderRange:
        stands_for = token_ids[span.start : span.start + span.length] == self._config.hf_config.image_token_id
        is_embed = None if stands_for.all() else torch.from_numpy(stands_for)
        return PlaceholderRange(offset=span.start, length=span.length, is_embed=is_embed)

    async def _item(self, digest: str, ref: Any) -> MultiModalKwargsItem:
        kept = self._kept.get(digest)
        # The object of a failed one may have been lost with the process that made it; this request has its own.
        if kept is None or (kept.done() and kept.exception() is not None):
            self._kept[digest] = asyncio.ensure_future(self._fetch(ref))
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return await asyncio.shield(self._kept[digest])

    async def _fetch(self, ref: Any) -> MultiModalKwargsItem:
        pixels: Pixels = await ref
        if self._processor is None:
            self._processor = MULTIMODAL_REGISTRY.create_processor(self._config)
        # A copy: arrays of the object store are read-only and would be held there.
        own = {name: torch.from_numpy(np.array(value)) for name, value in pixels.items() if name != PREVIEW}
        if "image_grid_thw" not in own:  # tiles of one size: vLLM takes them along one dimension, with their number
            own = {
                name: value.flatten(0, value.ndim - (4 if name == "pixel_values" else 3)) for name, value in own.items()
            }
            own["num_patches"] = torch.tensor([len(own["pixel_values"])])
        inputs = BatchFeature(own)
        fields = self._processor._get_mm_fields_config(inputs, {})
        [item] = MultiModalKwargsItems.from_hf_inputs(inputs, fields)[MODALITY]
        return item

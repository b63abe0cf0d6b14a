"""Images as the processor of a vision-language model makes them, from its config.json alone: no processor is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl.models.policy.vision.families import FAMILIES, image_token_id
from nemo_rl.types import ImageSpan, Pixels

SIDE = 1024
"""Pixels along each side of an image, rounded to whole tokens, for models that take any size."""

TILES = 17
"""Of SmolVLM: a large image in 4 x 4 pieces, and the whole image once more."""


@dataclass(frozen=True)
class SampleImage:
    """The image that every sample of a trace has. No two samples share theirs."""

    pixels: Pixels
    num_tokens: int
    num_pixels: int
    token_id: int

    @classmethod
    def of(cls, config: Any) -> SampleImage:
        """For the vision-language model of `config`."""
        vision, family = config.vision_config, FAMILIES[config.model_type]
        if family.has_grid_positions:
            pixels, num_patches = _patches(vision)
        else:
            tiles = TILES if family.pixels_dim else 1
            pixels = _tiles(vision.image_size, tiles, has_mask=bool(family.pixels_dim))
            num_patches = tiles * (vision.image_size // vision.patch_size) ** 2
        token_id = image_token_id(config)
        assert token_id is not None
        num_tokens = round(num_patches / family.patches_per_token(config))
        return cls(pixels, num_tokens, num_patches * vision.patch_size**2, token_id)

    def span(self, digest: str, start: int) -> ImageSpan:
        return ImageSpan(digest=digest, start=start, length=self.num_tokens, num_pixels=self.num_pixels)


def _patches(vision: Any) -> tuple[Pixels, int]:
    """Of Qwen-VL: patches one after the other, a still image repeated to as many frames as a patch has."""
    side = SIDE // (vision.patch_size * vision.spatial_merge_size) * vision.spatial_merge_size
    numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
    values = np.zeros((side**2, numbers), np.float32)
    return {"pixel_values": values, "image_grid_thw": np.array([[1, side, side]])}, side**2


def _tiles(side: int, number: int, *, has_mask: bool) -> Pixels:
    """Of models that see squares of a size of their own."""
    if not has_mask:
        return {"pixel_values": np.zeros((number, 3, side, side), np.float32)}
    mask = np.ones((1, number, side, side), np.int64)
    return {"pixel_values": np.zeros((1, number, 3, side, side), np.float32), "pixel_attention_mask": mask}

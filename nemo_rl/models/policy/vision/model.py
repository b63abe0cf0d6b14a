"""Vision-language models: the images of a micro-batch, and the passes of their tower and language model.

    rows with images -> `VisionInputs.build` -> `ImageBatch` -> tower and projector -> features [F, H], in place of the
    embeddings of the tokens that stand for images -> language model, with multimodal rotary positions [3, R, W]

Where features go follows from the spans of the images, not from token ids: a token that the model samples in an answer
is text, also if it is the one that stands for images. An image that several rows share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding
from transformers import PretrainedConfig

from nemo_rl.models.policy.batch.row_layout import ImageBatch, ModelBatch, RowLayout
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.vision.families import FAMILIES
from nemo_rl.types import PREVIEW, ImageSpan, Pixels

# -- the images of a micro-batch


class VisionInputs:
    """Builds the `ImageBatch` of micro-batches of one model.

    `blank`: the pixels of a small image. It takes the place of the images of a micro-batch that has none, so that all
    ranks pass the same sharded layers and every weight of the tower gets a gradient, if only zero.
    """

    def __init__(self, config: PretrainedConfig, blank: Pixels) -> None:
        self.config, self.blank = config, blank
        self.family = FAMILIES[config.model_type]

    def build(
        self, layout: RowLayout, token_ids: Sequence[torch.Tensor], images: Sequence[Sequence[tuple[ImageSpan, Pixels]]]
    ) -> ImageBatch:
        """The images of a micro-batch. `images` has the images of each row, in the order of their tokens."""
        pixels: dict[str, Pixels] = {}
        first: dict[str, int] = {}  # feature of each distinct image
        num_features = 0
        features, positions, spans = [], [], []
        for ids, own in zip(token_ids, images, strict=True):
            feature = torch.full((len(ids),), -1)
            spans.append([])
            for span, made in own:
                inside = ids[span.start : span.start + span.length]
                stands_for = span.start + (inside == self.config.image_token_id).nonzero()[:, 0]
                if span.digest not in pixels:
                    pixels[span.digest], first[span.digest] = made, num_features
                    num_features += len(stands_for)
                feature[stands_for] = first[span.digest] + torch.arange(len(stands_for))
                if self.family.sees_both_ways:
                    spans[-1] += _runs(stands_for)
            features.append(feature)
            positions.append(self.positions(len(ids), own))
        distinct = list(pixels.values()) or [self.blank]
        joined = {
            name: np.concatenate([image[name] for image in distinct], axis=self.family.pixels_dim)
            for name in distinct[0]
            if name != PREVIEW
        }
        return ImageBatch(
            pixels={name: torch.from_numpy(values) for name, values in joined.items()},
            features=layout.place(features, fill=-1),
            positions=layout.place(positions, fill=0).permute(2, 0, 1).contiguous(),
            num_distinct=len(pixels),
            whole_spans=layout.whole_spans([len(ids) for ids in token_ids], spans),
        )

    def positions(self, length: int, images: Sequence[tuple[ImageSpan, Pixels]]) -> torch.Tensor:
        """Rotary positions of a sequence: int64 [T, 3], of time, height and width (Wang et al. 2024, arXiv 2409.12191).

        Text counts up by one in all three. The tokens of an image have the positions of its rows and columns, and text
        after it goes on after the largest of them.
        """
        if not self.family.has_grid_positions:
            return torch.arange(length)[:, None].expand(-1, 3)
        merge = self.config.vision_config.spatial_merge_size  # patches of one token along one side of an image
        pieces, at, next_position = [], 0, 0
        for span, made in images:
            pieces.append(_text_positions(next_position, span.start - at))
            next_position += span.start - at
            frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
            grid = (frames, rows // merge, columns // merge)
            place = torch.stack(torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij"), dim=-1)
            pieces.append(place.flatten(0, 2) + next_position)
            next_position += max(grid[1:])
            at = span.start + span.length
        pieces.append(_text_positions(next_position, length - at))
        return torch.cat(pieces)


def _runs(places: torch.Tensor) -> list[tuple[int, int]]:
    """[3, 4, 5, 8, 9] -> [(3, 6), (8, 10)]: the parts of an image that was cut into several."""
    borders = (places.diff() > 1).nonzero()[:, 0] + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in places.tensor_split(borders)]


def _text_positions(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length)[:, None].expand(-1, 3)


# -- passes


class VisionLogprobModel(LogprobModel):
    """A `LogprobModel` of a vision-language model."""

    def states(self, batch: ModelBatch) -> torch.Tensor:
        assert batch.images is not None
        model: Any = self.hf.base_model
        images = batch.images
        embedded = model.get_input_embeddings()(batch.input_ids)
        seen = model.get_image_features(**images.pixels, return_dict=True)
        features = _flat_features(seen.pooler_output).to(embedded.dtype)
        is_image = images.features >= 0
        # Not features[...]: its backward pass on a CPU adds the rows that share an image in the order of threads.
        embedded = torch.where(is_image[..., None], embedding(images.features.clamp(min=0), features), embedded)
        further = {}
        if (deep := seen.get("deepstack_features")) is not None:  # added after the first layers, Qwen3-VL
            index = images.features[is_image]
            further = {
                "visual_pos_masks": is_image,
                "deepstack_visual_embeds": [embedding(index, _flat_features(layer)) for layer in deep],
            }
        has_grid_positions = FAMILIES[self.hf.config.model_type].has_grid_positions
        return model.get_decoder()(
            inputs_embeds=embedded,
            position_ids=images.positions if has_grid_positions else images.positions[0],
            use_cache=False,
            cu_seqlens=batch.cu_seqlens,
            whole_spans=images.whole_spans,
            **further,
        ).last_hidden_state


def _flat_features(features: Any) -> torch.Tensor:
    """[N, H] from one tensor [tokens, H] per image, or [images, tokens of each, H]."""
    if not isinstance(features, torch.Tensor):
        return torch.cat(list(features))
    return features.flatten(0, -2)

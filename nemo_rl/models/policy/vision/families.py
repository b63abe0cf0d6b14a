"""Which vision-language models there are, how they take images, and the parts that they consist of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

VISION_TOWER, PROJECTOR, LANGUAGE_MODEL = PARTS = ("vision_tower", "projector", "language_model")
"""The names in `policy.freeze`. The projector turns the tower's features into states of the language model."""


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """How models of one `model_type` take images."""

    tower: tuple[str, ...]  # prefixes of parameters inside the base model; `projector` has precedence
    projector: tuple[str, ...]
    has_grid_positions: bool = False  # rotary positions of an image count its rows and columns
    pixels_dim: int = 0  # the dimension of the pixels along which images follow one another
    sees_both_ways: bool = False  # each token of an image attends to all of that image, not only to those before it
    patches_per_token: Callable[[Any], float] = lambda config: config.vision_config.spatial_merge_size**2
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    """Of tensors outside the model, and in it; the first that fits counts. What is written and sent has the first."""


_QWEN = VisionFamily(
    tower=("visual.",),
    projector=("visual.merger.",),
    has_grid_positions=True,
    stored_prefixes=(
        ("model.language_model.", "model.language_model."),
        ("model.visual.", "model.visual."),
        ("model.", "model.language_model."),
        ("visual.", "model.visual."),
    ),
)
FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": VisionFamily(
        tower=("visual.",), projector=("visual.merger.", "visual.deepstack_merger_list."), has_grid_positions=True
    ),
    "smolvlm": VisionFamily(
        tower=("vision_model.",),
        projector=("connector.",),
        pixels_dim=1,
        patches_per_token=lambda config: config.scale_factor**2,
    ),
    "gemma3": VisionFamily(
        tower=("vision_tower.",),
        projector=("multi_modal_projector.",),
        sees_both_ways=True,
        patches_per_token=lambda config: (
            (config.vision_config.image_size // config.vision_config.patch_size) ** 2 / config.mm_tokens_per_image
        ),
        stored_prefixes=(
            ("model.vision_tower.vision_model.", "model.vision_tower."),
            ("vision_tower.vision_model.", "model.vision_tower."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
            ("language_model.model.", "model.language_model."),
        ),
    ),
}
"""By `model_type` of config.json."""


def sees_images(config: PretrainedConfig) -> bool:
    """Whether it is the configuration of a vision-language model, known here or not."""
    return "vision_config" in config.sub_configs and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def image_token_id(config: Any) -> int | None:
    """The token that stands for images; None for a model of text."""
    return config.image_token_id if sees_images(config) else None


def name_in_model(name: str, config: PretrainedConfig) -> str:
    """The name that a tensor of a checkpoint has in the model of `config`."""
    family = FAMILIES.get(config.model_type)
    for stored, known in family.stored_prefixes if family is not None else ():
        if name.startswith(stored):
            return known + name.removeprefix(stored)
    return name


def stored_name(name: str, config: PretrainedConfig) -> str:
    """The name of a tensor of the model of `config` in files that are written, and in engines."""
    family = FAMILIES.get(config.model_type)
    for stored, known in family.stored_prefixes[:1] if family is not None else ():
        if name.startswith(known):
            return stored + name.removeprefix(known)
    return name


def part_of(name: str, family: VisionFamily) -> str:
    """The part of `PARTS` that a parameter belongs to, given its name in the whole model."""
    inner = name.removeprefix("model.")
    if inner.startswith(family.projector):
        return PROJECTOR
    return VISION_TOWER if inner.startswith(family.tower) else LANGUAGE_MODEL


def language_modules(model: nn.Module, config: PretrainedConfig) -> dict[str, nn.Module]:
    """The modules of the model of `config` by name, without a tower and its projector."""
    family = FAMILIES.get(config.model_type)
    return {
        name: module
        for name, module in model.named_modules()
        if family is None or part_of(f"{name}.", family) == LANGUAGE_MODEL
    }

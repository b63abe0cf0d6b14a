"""Reward and value models: sequence classifiers with one label, of transformers or, with images, our own.

    hidden states [N, H] -> score, one linear layer without bias [1, H] -> [N]

The `architectures` of a configuration decide what a model is. `scalar_config` turns the configuration of a causal
language model into one of a reward model. Everything that builds a model uses `auto_class`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import torch
import xxhash
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.models.policy.weight_loading import copy_whole

HEAD = "score"
HEAD_WEIGHT = f"{HEAD}.weight"

_CLASSIFIER = "ForSequenceClassification"
_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "Model")  # ends of their names, with a head or without
_LANGUAGE_HEADS = ("lm_head", "embed_out")
_HEAD_WORDS = ("head", "classifier", "reward", HEAD)  # `v_head`, `value_head`, `classification_head`, ...
_DEFAULT_STD = 0.02  # the default of transformers


def is_scalar(config: PretrainedConfig) -> bool:
    """Whether `config` describes a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def auto_class(config: PretrainedConfig) -> Any:
    """The class that builds (`from_config`) and loads (`from_pretrained`) the model of `config`."""
    if is_scalar(config):
        return _vision_classifier(type(config)) if sees_images(config) else AutoModelForSequenceClassification
    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


@functools.cache
def _vision_classifier(kind: type[PretrainedConfig]) -> Any:
    """A vision-language model with a score in place of its head: transformers has none."""
    base: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]

    class Classifier(base):
        _tied_weights_keys: ClassVar = {}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            del self.lm_head
            self.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)

        @classmethod
        def from_config(cls, config: Any, **how: Any) -> Any:
            return cls._from_config(config, **how)

    Classifier.__name__ = base.__name__.removesuffix("ForConditionalGeneration") + _CLASSIFIER
    return Classifier


def scalar_config(config: PretrainedConfig, policy: PolicyConfig, pad_token_id: int | None = None) -> PretrainedConfig:
    """A copy of `config`, of a causal language model or a reward model, as a reward model with one output.

    `pad_token_id`: the tokenizer's, by which transformers finds the last token of a padded row; None keeps the present.

    Raises:
        ValueError: a classifier of several labels, or an architecture without a classifier.
    """
    known = _class_name(config, policy)
    if is_scalar(config) and config.num_labels != 1:
        labels = ", ".join(map(str, list((config.id2label or {}).values())[:4]))
        raise ValueError(
            f"{policy.key('model_name')}: {policy.model_name!r} is a classifier of {config.num_labels} labels "
            f"({labels}), but a reward or value model gives one number (num_labels 1 in its config.json); name a "
            "reward model, or the language model it was made from: its score is then drawn at random"
        )
    config = copy.deepcopy(config)
    config.architectures = [known]
    # transformers sizes the head by it.
    config.num_labels = 1
    if pad_token_id is not None:
        # Without it the classifiers of transformers refuse batches of several rows.
        config.get_text_config().pad_token_id = pad_token_id
    return config


def _class_name(config: PretrainedConfig, policy: PolicyConfig) -> str:
    """The name of the classifier of this architecture. ValueError if there is none."""
    kind, is_vision = type(config), sees_images(config)
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not is_vision:
        raise ValueError(
            f"{policy.key('reward_model_cfg.enabled')}=true: transformers has no sequence classifier of "
            f"{config.model_type!r} models, which {policy.model_name!r} is; use a model of another family, such as "
            "Llama, Qwen, Mistral or Gemma"
        )
    given = config.architectures or []
    if given and not any(name.endswith((*_LANGUAGE_MODELS, _CLASSIFIER)) for name in given):
        raise ValueError(
            f"{policy.key('model_name')}: {policy.model_name!r} is a {given[0]}, neither a causal language model nor "
            "a sequence classifier, so no reward model can be made of it"
        )
    if is_vision:
        return _vision_classifier(kind).__name__
    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind]
    return found.__name__


def check_scalar_head(hf: PreTrainedModel) -> None:
    """ValueError unless the head is one linear layer on the last hidden states, with one output and no bias."""
    head = hf._modules.get(HEAD)
    others = others_with_weights(hf, head)
    # `LogprobModel.score_weight` is the weight alone: a bias would be missing in every score.
    is_plain = isinstance(head, nn.Linear) and head.bias is None and head.out_features == 1
    if not is_plain or others:
        raise ValueError(
            f"{type(hf).__name__} has another head than one linear layer `{HEAD}` with one output and no bias "
            f"({', '.join(others) or head}); use a model of another family, such as Llama, Qwen, Mistral or Gemma"
        )


def others_with_weights(hf: PreTrainedModel, head: nn.Module | None) -> list[str]:
    """Names of the modules with weights beside the base model and the head."""
    children = [(name, child) for name, child in hf.named_children() if child not in (hf.base_model, head)]
    return [name for name, child in children if next(child.parameters(), None) is not None]


def output_module(hf: PreTrainedModel) -> nn.Module | None:
    """The head of a language, reward or value model; None for a pipeline stage without one."""
    return hf._modules[HEAD] if is_scalar(hf.config) else hf.get_output_embeddings()


@torch.no_grad()
def draw_head(weight: torch.Tensor, config: PretrainedConfig, seed: int) -> None:
    """Initialise a new head: normal, with the standard deviation of the architecture.

    Every rank draws the whole `weight` [1, H] from `seed` and keeps its part, so it does not depend on their number.
    """
    settings = config.get_text_config().to_dict()
    std = settings.get("initializer_range") or _DEFAULT_STD
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{HEAD_WEIGHT}".encode()) >> 1)
    copy_whole(weight, torch.empty(weight.shape, dtype=torch.float32).normal_(std=std, generator=generator))


def foreign_heads(names: set[str]) -> list[str]:
    """Names of a checkpoint's tensors that belong to a head other than a language model's or `score`.

    Other unknown tensors, such as layers for speculative decoding, are not listed.
    """
    first_parts = {name: name.partition(".")[0] for name in names if name != HEAD_WEIGHT}
    return sorted(
        name
        for name, first in first_parts.items()
        if first not in _LANGUAGE_HEADS and any(word in first for word in _HEAD_WORDS)
    )

"""Reward and value models of Megatron: one number per token in place of logits.

    last hidden states [N, H] -> output_layer.weight [1, H], whole on every rank -> [N]

In files it is `score.weight`, as in the sequence classifiers of transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from nemo_rl.models.policy.logit_tiles import OutputHead
from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel
from nemo_rl.models.policy.megatron.mapping import OUTPUT_LAYER, HFTensor, MappedTensor, WeightMap
from nemo_rl.models.policy.megatron.shard_layout import Replicated, ShardPlace
from nemo_rl.models.policy.megatron.weights import load_weights
from nemo_rl.models.policy.scalar_head import HEAD_WEIGHT, draw_head, is_scalar
from nemo_rl.models.policy.weight_loading import StoredModel

logger = logging.getLogger(__name__)


class ScalarHead(MegatronModule):
    """Weight [1, H] of a linear layer, equal on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))


class PolicyScalarModel(PolicyGPTModel):
    """A stage of a reward or value model: a `PolicyGPTModel` with a `ScalarHead`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # A tied output layer is the embedding, which has no other use here.
        super().__init__(config, *args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ScalarHead(config)

    def output_head(self) -> OutputHead:
        """Not of this model."""
        raise TypeError("a reward or value model has no logits")

    def score_weight(self) -> torch.Tensor:
        """[1, H]."""
        return self.output_layer.weight


def stage_class(model: PretrainedConfig) -> type[PolicyGPTModel]:
    """What a stage of the model of `config` is built as."""
    return PolicyScalarModel if is_scalar(model) else PolicyGPTModel


def scalar_map(language: WeightMap, hidden_size: int) -> WeightMap:
    """The mapping of the classifier that is made of a language model with mapping `language`."""
    score = MappedTensor(template=OUTPUT_LAYER, sources=(HFTensor(HEAD_WEIGHT, (1, hidden_size)),), layout=Replicated())
    entries = tuple(entry for entry in language.entries if entry.template != OUTPUT_LAYER)
    extra = re.compile(rf"{language.extra.pattern}|^lm_head\.weight$")
    return replace(language, entries=(*entries, score), is_tied=False, extra=extra)


def without_score(weights: WeightMap) -> WeightMap:
    """What every checkpoint that a classifier is made of holds: a language model has no score."""
    entries = tuple(entry for entry in weights.entries if entry.template != OUTPUT_LAYER)
    return replace(weights, entries=entries, extra=re.compile(rf"{weights.extra.pattern}|^{re.escape(HEAD_WEIGHT)}$"))


def load_scalar_weights(
    parameters: Mapping[str, torch.Tensor],
    weight_map: WeightMap,
    place: ShardPlace,
    model_path: str,
    config: PretrainedConfig,
    seed: int,
) -> None:
    """`load_weights` of a classifier; of a language model, the score is drawn from `seed`. Collective."""
    with StoredModel(model_path) as stored:
        names = stored.names
    assert names is not None, "other files are converted first"
    if HEAD_WEIGHT in names:
        load_weights(parameters, weight_map, place, model_path)
        return
    others = {name: parameter for name, parameter in parameters.items() if name != OUTPUT_LAYER}
    load_weights(others, without_score(weight_map), place, model_path)
    if OUTPUT_LAYER in parameters:
        draw_head(parameters[OUTPUT_LAYER], config, seed)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # which has the last stage
            logger.info("%s has no %s, as a language model: drawn from seed %d", model_path, HEAD_WEIGHT, seed)

"""Rotary embeddings of a Hugging Face configuration in Megatron's modules (Su et al. 2021, arXiv 2104.09864).

Frequencies are those that transformers computes. What some kinds multiply into cosine and sine (YaRN's attention
factor, Peng et al. 2023, arXiv 2309.00071, section 3.4) becomes a factor of the scores where all features rotate.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED_KINDS = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """Inverse frequencies, float32 [rotated features / 2], and the factor of cosine and sine."""

    frequencies: torch.Tensor
    attention_factor: float


def rope_of(model: PretrainedConfig, head_dim: int) -> Rope:
    """Rotary embeddings of heads of which all `head_dim` features rotate.

    Raises:
        ValueError: a part of the features rotates, or frequencies change with the length of a sequence.
    """
    config = model.get_text_config()
    given, kind = config.rope_parameters, config.rope_parameters["rope_type"]
    if kind not in _FIXED_KINDS:
        raise _refused(config, f"rope_type={kind!r}", "rope_type to one of " + ", ".join(_FIXED_KINDS))
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(config, f"partial_rotary_factor={given['partial_rotary_factor']}", "partial_rotary_factor to 1")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return Rope(1.0 / given["rope_theta"] ** exponents, 1.0)
    return Rope(*ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu")))


def latent_rope(model: PretrainedConfig) -> dict[str, Any]:
    """What Megatron's configuration of latent attention says of it: there, a part of each head's features rotates.

    Raises:
        ValueError: see `rope_of`; YaRN without rounding, or with a factor that Megatron cannot express.
    """
    config = model.get_text_config()
    given, kind = config.rope_parameters, config.rope_parameters["rope_type"]
    rope = rope_of(model, config.qk_rope_head_dim)
    values: dict[str, Any] = {"rope_type": "rope", "rotary_base": given["rope_theta"]}
    if kind == "default":
        return values | {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    factor, all_dim = given["factor"], given.get("mscale_all_dim") or 0.0
    values |= {"rotary_scaling_factor": factor, "mscale_all_dim": all_dim}
    if kind != "yarn":
        return values
    if not given.get("truncate", True):
        raise _refused(config, "truncate=False", "truncate to true")
    if factor <= 1:
        if rope.attention_factor != 1.0:
            raise _refused(config, f"attention_factor={rope.attention_factor}", "attention_factor to 1")
        mscale = 1.0
    else:  # Megatron multiplies by (0.1 mscale log factor + 1) / (0.1 mscale_all_dim log factor + 1)
        unit = 0.1 * math.log(factor)
        mscale = (rope.attention_factor * (unit * all_dim + 1.0) - 1.0) / unit
    return values | {
        "rope_type": "yarn",
        "mscale": mscale,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "original_max_position_embeddings": given["original_max_position_embeddings"],
    }


def set_frequencies(stage: Any, model: PretrainedConfig, device: torch.device) -> None:
    """Give a stage (a GPTModel) the model's frequencies, in place of those that Megatron made of its base."""
    if not stage.config.multi_latent_attention:
        stage.rotary_pos_emb.inv_freq = rope_of(model, stage.config.kv_channels).frequencies.to(device)
        return
    frequencies = rope_of(model, stage.config.qk_pos_emb_head_dim).frequencies.to(device)
    for layer in stage.decoder.layers:
        embedding = layer.self_attention.rotary_pos_emb
        if not isinstance(embedding, YarnRotaryEmbedding):  # that one computes its own in every pass
            embedding.inv_freq = frequencies


def _refused(config: PretrainedConfig, what: str, change: str) -> ValueError:
    return ValueError(
        f"rope_parameters with {what} of this {config.model_type} model are not known to the Megatron backend; train "
        f"it with policy.dtensor_cfg, or set policy.hf_config_overrides.rope_parameters.{change}"
    )

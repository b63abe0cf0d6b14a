"""Whether a model can be trained with Megatron Core as asked, found on the driver before any worker loads it.

Nothing here imports Megatron. What needs no model is checked with the configuration: how ranks are arranged
(`megatron_sizes`), what the devices can do (`megatron_device`), keys that exclude each other (`megatron_config`).

The vocabulary need not divide by anything: `mapping.py` pads the rows of a rank. Sequences need not either: every one
is padded to its chunks (`RowLayout`); of context parallelism only the longest is checked, with the configuration.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, is_scalar
from nemo_rl.models.policy.layout import divisor_list, stage_layers
from nemo_rl.models.policy.megatron.adapter_map import check_adapters
from nemo_rl.models.policy.megatron.config import NEEDS_TRANSFORMER_ENGINE, MegatronConfig, switched_on
from nemo_rl.models.policy.megatron.files import check_checkpoint, check_conversion
from nemo_rl.models.policy.megatron.mapping import (
    OUTPUT_LAYER,
    heads_of,
    is_latent,
    is_moe_layer,
    known_model_types,
    weight_map,
)
from nemo_rl.models.policy.weight_loading import StoredModel

KEY = "policy.megatron_cfg"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not change with the length of a sequence."""
WITH_EXPERT_BIAS = ("deepseek_v3",)
"""`model_type` of architectures whose experts are chosen with a bias that is moved after each step."""
FP8_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability from which on a GPU multiplies by the recipe."""

_NUM_LISTED = 8


def check_megatron(policy: PolicyConfig, model: PretrainedConfig, model_path: str) -> None:
    """Raises ValueError naming the key to change and what would work."""
    settings = policy.megatron_cfg
    check_installed(is_installed=_is_installed("megatron") and _is_installed("megatron.core"))
    capability = torch.cuda.get_device_capability() if settings.fp8_cfg.enabled and torch.cuda.is_available() else None
    check_engine(
        settings,
        is_installed=_is_installed("transformer_engine"),
        capability=capability,
    )
    check_mapping(policy, model, model_path)
    if Path(model_path).is_dir():
        check_conversion(policy.model_name, model_path, model, force=settings.force_reconvert_from_hf)
    _check_parts(policy, model)


def check_megatron_layout(policy: PolicyConfig, model: PretrainedConfig) -> None:
    """What of `check_megatron` needs neither weights nor what this machine has installed, for `--dry-run`."""
    check_mapping(policy, model, None)
    _check_parts(policy, model)


def _check_parts(policy: PolicyConfig, model: PretrainedConfig) -> None:
    settings, text = policy.megatron_cfg, model.get_text_config()
    check_rope(text)
    check_tensor_parallel(settings, text)
    check_experts(policy, text)
    stage_layers(settings, text.num_hidden_layers)
    check_recomputation(settings, text)
    check_adapters(policy, model)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_installed(*, is_installed: bool) -> None:
    """Megatron Core is an extra of the project."""
    if not is_installed:
        raise ValueError(
            f"{KEY}.enabled=true: Megatron Core is not installed; start the run with `uv run --extra mcore ...`, or "
            f"set {KEY}.enabled=false and policy.dtensor_cfg.enabled=true"
        )


def check_engine(settings: MegatronConfig, *, is_installed: bool, capability: tuple[int, int] | None) -> None:
    """Whether what Transformer Engine does can be had. `capability`: of this machine's GPUs, None without one.

    A driver may have no GPU where its workers have one, which look again.
    """
    for key, value, neutral in () if is_installed else switched_on(settings, NEEDS_TRANSFORMER_ENGINE):
        raise ValueError(
            f"{KEY}.{key}={value} needs Transformer Engine, which is not installed; start the run with "
            f"`uv run --extra mcore --extra te ...`, or set it to {neutral}"
        )
    recipe = settings.fp8_cfg.fp8_recipe
    needed = FP8_CAPABILITY[recipe]
    if settings.fp8_cfg.enabled and capability is not None and capability < needed:
        works = [name for name, least in FP8_CAPABILITY.items() if capability >= least]
        fix = f"set fp8_recipe to {' or '.join(works)}" if works else "set enabled=false"
        raise ValueError(
            f"{KEY}.fp8_cfg.fp8_recipe={recipe} needs GPUs of compute capability {needed[0]}.{needed[1]}, and these "
            f"have {capability[0]}.{capability[1]}; {fix}"
        )


def check_mapping(policy: PolicyConfig, model: PretrainedConfig, model_path: str | None) -> None:
    """Whether the architecture, and every tensor of its checkpoint, has a mapping. Reads names only.

    A model of the hub is looked at by the workers, when it has been downloaded; of one without a path only the
    architecture is.
    """
    text, key = model.get_text_config(), f"policy.model_name={policy.model_name!r}"
    names: set[str] | None = None
    if model_path is not None and Path(model_path).is_dir():
        with StoredModel(model_path) as stored:
            names = stored.names
    if text.model_type not in known_model_types():
        foreign = "" if names is None else _foreign_names(names)
        raise ValueError(
            f"{key}: model_type {text.model_type!r} has no mapping to Megatron Core; known are "
            f"{', '.join(known_model_types())}. Add one in models/policy/megatron/mapping.py (docs/adding-a-model.md), "
            f"or train it with policy.dtensor_cfg{foreign}"
        )
    try:
        weights = weight_map(text, implementation="local")
        if is_scalar(model):
            body = tuple(entry for entry in weights.entries if entry.template != OUTPUT_LAYER)
            weights = replace(weights, entries=body, is_tied=False)
            names = None if names is None else names - {HEAD_WEIGHT, "lm_head.weight"}
        if names is not None:
            weights.locate(names)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _foreign_names(names: Iterable[str]) -> str:
    """What of a checkpoint no mapping knows, layers and experts without their numbers."""
    small = {"num_hidden_layers": 1, "vocab_size": 8, "tie_word_embeddings": False}
    models: list[PretrainedConfig] = [kind(**small) for kind in (LlamaConfig, Qwen2Config, Qwen3Config)]
    models.append(Qwen3MoeConfig(**small, num_experts=1))
    known = {_pattern(t.name) for model in models for t in weight_map(model, implementation="local").hf_tensors}
    foreign = sorted({_pattern(name) for name in names} - known)
    if not foreign:
        return "; all names of its tensors are those of architectures that have one"
    shown = ", ".join(foreign[:_NUM_LISTED]) + (
        f" and {len(foreign) - _NUM_LISTED} more" if foreign[_NUM_LISTED:] else ""
    )
    return f"; of its tensors no mapping knows {shown}"


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def check_rope(text: PretrainedConfig) -> None:
    """Whether the rotary embeddings are those of Megatron's modules."""
    rope = text.rope_parameters
    fixes = {"rope_type": ", ".join(ROPE_TYPES), "partial_rotary_factor": "1.0"}
    for name, is_known in (
        ("rope_type", rope["rope_type"] in ROPE_TYPES),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0) == 1.0),
    ):
        if not is_known:
            raise ValueError(
                f"policy.hf_config_overrides.rope_parameters.{name}={rope[name]} of this {text.model_type!r} model is "
                f"not known to the Megatron backend; train it with policy.dtensor_cfg, or set it to {fixes[name]}"
            )


def check_tensor_parallel(settings: MegatronConfig, text: PretrainedConfig) -> None:
    """Whether heads and matrices can be cut over the tensor-parallel ranks."""
    size = settings.tensor_model_parallel_size
    widths = _widths(settings, text)
    heads, groups, _ = heads_of(text)
    groups = heads if is_latent(text) else groups

    def goes(ranks: int) -> bool:
        return all(count % ranks == 0 for count in widths.values()) and (groups % ranks == 0 or ranks % groups == 0)

    if goes(size):
        return
    works = ", ".join(str(ranks) for ranks in range(1, heads + 1) if goes(ranks))
    key = f"{KEY}.tensor_model_parallel_size={size}"
    for what, count in widths.items():
        if count % size:
            raise ValueError(
                f"{key} does not divide the {count} {what} of this {text.model_type!r} model; these would: {works}"
            )
    raise ValueError(
        f"{key} neither divides the {groups} key-value heads (query groups) of this {text.model_type!r} model nor is a "
        f"multiple of them; these would: {works}"
    )


def _widths(settings: MegatronConfig, text: PretrainedConfig) -> dict[str, int]:
    """What tensor-parallel ranks share evenly."""
    widths = {"attention heads": heads_of(text)[0]}
    has_experts = [is_moe_layer(text, layer) for layer in range(text.num_hidden_layers)]
    if not all(has_experts):
        widths["rows of its feed-forward layers (intermediate_size)"] = text.intermediate_size
    if any(has_experts) and (shared := text.to_dict().get("n_shared_experts")):
        widths["rows of its shared experts"] = shared * text.moe_intermediate_size
    if is_latent(text) and settings.transformer_impl != "transformer_engine":  # whose layers hold these whole
        widths["compressed keys and values (kv_lora_rank + qk_rope_head_dim)"] = (
            text.kv_lora_rank + text.qk_rope_head_dim
        )
        if text.q_lora_rank is not None:
            widths["compressed queries (q_lora_rank)"] = text.q_lora_rank
    return widths


def check_experts(policy: PolicyConfig, text: PretrainedConfig) -> None:
    """Whether there are experts for the settings of experts, and these can be shared by the ranks."""
    settings, count = policy.megatron_cfg, num_experts(text)
    if count == 0:
        _refuse_experts(policy, text.model_type)
        return
    by_ranks = settings.expert_model_parallel_size
    if count % by_ranks:
        raise ValueError(
            f"{KEY}.expert_model_parallel_size={by_ranks} does not divide the {count} experts of this "
            f"{text.model_type!r} model; these would: {divisor_list(count)}"
        )
    width = text.to_dict().get("moe_intermediate_size") or text.intermediate_size
    if width % settings.expert_tensor_parallel_size:
        raise ValueError(
            f"{KEY}.expert_tensor_parallel_size={settings.expert_tensor_parallel_size} does not divide the {width} "
            f"rows of an expert of this {text.model_type!r} model; these would: {divisor_list(width)}"
        )
    if settings.tensor_model_parallel_size > 1 and not settings.sequence_parallel:
        raise ValueError(
            f"{KEY}.sequence_parallel=false: with tensor_model_parallel_size="
            f"{settings.tensor_model_parallel_size} every rank would send every token of this {text.model_type!r} "
            "model to the experts; set it to true"
        )
    if settings.moe_router_bias_update_rate > 0 and text.model_type not in WITH_EXPERT_BIAS:
        raise ValueError(
            f"{KEY}.moe_router_bias_update_rate={settings.moe_router_bias_update_rate}: the experts of this "
            f"{text.model_type!r} model are not chosen with a bias (those of {', '.join(WITH_EXPERT_BIAS)} are); set "
            "it to 0, or use moe_router_load_balancing_type=aux_loss"
        )
    if settings.moe_shared_expert_overlap and not text.to_dict().get("n_shared_experts"):
        raise ValueError(
            f"{KEY}.moe_shared_expert_overlap=true: this {text.model_type!r} model has no shared experts; set it to "
            "false"
        )


def _refuse_experts(policy: PolicyConfig, model_type: str) -> None:
    """Of a dense model. `moe_permute_fusion` is let through: NeMo RL 0.7 sets it for every model."""
    settings = policy.megatron_cfg
    asked = {
        f"{KEY}.expert_model_parallel_size": (settings.expert_model_parallel_size, 1),
        f"{KEY}.expert_tensor_parallel_size": (settings.expert_tensor_parallel_size, 1),
        f"{KEY}.moe_router_load_balancing_type": (settings.moe_router_load_balancing_type, "none"),
        f"{KEY}.moe_router_bias_update_rate": (settings.moe_router_bias_update_rate, 0.0),
        f"{KEY}.moe_grouped_gemm": (settings.moe_grouped_gemm, False),
        f"{KEY}.moe_shared_expert_overlap": (settings.moe_shared_expert_overlap, False),
        f"{KEY}.moe_per_layer_logging": (settings.moe_per_layer_logging, False),
        "policy.router_replay.enabled": (policy.router_replay.enabled, False),
    }
    for key, (value, neutral) in asked.items():
        if value != neutral:
            raise ValueError(
                f"{key}={_written(value)}: {model_type!r} is a dense model and has no experts; set it to "
                f"{_written(neutral)}"
            )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_recomputation(settings: MegatronConfig, text: PretrainedConfig) -> None:
    """Whether the model has the parts that are to be computed again."""
    if settings.recompute_granularity != "selective":
        return
    dense = num_experts(text) == 0
    lacking = {"moe", "moe_act", "shared_experts"} if dense else set[str]()
    lacking |= set() if is_latent(text) else {"mla_up_proj"}
    for name in settings.recompute_modules:
        if name in lacking:
            left = [module for module in settings.recompute_modules if module not in lacking] or ["core_attn"]
            raise ValueError(
                f"{KEY}.recompute_modules: this {text.model_type!r} model has no {name}; use [{', '.join(left)}]"
            )


def check_megatron_checkpoint(directory: Path, policy: PolicyConfig, model: PretrainedConfig) -> None:
    """Whether the weights in `directory/weights` are those of this model. Raises CheckpointError otherwise."""
    check_checkpoint(directory, policy, model)

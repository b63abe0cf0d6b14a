"""Whether Megatron Core can train a model as configured, found on the driver before any worker loads it.

Nothing here imports Megatron. What needs no model is checked with the configuration: the arrangement of ranks
(`layout.py`), the kind of devices and keys that exclude each other (`config.py`).

The vocabulary need not divide by anything, because `mapping.py` pads the rows of a rank. Sequences need not either:
`RowLayout` pads each of them to its chunks.
"""

import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from nemo_rl.config.errors import some_of
from nemo_rl.config.rules import divisors, remedy, value_of, violations, written
from nemo_rl.models.policy.attention import OTHER_MIXERS
from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.layout import stage_layers
from nemo_rl.models.policy.megatron.adapter_map import check_adapters
from nemo_rl.models.policy.megatron.config import NEEDS_TRANSFORMER_ENGINE, MegatronConfig, switched_on
from nemo_rl.models.policy.megatron.mapping import (
    FAMILIES,
    expert_width,
    heads_of,
    is_latent,
    is_moe_layer,
    unmapped_reason,
    weight_map,
)
from nemo_rl.models.policy.weight_loading import StoredModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not change with the length of a sequence."""
FP8_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Lowest compute capability of GPUs that multiply by the recipe."""
FOR_EXPERTS = {
    "megatron_cfg.expert_model_parallel_size": 1,
    "megatron_cfg.expert_tensor_parallel_size": 1,
    "megatron_cfg.moe_router_load_balancing_type": "none",
    "megatron_cfg.moe_router_bias_update_rate": 0.0,
    "megatron_cfg.moe_grouped_gemm": False,
    "megatron_cfg.moe_shared_expert_overlap": False,
    "megatron_cfg.moe_per_layer_logging": False,
    "router_replay.enabled": False,
}
"""Keys that a dense model has to leave at these values. Not `moe_permute_fusion`: NeMo RL 0.7 always sets it."""
OF_EXPERTS = {
    "sequence_parallel: tensor_model_parallel_size > 1 and not sequence_parallel": (
        "with tensor_model_parallel_size={tensor_model_parallel_size} every rank would send every token of this "
        "'{model.model_type}' model to the experts -> sequence_parallel=true | tensor_model_parallel_size=1"
    ),
    "moe_router_bias_update_rate > 0 requires model.has_choice_bias": (
        "the routers of this '{model.model_type}' model have no bias (those of deepseek_v3 do) -> "
        "moe_router_bias_update_rate=0 | moe_router_bias_update_rate=0 and moe_router_load_balancing_type=aux_loss"
    ),
    "moe_shared_expert_overlap requires model.shared_width": (
        "this '{model.model_type}' model has no shared experts -> moe_shared_expert_overlap=false"
    ),
}
"""Rules of `megatron_cfg` for a model with experts, of which `model` holds facts."""


def check_megatron(policy: PolicyConfig, model: PretrainedConfig, model_path: str) -> None:
    """Raises ValueError naming the key to change and what would work."""
    settings = policy.megatron_cfg
    installed = {name for name in ("megatron", "transformer_engine") if importlib.util.find_spec(name) is not None}
    if "megatron" in installed and importlib.util.find_spec("megatron.core") is None:
        installed.remove("megatron")  # other packages have modules in it too
    capability = torch.cuda.get_device_capability() if settings.fp8_cfg.enabled and torch.cuda.is_available() else None
    check_packages(settings, installed=installed, capability=capability)
    check_megatron_layout(policy, model, model_path)


def check_megatron_layout(policy: PolicyConfig, model: PretrainedConfig, model_path: str | None = None) -> None:
    """The part of `check_megatron` that needs neither weights nor installed packages, for `--dry-run`."""
    settings, text = policy.megatron_cfg, model.get_text_config()
    check_mapping(policy, model, model_path)
    check_rope(policy, text)
    _check_local_layers(settings, text)
    check_tensor_parallel(settings, text)
    check_experts(policy, text)
    stage_layers(settings, text.num_hidden_layers)
    _check_mixers(policy, text)
    _check_recomputation(settings, text)
    check_adapters(policy, model)


def check_packages(settings: MegatronConfig, *, installed: Collection[str], capability: tuple[int, int] | None) -> None:
    """Whether Megatron Core is `installed`, and Transformer Engine and the GPUs can do what is configured.

    `capability` is the compute capability of this machine's GPUs, or None without one: a driver may have none although
    its workers, which check again, have some.
    """
    if "megatron" not in installed:
        raise ValueError(
            f"{settings.key('enabled')}=true: Megatron Core is not installed; start the run with `uv run --extra "
            "mcore ...`, or train with dtensor_cfg"
        )
    for name, value, neutral in switched_on(settings, NEEDS_TRANSFORMER_ENGINE):
        if "transformer_engine" not in installed:
            raise ValueError(
                f"{settings.key(name)}={value} needs Transformer Engine, which is not installed; start the run "
                f"with `uv run --extra mcore --extra te ...`, or {remedy(f'{settings.key(name)}={neutral}')}"
            )
    recipe = settings.fp8_cfg.fp8_recipe
    needed = FP8_CAPABILITY[recipe]
    if settings.fp8_cfg.enabled and capability is not None and capability < needed:
        works = [name for name, least in FP8_CAPABILITY.items() if capability >= least]
        section = settings.key("fp8_cfg")
        fix = remedy(*(f"{section}.fp8_recipe={name}" for name in works), f"{section}.enabled=false")
        raise ValueError(
            f"{settings.key('fp8_cfg.fp8_recipe')}={recipe} needs GPUs of compute capability {needed[0]}.{needed[1]}, "
            f"and these have {capability[0]}.{capability[1]}; {fix}"
        )


def check_mapping(policy: PolicyConfig, model: PretrainedConfig, model_path: str | None) -> None:
    """Whether the architecture, and every tensor of its checkpoint, has a mapping. Reads names only.

    Without a local directory only the architecture is checked; workers check the tensors after the download.
    """
    text, asked = model.get_text_config(), f"{policy.key('model_name')}={policy.model_name!r}"
    names: set[str] | None = None
    if model_path is not None and Path(model_path).is_dir():
        with StoredModel(model_path, torch_files=True) as stored:
            names = stored.names
    if reason := unmapped_reason(text.model_type, policy.key("dtensor_cfg")):
        raise ValueError(f"{asked}: {reason}{'' if names is None else _foreign_names(names)}")
    try:
        weights = weight_map(model)
        if names is not None:
            weights.locate(names)
    except ValueError as error:
        raise ValueError(f"{asked}: {error}") from error


def _foreign_names(names: Iterable[str]) -> str:
    """The tensors of a checkpoint that no mapping knows, without the numbers of layers and experts."""

    def pattern(name: str) -> str:
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)

    small = {"num_hidden_layers": 1, "vocab_size": 8, "tie_word_embeddings": False}
    models: list[PretrainedConfig] = [kind(**small) for kind in (LlamaConfig, Qwen2Config, Qwen3Config)]
    models.append(Qwen3MoeConfig(**small, num_experts=1))
    known = {pattern(t.name) for model in models for t in weight_map(model).hf_tensors}
    if foreign := sorted({pattern(name) for name in names} - known):
        return f"; no mapping knows its tensors {some_of(foreign)}"
    return "; all names of its tensors are known from other architectures"


def _check_local_layers(settings: MegatronConfig, text: PretrainedConfig) -> None:
    """Whether the configuration asks for other layers in a model that has layers of this library."""
    others = NEEDS_TRANSFORMER_ENGINE | {"bias_activation_fusion": "false"}
    for name, value, neutral in switched_on(settings, others) if FAMILIES[text.model_type].is_local else ():
        raise ValueError(
            f"{settings.key(name)}={value} is not for the layers of this {text.model_type!r} model, which are torch's; "
            f"{remedy(f'{settings.key(name)}={neutral}')}"
        )


def check_rope(policy: PolicyConfig, text: PretrainedConfig) -> None:
    """Whether Megatron's modules have the model's rotary embeddings."""
    given = text.rope_parameters
    by_layer = {f"{kind}.": given[kind] for kind in ("full_attention", "sliding_attention") if kind in given}
    for where, rope in (by_layer or {"": given}).items():
        rope = {"partial_rotary_factor": 1.0, **rope}
        part = rope["partial_rotary_factor"]
        # YaRN multiplies all scores by a factor, which here is one for all features and layers.
        kinds = ROPE_TYPES[:-1] if part != 1.0 or by_layer else ROPE_TYPES
        parts = (part,) if FAMILIES[text.model_type].partial_rotary else (1.0,)
        for name, known in (("partial_rotary_factor", parts), ("rope_type", kinds)):
            if rope[name] not in known:
                key = f"{policy.key('hf_config_overrides.rope_parameters')}.{where}{name}"
                raise ValueError(
                    f"{key}={rope[name]} of this {text.model_type!r} model is not known to the Megatron backend; train "
                    f"it with {policy.key('dtensor_cfg')}, or {remedy(*(f'{key}={value}' for value in known))}"
                )


def check_tensor_parallel(settings: MegatronConfig, text: PretrainedConfig) -> None:
    """Whether heads and matrices can be cut over the tensor-parallel ranks."""
    size, what = settings.tensor_model_parallel_size, f"this {text.model_type!r} model"
    heads, groups, _ = heads_of(text)
    groups = heads if is_latent(text) else groups
    widths = {"attention heads": heads}
    has_experts = [is_moe_layer(text, layer) for layer in range(text.num_hidden_layers)]
    if not all(has_experts):
        widths["rows of its feed-forward layers (intermediate_size)"] = text.intermediate_size
    family = FAMILIES[text.model_type]
    if family.experts is not None and any(has_experts) and (shared := family.experts.shared_width(text)):
        widths["rows of its shared experts"] = shared
    if is_latent(text) and settings.transformer_impl != "transformer_engine":  # whose layers hold these whole
        width = text.kv_lora_rank + text.qk_rope_head_dim
        widths["compressed keys and values (kv_lora_rank + qk_rope_head_dim)"] = width
        if text.q_lora_rank is not None:
            widths["compressed queries (q_lora_rank)"] = text.q_lora_rank

    def problems(ranks: int) -> Iterator[str]:
        for name, count in widths.items():
            if count % ranks:
                yield f"does not divide the {count} {name} of {what}"
        if groups % ranks and ranks % groups:  # more ranks than query groups hold copies of the groups
            yield f"neither divides the {groups} key-value heads (query groups) of {what} nor is a multiple of them"
        elif groups % ranks and family.has_output_gate:
            yield f"is more than the {groups} key-value heads (query groups) of {what}, whose heads have gates"

    for problem in problems(size):
        key = settings.key("tensor_model_parallel_size")
        # They divide the ranks as the present size does; and one rank has nothing to cut by position.
        fit = [ranks for ranks in range(1, size) if size % ranks == 0 and not any(problems(ranks))]
        fits = ", ".join(str(ranks) for ranks in fit if ranks > 1 or not settings.sequence_parallel)
        alone = remedy(f"{settings.key('sequence_parallel')}=false and {key}=1")
        raise ValueError(f"{key}={size} {problem}; {f'these would: {fits}' if fits else alone}")


def check_experts(policy: PolicyConfig, text: PretrainedConfig) -> None:
    """Whether the model has experts for the settings of experts, and the ranks can share them."""
    settings, count = policy.megatron_cfg, num_experts(text)
    model = f"this {text.model_type!r} model"
    if count == 0:
        for name, neutral in FOR_EXPERTS.items():
            if (value := value_of(policy, name)) != neutral:
                raise ValueError(
                    f"{policy.key(name)}={written(value)}: {text.model_type!r} is a dense model and has no experts; "
                    f"{remedy(f'{policy.key(name)}={written(neutral)}')}"
                )
        return
    for name, total, what in (
        ("expert_model_parallel_size", count, f"experts of {model}"),
        ("expert_tensor_parallel_size", expert_width(text), f"rows of an expert of {model}"),
    ):
        if total % (size := value_of(settings, name)):
            raise ValueError(
                f"{settings.key(name)}={size} does not divide the {total} {what}; these would: {divisors(total, size)}"
            )
    experts = FAMILIES[text.model_type].experts
    if experts is not None and experts.is_stacked and settings.expert_tensor_parallel_size > 1:
        key = settings.key("expert_tensor_parallel_size")
        raise ValueError(
            f"{key}={settings.expert_tensor_parallel_size}: the experts of {model} stay whole, and "
            f"expert_model_parallel_size spreads them; {remedy(f'{key}=1')}"
        )
    facts = {
        "model_type": text.model_type,
        "shared_width": 0 if experts is None else experts.shared_width(text),
        "has_choice_bias": experts is not None and experts.has_choice_bias,
    }
    for key, message in violations(OF_EXPERTS, {**vars(settings), "model": facts}):
        message = message.replace("{section}.", settings.key(""))
        raise ValueError(f"{settings.key(key)}={written(value_of(settings, key))}: {message}")


def _check_mixers(policy: PolicyConfig, text: PretrainedConfig) -> None:
    """Whether layers with a state are asked for what they cannot do."""
    if not FAMILIES[text.model_type].has_mixers:
        return
    what = f"the layers of type {OTHER_MIXERS[text.model_type]} of this {text.model_type!r} model"
    if (size := policy.megatron_cfg.context_parallel_size) > 1:
        key = policy.megatron_cfg.key("context_parallel_size")
        raise ValueError(f"{key}={size}: {what} read every sequence from its first token; {remedy(f'{key}=1')}")
    if isinstance(policy, RolloutPolicyConfig) and policy.generation.backend == "megatron":
        key = policy.generation.key("backend")
        raise ValueError(
            f"{key}=megatron: {what} are not decoded there; {remedy(f'{key}={policy.generation.default_engine}')}"
        )


def _check_recomputation(settings: MegatronConfig, text: PretrainedConfig) -> None:
    """Whether the model has the modules that selective recomputation names."""
    lacking = {"moe", "moe_act", "shared_experts"} if num_experts(text) == 0 else set[str]()
    lacking |= set() if is_latent(text) else {"mla_up_proj"}
    left = [name for name in settings.recompute_modules if name not in lacking] or ["core_attn"]
    for name in settings.recompute_modules if settings.recompute_granularity == "selective" else ():
        if name in lacking:
            key = settings.key("recompute_modules")
            raise ValueError(
                f"{key}: this {text.model_type!r} model has no {name}; {remedy(f'{key}=[{",".join(left)}]')}"
            )

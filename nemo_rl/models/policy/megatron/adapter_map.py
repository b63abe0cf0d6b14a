"""The linear layers of Megatron that get low-rank adapters, and their names and shapes in a layer and in files.

    linear_qkv.weight [q + k + v, in]  ->  lora_A [r, in], one for all three; lora_B [q + k + v, r], sharded like it
    files                              ->  {q,k,v}_proj.lora_B, and the lora_A of the first of them

The driver uses this module too, so it does not import Megatron.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from nemo_rl.config.rules import remedy, value_of, violations, written
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor.lora import matches
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT
from nemo_rl.models.policy.layout import stage_layers
from nemo_rl.models.policy.megatron.config import MegatronPeftConfig
from nemo_rl.models.policy.megatron.mapping import (
    OUTPUT_LAYER,
    HFTensor,
    MappedTensor,
    Replicated,
    RowParallel,
    WeightMap,
    weight_map,
)
from nemo_rl.models.policy.peft_format import tensor_names

LINEAR_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Adapted by default."""

_LINEAR_WEIGHT = re.compile(r"(.*\.linear_\w+)\.weight\d*")


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """A linear layer `name` of the whole model, its weight, and the two matrices of its adapter.

    It consists of the Hugging Face layers `hf_names`. For a column-parallel layer `lora_b` is sharded by rows, as the
    weight, and `lora_a` replicated; for a row-parallel layer `lora_a` is sharded by columns and `lora_b` replicated.
    """

    name: str
    weight: MappedTensor
    lora_a: MappedTensor
    lora_b: MappedTensor
    hf_names: list[str]
    is_row_parallel: bool


def adapted_layers(weights: WeightMap, peft: MegatronPeftConfig) -> list[AdaptedLayer]:
    """The layers that `peft` names, in the order of the model; by default `LINEAR_LAYERS` without the experts.

    Raises:
        ValueError: a name matches no layer, a layer cannot be adapted, or the adapter's rank is above the full rank.
    """
    named = ((entry, _LINEAR_WEIGHT.fullmatch(entry.template.format(expert=entry.expert))) for entry in weights.entries)
    linears = {found[1]: entry for entry, found in named if found}
    parts = sorted({name.rpartition(".")[2] for name in linears})
    known = f"{', '.join(parts)}; full names are like {next(iter(linears))}"
    for key, patterns in (("target_modules", peft.target_modules), ("exclude_modules", peft.exclude_modules)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in linears):
                raise ValueError(f"{peft.key(key)}: {pattern!r} matches no linear layer; there are {known}")
    targets = peft.target_modules or LINEAR_LAYERS
    chosen = [
        _adapted(name, entry, peft)
        for name, entry in linears.items()
        if any(matches(name, target) for target in targets)
        and not any(matches(name, pattern) for pattern in peft.exclude_modules)
        # By default no layers of experts: they stay frozen, and `_adapted` refuses those that are named.
        and not (entry.expert is not None and not peft.target_modules)
    ]
    if not chosen:
        raise ValueError(f"{peft.key('exclude_modules')} leaves no layer to adapt; there are {known}")
    # With a larger rank B A could be any matrix, and the adapter would save nothing.
    ranks = {
        layer.name: min(sum(source.shape[0] for source in layer.weight.sources), layer.weight.sources[0].shape[1])
        for layer in chosen
    }
    if too_small := sorted({name.rpartition(".")[2] for name, rank in ranks.items() if rank < peft.dim}):
        smallest = min(ranks.values())
        raise ValueError(
            f"{peft.key('dim')}={peft.dim} is more than the full rank {smallest} of {', '.join(too_small)}; "
            f"{remedy(f'{peft.key("dim")}={smallest}')} or less, or add them to {peft.key('exclude_modules')}"
        )
    return chosen


def _leaving_out(peft: MegatronPeftConfig, pattern: str, *others: str) -> str:
    """The remedies: no adapter for layers of a pattern, or others."""
    left_out = ",".join(repr(entry) for entry in (*peft.exclude_modules, pattern))
    return remedy(f"{peft.key('exclude_modules')}=[{left_out}]", *others)


def _adapted(name: str, weight: MappedTensor, peft: MegatronPeftConfig) -> AdaptedLayer:
    if weight.expert is not None:
        raise ValueError(
            f"{peft.key('target_modules')} takes in {name}, a layer of an expert, which stays frozen; name other "
            f"layers, or {_leaving_out(peft, '*.experts.*')}"
        )
    if isinstance(weight.layout, Replicated):
        of_megatron = peft.key("").removesuffix("peft.")
        raise ValueError(
            f"{peft.key('target_modules')} takes in {name}, which Transformer Engine does not shard and which has no "
            "adapter here; "
            f"{_leaving_out(peft, f'*.{name.rpartition(".")[2]}', f'{of_megatron}transformer_impl=local')}"
        )
    hf_names = [source.name.removesuffix(".weight") for source in weight.sources]
    rows, columns = [source.shape[0] for source in weight.sources], weight.sources[0].shape[1]
    first = (HFTensor(f"{hf_names[0]}.lora_A", (peft.dim, columns)),)
    second = tuple(HFTensor(f"{hf}.lora_B", (count, peft.dim)) for hf, count in zip(hf_names, rows, strict=True))
    is_row = isinstance(weight.layout, RowParallel)
    # The narrow side, of `dim` features, is whole on every rank: sharding it would save little and cost a gather.
    layout_a, layout_b = (weight.layout, Replicated()) if is_row else (Replicated(), weight.layout)
    return AdaptedLayer(
        name=name,
        hf_names=hf_names,
        weight=weight,
        lora_a=MappedTensor(template=f"{name}.adapter.lora_A", sources=first, layout=layout_a),
        lora_b=MappedTensor(template=f"{name}.adapter.lora_B", sources=second, layout=layout_b),
        is_row_parallel=is_row,
    )


def trained_map(weights: WeightMap, layers: Sequence[AdaptedLayer]) -> WeightMap:
    """The mapping of the trained parameters: adapters, and the head of a reward or value model."""
    adapters = [part for layer in layers for part in (layer.lora_a, layer.lora_b)]
    return replace(weights, entries=(*adapters, *trained_head(weights)), is_tied=False)


def trained_head(weights: WeightMap) -> list[MappedTensor]:
    """The head of a reward or value model, which is trained without adapter; nothing for a language model."""
    heads = [entry for entry in weights.entries if entry.template == OUTPUT_LAYER]
    return [entry for entry in heads if entry.sources[0].name == HEAD_WEIGHT]


def peft_tensors(layers: Sequence[AdaptedLayer], trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole trained tensors by their names in files -> by PEFT's names, where every layer has its own lora_A."""
    found = {f"base_model.model.{HEAD_WEIGHT}": trained[HEAD_WEIGHT]} if HEAD_WEIGHT in trained else {}
    for layer in layers:
        # The layers of a fused matrix share one A here. PEFT knows no shared A, so each gets a copy.
        for hf_name, rows in zip(layer.hf_names, layer.lora_b.sources, strict=True):
            name_a, name_b = tensor_names(hf_name)
            found[name_a] = trained[layer.lora_a.sources[0].name].clone()
            found[name_b] = trained[rows.name]
    return found


WITH_ADAPTERS = {
    "freeze_moe_router: model.num_experts and not freeze_moe_router": (
        "{model.key}.enabled=true trains only adapters -> freeze_moe_router=true and moe_router_bias_update_rate=0"
    ),
    "moe_shared_expert_overlap excludes model.shared_experts": (
        "shared experts with adapters do not overlap; set {section}.moe_shared_expert_overlap=false, or {model.without}"
    ),
}
"""Rules of `megatron_cfg` with adapters; `model` holds facts of the model and of its adapters."""


def check_adapters(policy: PolicyConfig, model: PretrainedConfig) -> None:
    """Check `policy.megatron_cfg.peft` against the model and the other settings, on the driver.

    Raises:
        ValueError: as `adapted_layers`; a pipeline stage has no adapters; or a setting would train frozen parameters.
    """
    settings, text = policy.megatron_cfg, model.get_text_config()
    if not settings.peft.enabled:
        return
    layers = adapted_layers(weight_map(model), settings.peft)
    adapted = any(".shared_experts." in layer.name for layer in layers)
    without = _leaving_out(settings.peft, "*.shared_experts.*").removeprefix("set ")
    facts = {
        "num_experts": num_experts(text),
        "shared_experts": adapted,
        "key": settings.key("peft"),
        "without": without,
    }
    for key, message in violations(WITH_ADAPTERS, {**vars(settings), "model": facts}):
        message = message.replace("{section}.", settings.key(""))
        raise ValueError(f"{settings.key(key)}={written(value_of(settings, key))}: {message}")
    names = [layer.name for layer in layers]
    for rank, pieces in enumerate(stage_layers(settings, text.num_hidden_layers)):
        for piece in pieces:
            if not any(name.startswith(f"decoder.layers.{number}.") for number in piece for name in names):
                raise ValueError(
                    f"{settings.key('peft.target_modules')} adapts none of the layers {piece.start} to "
                    f"{piece.stop - 1}, which pipeline rank {rank} trains; name layers of all ranks, or "
                    f"{remedy(f'{settings.key("pipeline_model_parallel_size")}=1')}"
                )

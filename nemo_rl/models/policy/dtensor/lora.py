"""Low-rank adapters on the linear layers of a model (Hu et al. 2021, arXiv 2106.09685).

    y = x W^T + b + (alpha / r) (dropout(x) A^T) B^T        W [out, in], A [r, in], B [out, r]

`apply_lora` adds them to a model on the meta device, before it is sharded; `init_adapters` draws them once the shards
have memory. All else is frozen and keeps its Hugging Face name, so base weights load as ever and the optimizer holds
adapters only. Experts stay frozen: one tensor holds all of a layer, so they are no linear layers. B begins at zero, so
training begins at the base model, and the same weights without adapters are the reference (`adapters_disabled`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Literal

import torch
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.errors import nearest_key
from nemo_rl.models.policy.config import LoRAConfig, PolicyConfig
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, is_scalar, output_module
from nemo_rl.models.policy.pretrained import build_on_meta
from nemo_rl.models.policy.vision.families import FAMILIES, PARTS, part_of
from nemo_rl.models.policy.weight_loading import copy_whole, hf_name
from nemo_rl.refit.layout import merge


class LoRALinear(nn.Linear):
    """A linear layer with an adapter.

    `weight` [out, in] and `bias` [out] are frozen, `lora_A` [r, in] and `lora_B` [out, r] are trained. All four are
    parameters of the module itself. Column parallelism shards `weight`, `bias` and `lora_B` on dimension 0 and
    replicates `lora_A`; row parallelism shards `weight` and `lora_A` on dimension 1 and replicates `bias` and `lora_B`.

    `train()` and `eval()` have no effect: a policy runs in evaluation mode, so that every pass gives the same logprobs.
    `set_adapter_dropout` switches dropout on and off.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        nn.Module.__init__(self)  # the constructor of nn.Linear would allocate a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_empty(base.out_features, rank))
        self.scale = alpha / rank
        self.dropout = dropout
        self.dropout_active = False
        self.adapter_active = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        output = F.linear(input, self.weight, self.bias)
        if not self.adapter_active:
            return output
        if self.dropout_active and isinstance(input, DTensor):
            # DTensor's own dropout would broadcast the generator state of rank 0 to all ranks of the world at first
            # use. Tensor-parallel ranks have equal seeds, so they drop the same of replicated inputs.
            dropped = F.dropout(input.to_local(), self.dropout)
            input = DTensor.from_local(dropped, input.device_mesh, input.placements, run_check=False)
        elif self.dropout_active:
            input = F.dropout(input, self.dropout)
        # W x + (alpha / r) B A x (Hu et al. 2021, arXiv 2106.09685, section 4.1). The factor meets the narrowest
        # tensor, of r features.
        return output + F.linear(F.linear(input, self.lora_A) * self.scale, self.lora_B)


# -- which layers


def apply_lora(hf: PreTrainedModel, cfg: LoRAConfig) -> list[str]:
    """Add adapters to the linear layers that `cfg` names, in place, and freeze all else. Returns the layers' names.

    The adapters have the dtype and device of the weights, and no values yet (`init_adapters`). The head of a reward or
    value model is trained as a whole.

    Raises:
        ValueError: a name matches no layer or the output head, or the rank is too large for a layer.
    """
    chosen = _choose(hf, cfg)
    for name, linear in chosen.items():
        hf.set_submodule(name, LoRALinear(linear, cfg.dim, cfg.alpha, cfg.dropout))
    trained = {id(part) for _, module in adapters(hf) for part in (module.lora_A, module.lora_B)}
    for parameter in hf.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    for _, weight in trained_head(hf):
        weight.requires_grad_(True)
    return list(chosen)


def adapted_model(config: PretrainedConfig, cfg: LoRAConfig) -> PreTrainedModel:
    """The model of `config`, without weights, after `apply_lora`. ValueError as there."""
    hf = build_on_meta(config, torch.float32)
    apply_lora(hf, cfg)
    return hf


def frozen_parts(policy: PolicyConfig, config: PretrainedConfig) -> list[str]:
    """The parts of the vision-language model of `config` in which nothing is trained."""
    cfg = policy.dtensor_cfg.lora_cfg
    if not cfg.enabled:
        return list(policy.freeze)
    family = FAMILIES[config.model_type]
    return sorted(set(PARTS) - {part_of(name, family) for name, _ in adapters(adapted_model(config, cfg))})


def adapters(hf: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """(Hugging Face name of the layer, layer) of every adapted layer, in the model's order."""
    for name, module in hf.named_modules():
        if isinstance(module, LoRALinear):
            yield hf_name(name), module


def trained_head(hf: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, weight) of the head that is trained beside the adapters; nothing for a language model."""
    head = output_module(hf) if is_scalar(hf.config) else None
    if head is not None:  # None on other pipeline stages
        yield HEAD_WEIGHT, head.get_parameter("weight")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter, so that no base model has it."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B")


def matches(name: str, entry: str) -> bool:
    """Whether `entry` means layer `name`: the last parts of the name (`q_proj`), or a pattern of the whole name."""
    if any(character in entry for character in "*?["):
        return fnmatchcase(name, entry)
    return name == entry or name.endswith(f".{entry}")


def _choose(hf: PreTrainedModel, cfg: LoRAConfig) -> dict[str, nn.Linear]:
    head = output_module(hf)
    # The exact type: subclasses compute something else with their weight.
    linears = {name: module for name, module in hf.named_modules() if type(module) is nn.Linear}
    layers = {name: module for name, module in linears.items() if module is not head}
    counts = Counter(name.rpartition(".")[2] for name in layers)
    available = ", ".join(f"{part} ({count})" for part, count in counts.items())
    available += f"; full names are like {next(iter(layers), 'none')}"
    for key, entries in (("target_modules", cfg.target_modules), ("exclude_modules", cfg.exclude_modules)):
        for entry in entries:
            if not any(matches(name, entry) for name in linears):
                near = nearest_key(entry.strip("*."), sorted(counts)) or nearest_key(entry, layers)
                hint = f"; did you mean {near!r}?" if near else ""
                raise ValueError(
                    f"{cfg.key(key)}: {entry!r} matches no linear layer of {type(hf).__name__}{hint}\n"
                    f"There are {available}"
                )
    excluded = {name for name in linears if any(matches(name, entry) for entry in cfg.exclude_modules)}
    targets = {name for name in linears if any(matches(name, entry) for entry in cfg.target_modules)}
    wanted = (layers.keys() if cfg.match_all_linear else targets) - excluded
    if refused := sorted(wanted - layers.keys()):
        name, key = refused[0], cfg.key("target_modules")
        if is_scalar(hf.config):
            raise ValueError(f"{key} takes in {name}, the head, which is trained whole; name other layers")
        tied = " and is tied to the embeddings here" if hf.config.get_text_config().tie_word_embeddings else ""
        raise ValueError(
            f"{key} takes in {name}, the output head, which cannot be adapted: logprobs are computed from its weight "
            f"in parts{tied}. Name other layers, or add {name} to {cfg.key('exclude_modules')}"
        )
    chosen = {name: layers[name] for name in layers if name in wanted}
    if not chosen:
        raise ValueError(f"{cfg.key('exclude_modules')} leaves no layer to adapt; there are {available}")
    ranks = {name: min(module.in_features, module.out_features) for name, module in chosen.items()}
    if too_small := sorted({name.rpartition(".")[2] for name, rank in ranks.items() if rank < cfg.dim}):
        smallest = min(ranks.values())
        raise ValueError(
            f"{cfg.key('dim')}={cfg.dim} is more than the full rank {smallest} of {', '.join(too_small)}; set "
            f"{cfg.key('dim')}={smallest} or less, or add them to {cfg.key('exclude_modules')}"
        )
    return chosen


# -- values and switches


@torch.no_grad()
def init_adapters(hf: nn.Module, cfg: LoRAConfig, seed: int) -> None:
    """Draw every `lora_A` by `cfg.lora_A_init` and set every `lora_B` to zero.

    The values are equal for every number of ranks and every sharding: each rank draws the whole matrix and keeps its
    shard.
    """
    for name, module in adapters(hf):
        copy_whole(module.lora_A, draw_first_matrix(name, tuple(module.lora_A.shape), cfg.lora_A_init, seed))
        # B A = 0: training begins at the base model (arXiv 2106.09685, section 4.1).
        module.lora_B.zero_()


def draw_first_matrix(
    name: str, shape: tuple[int, ...], method: Literal["xavier", "uniform", "gaussian"], seed: int
) -> torch.Tensor:
    """The initial A of layer `name`, float32 [r, in], drawn on the CPU from a generator seeded by `seed` and `name`."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
    whole = torch.empty(shape, dtype=torch.float32)
    if method == "xavier":
        nn.init.xavier_normal_(whole, generator=generator)
    elif method == "uniform":
        # As nn.Linear draws its weight: uniform within 1 / sqrt(in).
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    else:
        # The width that PEFT calls `gaussian`: 1 / r.
        nn.init.normal_(whole, std=1 / shape[0], generator=generator)
    return whole


def set_adapter_dropout(hf: nn.Module, active: bool) -> None:
    """Switch the adapters' dropout on for a training pass, or off for everything else.

    With a dropout above 0 a training pass does not compute the policy's logprobs: previous logprobs need a pass of
    their own, without dropout.
    """
    for _, module in adapters(hf):
        module.dropout_active = active and module.dropout > 0


@contextmanager
def adapters_disabled(*parts: nn.Module) -> Generator[None]:
    """Inside the block these parts of the model are the base model: the reference policy of a run with adapters."""
    modules = [module for part in parts for _, module in adapters(part)]
    for module in modules:
        module.adapter_active = False
    try:
        yield
    finally:
        for module in modules:
            module.adapter_active = True


# -- merging


@torch.no_grad()
def merged_weight(module: LoRALinear) -> torch.Tensor:
    """W + (alpha / r) B A, computed in float32 and returned with the shape, dtype and sharding of W.

    Collective for a sharded W [out, in]. W stays sharded; each rank gathers the columns of A [r, in] and the rows of
    B [out, r] that its part of W needs.
    """
    weight, lora_a, lora_b = module.weight, module.lora_A, module.lora_B
    if not isinstance(weight, DTensor):
        return merge(weight, lora_a, lora_b, module.scale)
    assert isinstance(lora_a, DTensor) and isinstance(lora_b, DTensor)
    # Columns of W are columns of A, rows of W are rows of B; the other dimension of each is r, which is not sharded.
    columns = lora_a.redistribute(placements=[_only(placement, 1) for placement in weight.placements])
    rows = lora_b.redistribute(placements=[_only(placement, 0) for placement in weight.placements])
    local = merge(weight.to_local(), columns.to_local(), rows.to_local(), module.scale)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _only(placement: Placement, dim: int) -> Placement:
    is_shard = isinstance(placement, Shard | _StridedShard)
    return placement if is_shard and placement.dim == dim else Replicate()

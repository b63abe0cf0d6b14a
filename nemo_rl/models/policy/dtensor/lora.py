"""Low-rank adapters on the linear layers of a model (Hu et al. 2021, arXiv 2106.09685).

    y = x W^T + b + (alpha / r) (dropout(x) A^T) B^T        W [out, in], A [r, in], B [out, r]

`apply_lora` puts them into a model on the meta device, before it is sharded; `init_adapters` draws them once the shards
have memory. W, b and everything else of the model are frozen and keep their Hugging Face names, so the base weights
load as ever and the optimizer holds the adapters alone. The experts of a mixture of experts are no linear layers (one
tensor holds them all): they stay frozen.

B begins at zero, so training begins at the base model; with the adapters switched off the same weights are the
reference policy (`adapters_disabled`), without a copy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
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
from nemo_rl.models.policy.config import LoRAConfig
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, auto_class, is_scalar, output_module
from nemo_rl.models.policy.weight_loading import copy_whole, hf_name
from nemo_rl.refit.layout import merge

KEY = "policy.dtensor_cfg.lora_cfg"
ADAPTER_PARAMETERS = ("lora_A", "lora_B")


class LoRALinear(nn.Linear):
    """A linear layer with an adapter.

    `weight` [out, in] and `bias` [out] are frozen, `lora_A` [r, in] and `lora_B` [out, r] are trained; all four are
    parameters of the module itself. Tensor parallelism by columns shards `weight`, `bias` and `lora_B` on
    dimension 0 and replicates `lora_A`; by rows it shards `weight` and `lora_A` on dimension 1 and replicates `bias`
    and `lora_B`.

    `train()` and `eval()` do not matter here: a policy runs in evaluation mode, so that every pass gives the same
    logprobs. Dropout is on between `set_adapter_dropout(hf, True)` and `set_adapter_dropout(hf, False)`.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a weight
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
        dropped = _dropout(input, self.dropout) if self.dropout_active else input
        return output + F.linear(F.linear(dropped, self.lora_A) * self.scale, self.lora_B)


def _dropout(input: torch.Tensor, p: float) -> torch.Tensor:
    """Each rank draws for its own part: ranks with one seed agree on what they all hold.

    DTensor's own dropout would give all ranks of the world the generator state of rank 0, by a broadcast at first use.
    """
    if not isinstance(input, DTensor):
        return F.dropout(input, p)
    return DTensor.from_local(F.dropout(input.to_local(), p), input.device_mesh, input.placements, run_check=False)


# -- which layers


def apply_lora(hf: PreTrainedModel, cfg: LoRAConfig) -> list[str]:
    """Give the linear layers that `cfg` names an adapter, in place, and freeze all else; returns the layers' names.

    The adapters have the dtype and device of the weights, and are not drawn yet (`init_adapters`). The head of a reward
    or value model is trained as it is.

    Raises:
        ValueError: for a name that matches no layer, for the output head, and for a rank that a layer cannot have.
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


def check_lora(config: PretrainedConfig, cfg: LoRAConfig) -> None:
    """Whether `cfg` goes with the model of `config`; no weights are read.

    Raises:
        ValueError: as `apply_lora`.
    """
    with torch.device("meta"):
        hf = auto_class(config).from_config(config)
    _choose(hf, cfg)


def adapters(hf: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """(Hugging Face name of the layer, layer) of every adapted layer, in the model's order."""
    for name, module in hf.named_modules():
        if isinstance(module, LoRALinear):
            yield hf_name(name), module


def trained_head(hf: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, weight) of the head that is trained beside the adapters; nothing for a language model."""
    if is_scalar(hf.config):
        head = output_module(hf)
        if head is not None:  # None on other pipeline stages
            yield HEAD_WEIGHT, head.get_parameter("weight")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter: no checkpoint of the base model has it."""
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS


def matches(name: str, entry: str) -> bool:
    """Whether layer `name` is meant by `entry`: its last part or parts (`q_proj`), or a pattern of all of it."""
    if any(character in entry for character in "*?["):
        return fnmatchcase(name, entry)
    return name == entry or name.endswith(f".{entry}")


def _choose(hf: PreTrainedModel, cfg: LoRAConfig) -> dict[str, nn.Linear]:
    head = output_module(hf)
    linears = {name: module for name, module in hf.named_modules() if type(module) is nn.Linear}
    layers = {name: module for name, module in linears.items() if module is not head}
    for key, entries in (("target_modules", cfg.target_modules), ("exclude_modules", cfg.exclude_modules)):
        for entry in entries:
            if not any(matches(name, entry) for name in linears):
                raise ValueError(_unknown(f"{KEY}.{key}", entry, hf, layers))
    excluded = {name for name in linears if any(matches(name, entry) for entry in cfg.exclude_modules)}
    if cfg.match_all_linear:
        wanted = set(layers)
    else:
        wanted = {name for name in linears if any(matches(name, entry) for entry in cfg.target_modules)}
    if refused := (wanted - excluded) - set(layers):
        raise ValueError(_no_head(sorted(refused)[0], hf))
    chosen = {name: module for name, module in layers.items() if name in wanted - excluded}
    if not chosen:
        raise ValueError(f"{KEY}.exclude_modules leaves no layer to adapt; there are {_listed(layers)}")
    _check_rank(chosen, cfg.dim)
    return chosen


def _no_head(name: str, hf: PreTrainedModel) -> str:
    if is_scalar(hf.config):
        return f"{KEY}.target_modules takes in {name}, the head, which is trained whole; name other layers"
    tied = " and is tied to the embeddings here" if hf.config.get_text_config().tie_word_embeddings else ""
    return (
        f"{KEY}.target_modules takes in {name}, the output head, which cannot be adapted: logprobs are computed from "
        f"its weight in parts{tied}. Name other layers, or add {name} to {KEY}.exclude_modules"
    )


def _unknown(key: str, entry: str, hf: PreTrainedModel, layers: dict[str, nn.Linear]) -> str:
    parts = sorted({name.rpartition(".")[2] for name in layers})
    near = nearest_key(entry.strip("*."), parts) or nearest_key(entry, layers)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{key}: {entry!r} matches no linear layer of {type(hf).__name__}{hint}\nThere are {_listed(layers)}"


def _listed(layers: dict[str, nn.Linear]) -> str:
    counts = Counter(name.rpartition(".")[2] for name in layers)
    example = next(iter(layers))
    return ", ".join(f"{part} ({count})" for part, count in counts.items()) + f"; full names are like {example}"


def _check_rank(chosen: dict[str, nn.Linear], dim: int) -> None:
    small = {name: min(m.in_features, m.out_features) for name, m in chosen.items()}
    too_small = sorted({name.rpartition(".")[2] for name, size in small.items() if size < dim})
    if too_small:
        raise ValueError(
            f"{KEY}.dim={dim} is more than the full rank {min(small.values())} of {', '.join(too_small)}; set "
            f"{KEY}.dim={min(small.values())} or less, or add them to {KEY}.exclude_modules"
        )


# -- values and switches


@torch.no_grad()
def init_adapters(hf: nn.Module, cfg: LoRAConfig, seed: int) -> None:
    """Draw every `lora_A` by `cfg.lora_A_init` and set every `lora_B` to zero.

    Each matrix is drawn whole, in float32 on the CPU, from a generator seeded by (`seed`, name of the layer), and every
    rank keeps its shard: the values are the same for every number of ranks and every sharding.
    """
    for name, module in adapters(hf):
        whole = draw_first_matrix(name, tuple(module.lora_A.shape), cfg.lora_A_init, seed)
        copy_whole(module.lora_A, whole)
        module.lora_B.zero_()


def draw_first_matrix(
    name: str, shape: tuple[int, ...], method: Literal["xavier", "uniform", "gaussian"], seed: int
) -> torch.Tensor:
    """A float32 [r, in] of the adapter of layer `name` at its beginning; the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
    whole = torch.empty(shape, dtype=torch.float32)
    if method == "xavier":
        nn.init.xavier_normal_(whole, generator=generator)
    elif method == "uniform":
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    else:
        nn.init.normal_(whole, std=1 / shape[0], generator=generator)
    return whole


def set_adapter_dropout(hf: nn.Module, active: bool) -> None:
    """Switch the adapters' dropout on for a training pass, or off for all else.

    With a dropout above 0 the logprobs of a training pass are not those of the policy: previous logprobs must come from
    a pass of their own, with dropout off.
    """
    for _, module in adapters(hf):
        module.dropout_active = active and module.dropout > 0


@contextmanager
def adapters_disabled(hf: nn.Module) -> Iterator[None]:
    """Inside, the model is the base model: the reference policy of a run with adapters."""
    modules = [module for _, module in adapters(hf)]
    for module in modules:
        module.adapter_active = False
    try:
        yield
    finally:
        for module in modules:
            module.adapter_active = True


@torch.no_grad()
def cast_frozen(hf: nn.Module, dtype: torch.dtype) -> None:
    """Keep the frozen parameters in `dtype`: nothing is added up in them, so the dtype they compute in is enough.

    To be called between `apply_lora` and sharding, on the meta device.
    """
    for parameter in hf.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


# -- merging


@torch.no_grad()
def merged_weight(module: LoRALinear) -> torch.Tensor:
    """W + (alpha / r) B A, computed in float32 and returned with the shape, dtype and sharding of W.

    Collective for a sharded W [out, in]: each rank gathers what its rows and columns need of A [r, in] and B [out, r],
    and W itself stays sharded.
    """
    weight, lora_a, lora_b = module.weight, module.lora_A, module.lora_B
    if not isinstance(weight, DTensor):
        return merge(weight, lora_a, lora_b, module.scale)
    assert isinstance(lora_a, DTensor) and isinstance(lora_b, DTensor)
    columns = lora_a.redistribute(placements=[_only(placement, 1) for placement in weight.placements])
    rows = lora_b.redistribute(placements=[_only(placement, 0) for placement in weight.placements])
    local = merge(weight.to_local(), columns.to_local(), rows.to_local(), module.scale)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _only(placement: Placement, dim: int) -> Placement:
    is_shard = isinstance(placement, Shard | _StridedShard)
    return placement if is_shard and placement.dim == dim else Replicate()


def adapter_tensors(hf: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(PEFT's name, parameter or DTensor) of every adapter, in the model's order, and of a head trained with them."""
    for name, module in adapters(hf):
        yield f"base_model.model.{name}.lora_A.weight", module.lora_A.detach()
        yield f"base_model.model.{name}.lora_B.weight", module.lora_B.detach()
    for name, weight in trained_head(hf):
        yield f"base_model.model.{name}", weight.detach()

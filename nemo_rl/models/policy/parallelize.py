"""A Hugging Face causal language model, born on the meta device, sharded with FSDP2, filled shard by shard.

In: a model directory or hub name. Out: a `LogprobModel` whose parameters are DTensors sharded on dim 0. No rank ever
holds the whole model when the checkpoint is safetensors with the model's own parameter names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from nemo_rl.models.policy.logprobs import LogprobModel

logger = logging.getLogger(__name__)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get meta parameters and real buffers.

    Building under `torch.device("meta")` would lose non-persistent buffers such as the rotary `inv_freq`, which no
    checkpoint holds.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return param
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = nn.modules.module.register_module_parameter_registration_hook(to_meta)  # pyright: ignore[reportArgumentType]
    try:
        with no_init_weights():
            yield
    finally:
        handle.remove()


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` with meta parameters of `dtype`, SDPA attention and no KV cache."""
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()  # left out by transformers where weights are not initialised
    model.config.use_cache = False
    return model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks: what the model itself says must not be split over devices.

    Raises ValueError for an architecture that does not say so.
    """
    names = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} declares no transformer blocks (_no_split_modules), so it cannot be sharded by "
            "layer; use a causal language model of transformers that does, for example Qwen2, Qwen3 or Llama"
        )
    return layers


def shard(model: LogprobModel, mesh: DeviceMesh, compute_dtype: torch.dtype, *, activation_checkpointing: bool) -> None:
    """Apply FSDP2 in place: one group per transformer block, one for embeddings, final norm and head.

    Gradients are summed over ranks, not averaged: the loss is already divided by a global count.
    """
    if activation_checkpointing:
        blocks = {id(layer) for layer in decoder_layers(model.hf)}
        for parent in list(model.hf.modules()):
            for name, child in parent.named_children():
                if id(child) in blocks:
                    parent.register_module(name, checkpoint_wrapper(child))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model.hf):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The root stays gathered between forward and backward: the head is used again when logits are recomputed.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the local shards on `device`; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def checkpoint_files(model_path: str) -> dict[str, str] | None:
    """Tensor name -> safetensors file of a directory or hub model, or None when it is not stored as safetensors."""
    index = cached_file(model_path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        files, _ = get_checkpoint_shard_files(model_path, index)
        assert files is not None
        by_name = {Path(file).name: file for file in files}
        return {tensor: by_name[file] for tensor, file in json.loads(Path(index).read_text())["weight_map"].items()}
    single = cached_file(model_path, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if single is None:
        return None
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def named_parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter), tied parameters once, in the model's order."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def load_weights(model: PreTrainedModel, model_path: str) -> None:
    """Fill the sharded parameters of `model` from `model_path`.

    Each rank reads the rows it owns straight from safetensors. A checkpoint in another format, or one that transformers
    converts while loading (other tensor names), is read once by rank 0 and broadcast.
    """
    files = checkpoint_files(model_path)
    parameters = dict(named_parameters(model))
    if files is None or not set(parameters) <= set(files):
        missing = "no safetensors files" if files is None else f"other tensor names than {type(model).__name__}"
        logger.info("%s holds %s: rank 0 loads it whole and broadcasts", model_path, missing)
        _broadcast_from_rank_zero(model, model_path)
        return
    by_file: dict[str, list[str]] = {}
    for name in parameters:
        by_file.setdefault(files[name], []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                _copy_rows(parameters[name], opened.get_slice(name), name, model_path)


class StoredTensor(Protocol):
    """A tensor on disk, read by rows."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: slice) -> torch.Tensor: ...


def _copy_rows(parameter: torch.Tensor, stored: StoredTensor, name: str, model_path: str) -> None:
    assert isinstance(parameter, DTensor)
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        raise ValueError(
            f"{model_path}: tensor {name} has shape {tuple(stored.get_shape())}, the model's config.json says "
            f"{tuple(parameter.shape)}; the weights and config.json do not belong together"
        )
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if shape[0] == 0:
        return
    with torch.no_grad():
        parameter.to_local().copy_(stored[offset[0] : offset[0] + shape[0]])


def _broadcast_from_rank_zero(model: PreTrainedModel, model_path: str) -> None:
    state = {}
    if dist.get_rank() == 0:
        dtype = next(model.parameters()).dtype
        state = dict(AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).state_dict())
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def load_config(model_path: str, overrides: dict[str, object]) -> PretrainedConfig:
    """config.json of the model with `policy.hf_config_overrides` applied."""
    return AutoConfig.from_pretrained(model_path, **overrides)

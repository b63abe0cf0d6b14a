"""A model of transformers, with the head of a language model or one number, born on the meta device, cut in every
direction asked for, then filled.

meta model -> adapters -> pipeline stages -> tensor parallel -> expert parallel -> recomputation -> compile -> FSDP2
-> memory for the local shards -> weights, slice by slice
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.dtensor import moe
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.head.scalar import auto_class, check_scalar_head, is_scalar


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
    """The model of `config` with meta parameters of `dtype` and no KV cache: a causal language model, or, as
    `scalar_config` gives it, one with a single number for a head.

    Its attention is the library's, or, where that would not compute the same, the model's own.

    Raises:
        ValueError: the family's classifier has another head than one linear layer.
    """
    implementation = attention.attention_implementation(config)
    with parameters_on_meta():
        # A copy: transformers writes the dtype and more into the configuration of a model it builds.
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=implementation)
    if is_scalar(config):
        check_scalar_head(model)
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


def recompute_activations(model: PreTrainedModel, mode: bool | str) -> None:
    """Wrap the transformer blocks so that activations are computed again in the backward pass.

    `full` (or True) keeps nothing but each block's input; `selective` keeps the results of matrix products and
    attention, which cost the most to compute again. False changes nothing.
    """
    if mode is False:
        return
    wrap = checkpoint_wrapper
    if mode == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        wrap = functools.partial(checkpoint_wrapper, context_fn=contexts)
    blocks = {id(layer) for layer in decoder_layers(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                parent.register_module(name, wrap(child))


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)


def _keep_products(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def shard(
    root: nn.Module,
    layers: list[nn.Module],
    mesh: ParallelMesh,
    compute_dtype: torch.dtype,
    *,
    cpu_offload: bool,
) -> None:
    """Apply FSDP2 in place: one group per transformer block, one for its experts, one for embeddings, norm and head.

    Gradients are summed over ranks, not averaged: the loss is already divided by a global count.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    moe.shard_experts(root, mesh, mp_policy=policy, offload_policy=offload)
    for layer in layers:
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    # The root stays gathered between forward and backward: the head is used again when logits are recomputed.
    fully_shard(root, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def materialize(model: nn.Module, device: torch.device, *, buffer_device: torch.device | None = None) -> None:
    """Allocate the local shards on `device`; buffers keep their values, on `buffer_device` (None: `device`).

    FSDP brings parameters that live on the host to the device that computes with them, but no buffers.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name in [name for name, _ in model.named_buffers()]:
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module)._buffers[attribute] = buffers[name].to(buffer_device or device)


def load_config(model_path: str, overrides: dict[str, object]) -> PretrainedConfig:
    """config.json of the model with `policy.hf_config_overrides` applied."""
    return AutoConfig.from_pretrained(model_path, **overrides)

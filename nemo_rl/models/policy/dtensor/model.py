"""From a model directory to the parts of the model that a rank trains, and from these back to whole weights.

meta model -> adapters -> pipeline stages -> tensor parallel -> expert parallel -> recomputation -> compile -> FSDP2
-> memory for the local shards -> weights, slice by slice -> ... -> `export_weights` for generation and checkpoints
"""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.distributed.collectives import gather_rows, scatter_sums
from nemo_rl.models.policy import peft_format
from nemo_rl.models.policy.attention import can_share_prompts, unpackable_reason
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor import lora, moe, pipeline, tensor_parallel
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.scalar import HEAD_WEIGHT, auto_class, draw_head, is_scalar
from nemo_rl.models.policy.pretrained import DTYPES, build_on_meta, decoder_layers
from nemo_rl.models.policy.settings import PolicyWorkerSettings
from nemo_rl.models.policy.vision.families import FAMILIES, name_in_model, part_of, sees_images, stored_name
from nemo_rl.models.policy.vision.model import VisionLogprobModel
from nemo_rl.models.policy.weight_loading import hf_name, load_weights, local_part, named_tensors
from nemo_rl.refit.layout import ExportedTensor, OwnParts, exported, gathered, in_sending_order, sharing_rows
from nemo_rl.types import SamplingParams

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 18  # up to here, to start a gather takes longer than to send the tensor


def build_stages(
    config: PolicyConfig,
    own: PolicyWorkerSettings,
    hf_config: PretrainedConfig,
    mesh: ParallelMesh,
    device: torch.device,
) -> list[LogprobModel]:
    """The parts of the model on this rank, ready to train: one, or several with an interleaved pipeline. Collective.

    `hf_config`: for a reward or value model, the result of `scalar_config`.
    """
    assert is_scalar(hf_config) == config.reward_model_cfg.enabled
    lora_cfg, host = config.dtensor_cfg.lora_cfg, torch.device("cpu")
    whole = build_on_meta(hf_config, DTYPES[config.master_precision])
    whole.eval()  # dropout would give the same tokens other logprobs in every pass
    has_parts = config.freeze and sees_images(hf_config)
    for name, parameter in whole.named_parameters() if has_parts else ():
        if part_of(name, FAMILIES[hf_config.model_type]) in config.freeze:
            parameter.requires_grad_(False)
    if lora_cfg.enabled:
        lora.apply_lora(whole, lora_cfg)
        for parameter in whole.parameters():
            if not parameter.requires_grad:  # needs no float32 master copy: nothing is ever added to it
                parameter.data = parameter.data.to(DTYPES[config.precision])
    parts = [whole]
    if mesh.pipeline is not None:
        parts = pipeline.split(whole, mesh.pipeline.get_local_rank(), config.dtensor_cfg)
    stages = []
    for part in parts:
        stage = _cut(part, config, mesh, own.sampling)
        materialize(stage, host if config.dtensor_cfg.cpu_offload else device, device)
        drawn = ", ".join(_fill(stage, config, own))
        # Of the ranks that have the head, one logs it.
        if drawn and mesh.data_rank == mesh.context_rank == mesh.world["tensor_parallel"].get_local_rank() == 0:
            logger.info("%s has no %s, as a language model: drawn from seed %d", own.model_path, drawn, own.seed)
        stages.append(stage)
    if lora_cfg.adapter_path is not None:
        peft_format.load_peft([stage.hf for stage in stages], Path(lora_cfg.adapter_path))
    return stages


def _cut(hf: PreTrainedModel, config: PolicyConfig, mesh: ParallelMesh, sampling: SamplingParams) -> LogprobModel:
    settings = config.dtensor_cfg
    if mesh.tensor is not None:
        # Before FSDP, which shards what tensor and expert parallelism leave to this rank.
        tensor_parallel.apply_tensor_parallel(hf, mesh.tensor, settings)
    moe.apply_expert_parallel(hf, mesh)
    # Wrapped before FSDP, so that one gather of a block serves its recomputation and its backward pass.
    recompute_activations(hf, settings.activation_checkpointing)
    layers = decoder_layers(hf)
    if settings.torch_compile:
        for layer in layers:
            # Block by block: equal blocks share a graph, and a graph of the whole model would grow with its layers.
            layer.compile()
    kind = LogprobModel if mesh.pipeline is None else pipeline.PipelineStageModel
    if sees_images(hf.config):
        kind = VisionLogprobModel
    stage = kind(
        hf,
        sampling,
        chunk_tokens=config.logprob_chunk_size,
        tensor=mesh.tensor,
        context=mesh.context,
    )
    per_block = settings.fsdp_per_block
    if per_block is None:
        per_block = sum(parameter.nbytes for parameter in stage.parameters()) > SMALL_MODEL_BYTES
    groups = layers if per_block else []
    shard(stage, groups, mesh, config)
    return stage


def _fill(stage: LogprobModel, config: PolicyConfig, own: PolicyWorkerSettings) -> list[str]:
    """Read the weights. Returns the names that the checkpoint lacks and that were drawn: a new reward model's head."""
    hf, lora_cfg = stage.hf.config, config.dtensor_cfg.lora_cfg
    tensors = {name: tensor for name, tensor in named_tensors(stage.hf) if not lora.is_adapter(name)}
    read = ExpertNames(hf.get_text_config().model_type).read
    fresh = {HEAD_WEIGHT: functools.partial(draw_head, config=hf, seed=own.seed)} if is_scalar(hf) else {}
    rename = functools.partial(name_in_model, config=hf) if sees_images(hf) else None
    drawn = load_weights(tensors, own.model_path, read, auto_class=auto_class(hf), fresh=fresh, rename=rename)
    if lora_cfg.enabled:
        lora.init_adapters(stage.hf, lora_cfg, own.seed)
    return drawn


def row_layout(config: PolicyConfig, hf_config: PretrainedConfig, mesh: ParallelMesh) -> RowLayout:
    """How the sequences of a micro-batch are laid out for this model on this rank."""
    settings, reward, is_padding_free = config.dtensor_cfg, config.reward_model_cfg, config.padding_free
    if is_padding_free is None:
        is_padding_free = unpackable_reason(hf_config) is None
    multiples = [config.make_sequence_length_divisible_by]
    if settings.sequence_parallel:
        # Every tensor-parallel rank holds equally many positions.
        multiples.append(settings.tensor_parallel_size)
    if config.dynamic_batching.enabled and not is_padding_free:
        multiples.append(config.dynamic_batching.sequence_length_round)
    return RowLayout(
        padding_free=is_padding_free,
        divisible_by=math.lcm(*multiples),
        context_size=mesh.sizes.context_parallel,
        context_rank=mesh.context_rank,
        context_group=mesh.context_group,
        own_states=reward.enabled and reward.reward_model_type == "bradley_terry",
        shares_prompts=config.shares_prompts and can_share_prompts(hf_config),
    )


def trainable(stages: Sequence[LogprobModel]) -> list[nn.Parameter]:
    """The parameters that the optimizer gets, in the model's order."""
    return [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]


# -- recomputation, FSDP2, memory

SMALL_MODEL_BYTES = 2**25
"""Weights of a pipeline stage up to which its blocks are gathered together, see `fsdp_per_block`."""

_EXPENSIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]


def recompute_activations(model: PreTrainedModel, mode: bool | str) -> None:
    """Wrap the transformer blocks so that the backward pass computes their activations again.

    `full` (or True) keeps only each block's input. `selective` also keeps the results of matrix products and attention,
    which cost the most to compute again. False changes nothing.
    """
    if mode is False:
        return
    wrap: Any = checkpoint_wrapper
    if mode == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _EXPENSIVE)
        wrap = functools.partial(checkpoint_wrapper, context_fn=contexts)
    is_block = set(decoder_layers(model)).__contains__
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_block)


class _Allocated:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocated, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        gather_rows(output_tensor, input_tensor, group)


class _ReduceScatter(_Allocated, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "see `shard`"
        scatter_sums(output_tensor, input_tensor, group)


def shard(root: nn.Module, blocks: list[nn.Module], mesh: ParallelMesh, config: PolicyConfig) -> None:
    """Apply FSDP2 in place: one group for each of `blocks`, one for each layer's experts, one for the rest.

    Gradients are summed over ranks, not averaged: the loss is already divided by a global count.
    """
    # Sums of gradients over many ranks lose digits in bfloat16, so they are reduced in float32.
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32)
    is_offloaded = config.dtensor_cfg.cpu_offload
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if is_offloaded else OffloadPolicy()
    moe.shard_experts(root, mesh, policy, offload)
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    # The root stays gathered between forward and backward: the backward pass computes logits from the head again.
    fully_shard(root, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            if mesh.fsdp.device_type == "cpu":
                module.set_custom_all_gather(_AllGather())
                module.set_custom_reduce_scatter(_ReduceScatter())
            # FSDP would average over ranks; see the docstring.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def materialize(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Allocate the local shards of the parameters on `device`. Buffers keep their values, on `buffer_device`.

    With CPU offload FSDP moves parameters to the device that computes with them, but not buffers.
    """

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        return torch.empty_like(tensor, device=device) if is_parameter else tensor.to(buffer_device)

    model._apply(allocate)


# -- whole weights, for generation and checkpoints


def export_weights(
    stages: Sequence[PreTrainedModel], mesh: ParallelMesh, device: torch.device, *, merged: bool = True
) -> list[ExportedTensor]:
    """Every weight of the model whose parts on this rank are `stages`: whole, under its name on disk.

    Every rank lists the same tensors in the same order. Collective over pipeline ranks.

    Adapters are merged into their weights. Unless `merged`, they are tensors of their own after all base weights
    (`ExportedTensor.adapts`), with B multiplied by alpha / r. Frozen weights come first.
    """
    own = [
        replace(
            tensor,
            name=stored_name(tensor.name, stage.config),
            adapts=None if tensor.adapts is None else stored_name(tensor.adapts, stage.config),
        )
        for stage in stages
        for tensor in exported_of(stage, merged)
    ]
    everywhere = own if mesh.pipeline is None else _over_pipeline(own, mesh, device)
    return in_sending_order(everywhere)


def exported_of(root: Any, merged: bool = True) -> Iterator[ExportedTensor]:
    """Every weight of a module with a `config` of transformers, without regard to the names of models that see."""
    names = ExpertNames(root.config.get_text_config().model_type)
    seen: set[int] = set()
    small: defaultdict[Any, _SmallTensors] = defaultdict(_SmallTensors)
    for prefix, module in root.named_modules():
        persistent = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for attribute, tensor in (module._parameters | persistent).items():
            if tensor is None or id(tensor) in seen:  # tied
                continue
            seen.add(id(tensor))
            name = hf_name(f"{prefix}.{attribute}" if prefix else attribute)
            if isinstance(module, lora.LoRALinear) and (lora.is_adapter(attribute) or attribute == "weight"):
                yield from _adapted(name, module, attribute, names, merged)
            else:
                yield from _plain(name, module, attribute, names, small)


def _adapted(
    name: str, module: lora.LoRALinear, attribute: str, names: ExpertNames, merged: bool
) -> Iterator[ExportedTensor]:
    """The weight of an adapted layer with its adapter merged in, or one of W, A and (alpha / r) B."""
    weight = names.stored_name(f"{name.rpartition('.')[0]}.weight")
    is_adapter = lora.is_adapter(attribute)
    if merged and is_adapter:
        return

    def values() -> torch.Tensor:  # looked up at every gather: moving a module between devices replaces parameters
        if not is_adapter:
            return lora.merged_weight(module) if merged else module.weight.detach()
        return module.lora_B.detach() * module.scale if attribute == "lora_B" else module.lora_A.detach()

    parameter = module.get_parameter(attribute)
    yield ExportedTensor(
        name=name if is_adapter else weight,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        collective=lambda dtype, own: gathered(values(), dtype, own),
        adapts=weight if is_adapter else None,
    )


class _SmallTensors:
    """Tensors whose rows the same ranks share, gathered in order, each once: taking the first one gathers all."""

    def __init__(self) -> None:
        self.current: list[Callable[[], torch.Tensor]] = []
        self._whole: dict[int, torch.Tensor] = {}  # those that were not taken yet

    def take(self, number: int, group: dist.ProcessGroup, dtype: torch.dtype | None, own: OwnParts) -> torch.Tensor:
        if number == 0:
            shards = [gathered(local_part(current().detach()), dtype, own) for current in self.current]
            given = torch.cat([shard.flatten() for shard in shards])
            ranks = given.new_empty(group.size(), len(given))
            gather_rows(ranks, given, group)
            own.compare(given, ranks[group.rank()])
            parts = ranks.split([shard.numel() for shard in shards], dim=1)
            # Contiguous: with one row a rank a reshape alone would be a strided view of the columns.
            self._whole = {i: rows.contiguous().view(-1, *shards[i].shape[1:]) for i, rows in enumerate(parts)}
        return self._whole.pop(number)


def _plain(
    name: str, module: nn.Module, attribute: str, names: ExpertNames, small: Mapping[Any, _SmallTensors]
) -> Iterator[ExportedTensor]:
    def current() -> torch.Tensor:  # looked up at every gather: moving a module between devices replaces parameters
        tensor = module._parameters.get(attribute, module._buffers.get(attribute))
        assert tensor is not None
        return tensor

    # bfloat16 models keep some buffers in float32: the bias that chooses experts moves by less than bfloat16's step.
    is_buffer = attribute in module._buffers
    fixed = not is_buffer and not current().requires_grad
    pieces = names.split_meta(name, current().shape)
    if len(pieces) == 1:
        whole, tensor = exported(pieces[0][0], current, keeps_dtype=is_buffer, fixed=fixed), current()
        group = sharing_rows(tensor) if isinstance(tensor, DTensor) and tensor.nbytes <= _SMALL_BYTES else None
        if group is not None:
            together = small[group, tensor.dtype, fixed]  # a sync may leave out the fixed ones
            whole = replace(whole, collective=functools.partial(together.take, len(together.current), group))
            together.current.append(current)
        yield whole
        return
    parts: list[torch.Tensor] = []

    def gather(index: int, dtype: torch.dtype | None, own: OwnParts) -> torch.Tensor:
        """The first piece gathers the parameter and the last one drops it, so that memory holds one at most."""
        if index == 0:
            parts[:] = (part for _, part in names.split(name, gathered(current().detach(), dtype, own)))
        assert len(parts) == len(pieces), "pieces are gathered in order"
        part = parts[index].contiguous()
        if index == len(pieces) - 1:
            parts.clear()
        return part

    for index, (piece, shape) in enumerate(pieces):
        one = functools.partial(gather, index)
        yield ExportedTensor(name=piece, shape=shape, dtype=current().dtype, collective=one, fixed=fixed)


def _over_pipeline(own: list[ExportedTensor], mesh: ParallelMesh, device: torch.device) -> list[ExportedTensor]:
    group = mesh.pipeline_group
    assert group is not None
    described: list[list[ExportedTensor]] = [[] for _ in range(group.size())]
    # A name that pickles, in the place of a function that nobody calls.
    plain = [replace(tensor, collective=torch.empty) for tensor in own]  # pyrefly: ignore[bad-argument-type]
    dist.all_gather_object(described, plain, group=group)
    mine = {tensor.name: tensor for tensor in own}

    def broadcast(tensor: ExportedTensor, source: int, dtype: torch.dtype | None, parts: OwnParts) -> torch.Tensor:
        if tensor.name in mine:
            whole = mine[tensor.name].gather(dtype, parts).to(device)
        else:
            # Integer buffers keep their dtype on every rank, as `gather` leaves them on the owning one.
            wanted = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
            whole = torch.empty(tensor.shape, dtype=wanted, device=device)
        dist.broadcast(whole, src=source, group=group)
        return whole

    return [
        replace(tensor, collective=functools.partial(broadcast, tensor, dist.get_global_rank(group, stage)))
        for stage, of_stage in enumerate(described)
        for tensor in of_stage
    ]

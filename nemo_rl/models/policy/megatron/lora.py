"""Low-rank adapters on Megatron's linear layers (Hu et al. 2021, arXiv 2106.09685), sharded like the layers.

    y = x W^T + b + (alpha / r) (dropout(x) A^T) B^T        W [out, in], A [r, in], B [out, r]

    column parallel   x whole (sequence parallel: own positions), A replicated, B own rows; h = x A^T is [S, r]
                      forward: h unchanged (or gathered over positions); backward: sum of its gradient over ranks
    row parallel      x own features, A own columns, B replicated
                      forward: sum of h over ranks (or reduce-scatter over positions); y is then like the layer's

So every collective moves only r features, and gradients of replicated matrices are complete. The exception is sequence
parallelism: each rank has the gradient of its positions, and Megatron sums them, as for norms (`sequence_parallel`).
The model is frozen before it is wrapped, so Megatron keeps no gradients and no optimizer state for it. B is initially
zero; without its adapters the model is the reference policy.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from nemo_rl.models.policy.config import LoRAConfig
from nemo_rl.models.policy.dtensor.lora import draw_first_matrix
from nemo_rl.models.policy.head.scalar import HEAD
from nemo_rl.models.policy.megatron.adapter_map import (
    AdaptedLayer,
    adapted_layers,
    peft_tensors,
    trained_head,
    trained_map,
)
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronPeftConfig
from nemo_rl.models.policy.megatron.gpt_model import PolicyGPTModel
from nemo_rl.models.policy.megatron.mapping import ParallelRanks, WeightMap
from nemo_rl.models.policy.megatron.mesh import MegatronMesh, parallel_state
from nemo_rl.models.policy.megatron.model import mark_shards, parameters_by_name
from nemo_rl.models.policy.megatron.weights import export_weights, local_shards
from nemo_rl.models.policy.peft_format import write_peft
from nemo_rl.refit.layout import merge


class Adapter(nn.Module):
    """Computes what is added to a linear layer's output: [S, 1, in] -> [S, 1, out], this rank's features and positions.

    Construction leaves this rank's `lora_A` [r, in] and `lora_B` [out, r] undefined. Dropout is on in training mode.
    """

    def __init__(self, linear: Any, layer: AdaptedLayer, peft: MegatronPeftConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        # Of the size of this rank's shard: columns of A are columns of W, rows of B are rows of W.
        self.lora_A = nn.Parameter(linear.weight.new_empty(peft.dim, columns))
        self.lora_B = nn.Parameter(linear.weight.new_empty(rows, peft.dim))
        self.scale = peft.alpha / peft.dim
        self.dropout = peft.dropout
        self.is_active = True
        self.is_row_parallel = layer.is_row_parallel
        self.group = group
        self.shards_positions = linear.config.sequence_parallel and group.size() > 1
        if self.shards_positions:
            replicated: Any = self.lora_B if self.is_row_parallel else self.lora_A
            replicated.sequence_parallel = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Scaled where the tensor is narrowest.
        narrow = F.linear(F.dropout(input, self.dropout, self.training), self.lora_A) * self.scale
        return F.linear(self._reduce(narrow), self.lora_B)

    def _reduce(self, narrow: torch.Tensor) -> torch.Tensor:
        if self.is_row_parallel and self.shards_positions:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        if self.is_row_parallel:
            return reduce_from_tensor_model_parallel_region(narrow, group=self.group)
        if self.shards_positions:
            return tensor_parallel.gather_from_sequence_parallel_region(narrow, group=self.group)
        return copy_to_tensor_model_parallel_region(narrow, group=self.group)


def _add_adapter(linear: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    if not linear.adapter.is_active:
        return outputs
    (input,), (output, bias) = inputs, outputs
    if "layer_norm_weight" in linear._parameters:  # Transformer Engine fuses the preceding norm into the layer
        norm, epsilon = linear.layer_norm_weight, linear.config.layernorm_epsilon
        # The layer got its input before the norm, and the adapter has to see what the matrix saw.
        input = F.rms_norm(input.float(), norm.shape, norm.float(), epsilon).to(input.dtype)
    return output + linear.adapter(input), bias


class Adapters:
    """The adapters of this rank's stages. While `active`, the model is the one without them: the reference policy.

    Attributes:
        trained_map: the mapping of the trained parameters, over the whole model.
    """

    def __init__(
        self,
        stages: Sequence[PolicyGPTModel],
        weights: WeightMap,
        config: MegatronConfig,
        mesh: MegatronMesh,
        seed: int,
    ) -> None:
        """Insert adapters into `stages`, whose weights are loaded, and freeze the rest. Before they are wrapped.

        Raises:
            ValueError: as `adapted_layers`.
        """
        self.peft = config.peft
        self.weights = weights
        self.layers = adapted_layers(weights, config.peft)
        self.trained_map = trained_map(weights, self.layers)
        self._by_weight = {layer.weight.template: layer for layer in self.layers}
        parameters = parameters_by_name(stages)
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for entry in trained_head(weights):
            if entry.template in parameters:
                parameters[entry.template].requires_grad_(True)
        modules = [module for stage in stages for module in stage.modules()]
        owners = {id(part): module for module in modules for part in module.parameters(recurse=False)}
        self.modules: list[Adapter] = []
        for name, layer in self._by_weight.items():
            if name not in parameters:  # on another stage
                continue
            linear = owners[id(parameters[name])]
            adapter = Adapter(linear, layer, self.peft, parallel_state.get_tensor_model_parallel_group())
            linear.add_module("adapter", adapter)
            linear.register_forward_hook(_add_adapter, prepend=True)  # other hooks then see the sum
            self.modules.append(adapter.train(linear.training))
        trained = self.trained_of(parameters_by_name(stages))
        self._draw(trained, mesh.ranks, seed)
        mark_shards(trained, self.trained_map, mesh.ranks)
        for stage in stages:
            if config.activation_checkpointing and stage.pre_process:
                stage.embedding.register_forward_hook(_require_gradient)

    @torch.no_grad()
    def _draw(self, trained: Mapping[str, torch.Tensor], ranks: ParallelRanks, seed: int) -> None:
        """Initial values as in `lora.init_adapters`: a layer that is the same in both backends gets the same values."""
        for layer in self.layers:
            if layer.lora_a.template in trained:
                shape = layer.lora_a.sources[0].shape
                # Every rank draws the whole matrix, so the values do not depend on the number of ranks.
                whole = draw_first_matrix(layer.hf_names[0], shape, self.peft.lora_A_init_method, seed)
                shard = layer.lora_a.shard([whole], *layer.lora_a.rank_and_size(ranks))
                trained[layer.lora_a.template].copy_(shard)
                trained[layer.lora_b.template].zero_()

    def trained_of(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The trained ones of `parameters`."""
        names = {entry.template for entry in self.trained_map.entries}
        return {name: parameter for name, parameter in parameters.items() if name in names}

    @contextmanager
    def active(self) -> Generator[None]:
        """Inside, the model computes without adapters."""
        for module in self.modules:
            module.is_active = False
        try:
            yield
        finally:
            for module in self.modules:
                module.is_active = True

    @torch.no_grad()
    def merged(self, parameters: Mapping[str, torch.Tensor], device: torch.device, name: str) -> torch.Tensor:
        """`parameters[name]`; for the weight of an adapted layer W + (alpha / r) B A, in float32, on `device`.

        This needs no communication: a shard of W takes this rank's shards of A and B.
        """
        weight = parameters[name]
        if name not in self._by_weight:
            return weight
        layer = self._by_weight[name]
        parts = (weight, parameters[layer.lora_a.template], parameters[layer.lora_b.template])
        weight, lora_a, lora_b = (part.detach().to(device) for part in parts)
        return merge(weight, lora_a, lora_b, self.peft.alpha / self.peft.dim)

    def save(
        self, parameters: Mapping[str, torch.Tensor], mesh: MegatronMesh, directory: Path, base_model_name: str
    ) -> None:
        """Write the adapters to `directory` in PEFT's format. Collective; rank 0 writes."""
        trained = self.trained_of(parameters)
        device = next(iter(trained.values())).device
        shards = local_shards(trained, self.trained_map, mesh.ranks, device)
        exported = export_weights(shards, self.trained_map, device)
        whole = {tensor.name: tensor.gather(None).cpu() for tensor in exported}
        if dist.get_rank() == 0:
            write_peft(
                peft_tensors(self.layers, whole),
                LoRAConfig(
                    **self.peft.model_dump(include={"enabled", "dim", "alpha", "dropout"}),
                    lora_A_init=self.peft.lora_A_init_method,
                ),
                directory,
                base_model_name,
                chosen=[name for layer in self.layers for name in layer.hf_names],
                modules=[tensor.name.rpartition(".")[0] for tensor in self.weights.hf_tensors],
                heads=[HEAD] if trained_head(self.weights) else None,
            )
        dist.barrier()


def _require_gradient(embedding: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A recomputed layer has gradients only if its input requires them, which a frozen embedding's output does not."""
    return output.requires_grad_() if torch.is_grad_enabled() else output

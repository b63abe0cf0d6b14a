"""Tensor parallelism: the matrices of every layer, the embeddings and the head shared out over neighbouring ranks.

    tokens -> embeddings (rows of the vocabulary) -> blocks -> final norm -> hidden states, whole on every rank
                                                                               -> head (its rows are the vocabulary)

All ranks of the axis see the same tokens and end with the same hidden states; the gradient that comes back must be
complete on each of them.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.models.policy import tp_plans
from nemo_rl.models.policy.parallelize import build_on_meta
from nemo_rl.models.policy.tp_styles import Colwise, Rowwise


def check_tensor_parallel(
    config: PretrainedConfig, size: int, *, sequence_parallel: bool, custom_plan: str | None
) -> None:
    """Whether a model of `config` can be cut over `size` ranks. Loads no weights; needs no process group.

    Args:
        custom_plan: import path `package.module:name` of a plan, see `tp_plans`.

    Raises:
        ValueError: `size` does not divide heads or matrices (says what would work); no plan is known for the
            architecture (says how to write one); `custom_plan` cannot be imported or is no plan.
    """
    if size == 1:
        return
    hf = build_on_meta(config, torch.bfloat16)
    plan = tp_plans.styles(hf, sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    _check_divisible(hf, plan, size)


def apply_tensor_parallel(
    hf: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool, custom_plan: str | None
) -> None:
    """Cut `hf`, on the meta device, over the 1-D `mesh`, in place.

    Afterwards its parameters are DTensors (but those of experts and routers) under the names they had, and
    `hf.base_model(...)` gives plain hidden states [R, W, H], the same on every rank; with `sequence_parallel` W must be
    a multiple of the ranks. The head is not meant to be called: its weight is Shard(0), the vocabulary. With
    `sequence_parallel` a pipeline stage without embeddings takes, and one without final norm gives, hidden states of
    its own positions only, [R, W / size, H].

    Raises:
        ValueError: as `check_tensor_parallel`.
    """
    plan = tp_plans.styles(hf, sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    _check_divisible(hf, plan, mesh.size())
    embeddings, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = embeddings is not None and head is not None and head.weight is embeddings.weight
    parallelize_module(hf, mesh, dict(plan), src_data_rank=None)
    if is_tied:
        assert embeddings is not None and head is not None
        head.weight = embeddings.weight


def _check_divisible(hf: PreTrainedModel, plan: tp_plans.Plan, size: int) -> None:
    config = hf.config.get_text_config()
    sizes = config.to_dict()
    asked = {
        f"{sizes[key]} {what}": sizes[key]
        for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key/value heads"))
        if sizes.get(key)
    }
    for name, style in plan.items():
        module = hf.get_submodule(name)
        if not isinstance(module, nn.Linear) or module is hf.get_output_embeddings():
            continue
        if isinstance(style, Colwise):
            asked[f"{module.out_features} output features of {name}"] = module.out_features
        elif isinstance(style, Rowwise):
            asked[f"{module.in_features} input features of {name}"] = module.in_features
    failing = [what for what, count in asked.items() if count % size]
    if failing:
        common = math.gcd(*asked.values())
        works = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size={size} does not divide the {failing[0]} of the "
            f"{config.model_type!r} model; these would: {works}"
        )

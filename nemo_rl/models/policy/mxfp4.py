"""Weights that are stored in MXFP4, as GPT-OSS's experts are: read as ordinary numbers, never written.

Microscaling formats (OCP 2023): 32 numbers of four bits share a scale, a power of two of eight bits.

    NAME_blocks uint8 [E, out, in / 32, 16], two numbers per byte, the first in the lower half
    NAME_scales uint8 [E, out, in / 32], exponents with an offset of 127
    -> NAME [E, in, out], which is how transformers holds these matrices
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from nemo_rl.models.policy.weight_loading import StoredModel, check_shape, local_index, local_part

GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plain_config(config: PretrainedConfig, name: str) -> PretrainedConfig:
    """The config.json of a quantised model as that of ordinary weights.

    Raises:
        ValueError: the weights of `name` are in a format that cannot be read.
    """
    settings = config.to_dict()["quantization_config"]
    method = settings.get("quant_method")
    if (config.model_type, method) != ("gpt_oss", "mxfp4"):
        raise ValueError(
            f"{name!r} is quantised ({method}), and training needs ordinary weights; name the model that it was made "
            "from, or dequantise it with transformers and save_pretrained it. Only GPT-OSS in MXFP4 is read as it is"
        )
    del config.__dict__["quantization_config"]
    return config


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., in / 32, 16] and [..., in / 32] -> float32 [..., in]."""
    values = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
    numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)


def stored_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk of parameter `name`, [E, in, out]."""
    experts, rows, columns = shape
    groups = (experts, columns, rows // GROUP)
    return {f"{name}_blocks": (*groups, 16), f"{name}_scales": groups}


@torch.no_grad()
def read(name: str, tensor: torch.Tensor, stored: StoredModel) -> None:
    """Fill a parameter or DTensor [E, in, out], reading only this rank's part. ValueError for another shape on disk."""
    shapes = stored_shapes(name, tuple(tensor.shape))
    blocks, scales = (stored.tensor(source) for source in shapes)
    for piece, (source, shape) in zip((blocks, scales), shapes.items(), strict=True):
        check_shape(piece, shape, source, stored.model_path)
    own_experts, own_rows, own_columns = local_index(tensor) or (slice(0, 0),) * 3
    for local, expert in zip(local_part(tensor), range(own_experts.start, own_experts.stop), strict=False):
        whole = dequantize(blocks[expert, own_columns], scales[expert, own_columns])  # [out, in], one at a time
        local.copy_(whole.T[own_rows])

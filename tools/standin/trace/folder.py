"""A model's folder of any size whose weights take no disk: safetensors files that are holes behind their headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.pretrained import build_on_meta
from nemo_rl.models.policy.vision.families import sees_images
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.utils.files import make_once

KINDS = {torch.bfloat16: ("BF16", 2), torch.float32: ("F32", 4), torch.int64: ("I64", 8)}
FILE_BYTES = 4 << 30


def sparse_folder(config: PretrainedConfig, folder: Path) -> Path:
    """A folder with the files of a model in bfloat16, all zeros, and a tiny tokenizer. Made once."""
    return make_once(folder, lambda work: _write(config, work))


def disk_bytes(folder: Path) -> int:
    """Bytes that the files take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def _write(config: PretrainedConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    values = config.to_dict() | {"dtype": "bfloat16", "architectures": [mapping[type(config)].__name__]}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    build_tiny_tokenizer().save_pretrained(folder)
    weight_map, total = {}, 0
    for number, header in enumerate(_headers(config), 1):
        name = f"model-{number:05d}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        size = max(entry["data_offsets"][1] for entry in header.values())
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        weight_map |= dict.fromkeys(header, name)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _headers(config: PretrainedConfig) -> Iterator[dict[str, dict]]:
    """The header of each file: name of a tensor -> dtype, shape and place."""
    names = ExpertNames(config.get_text_config().model_type)
    header, end = dict[str, dict](), 0
    for name, tensor in named_tensors(build_on_meta(config, torch.bfloat16)):
        kind, itemsize = KINDS[tensor.dtype]
        for piece, shape in names.split_meta(name, tensor.shape):
            size = prod(shape) * itemsize
            if header and end + size > FILE_BYTES:
                yield header
                header, end = {}, 0
            header[piece] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
    yield header

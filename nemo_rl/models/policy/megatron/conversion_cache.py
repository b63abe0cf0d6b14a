"""Weights that cannot be read by slices, converted once: `*.bin` files of torch -> safetensors under the same names.

    <NRL_MEGATRON_CHECKPOINT_DIR>/<model>/conversion.json, model-00001.safetensors, ..., model.safetensors.index.json

Safetensors are not converted: every rank reads the slices it owns, also of fused experts, as fast from the model as
from a copy of it. The first rank of each machine converts, some tensors at a time, and the others wait.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import PretrainedConfig
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from nemo_rl.models.policy.checkpoint import write_safetensors
from nemo_rl.models.policy.megatron.mapping import WeightMap
from nemo_rl.models.policy.weight_loading import checkpoint_files, weights_identity
from nemo_rl.utils.checkpoint_files import file_lock

logger = logging.getLogger(__name__)

DIRECTORY = "NRL_MEGATRON_CHECKPOINT_DIR"
FORCE = "policy.megatron_cfg.force_reconvert_from_hf"
VERSION = 1
"""Of what is written: another one is a stale cache."""

_RECORD = "conversion.json"


def cache_directory() -> Path:
    """Where conversions are kept."""
    given, home = os.environ.get(DIRECTORY), os.environ.get("HF_HOME")
    if given:
        return Path(given)
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "nemo_rl"


def check_conversion(name: str, model_path: str, config: PretrainedConfig, *, force: bool) -> None:
    """ValueError when a conversion of other weights, or of another version, is kept under the name of the model."""
    kept, wanted = _kept(name), _record(name, model_path, config)
    if force or not kept.is_dir() or checkpoint_files(model_path) is not None:
        return
    found = _read_record(kept)
    if any(found.get(key) != value for key, value in wanted.items()):
        different = sorted(key for key, value in wanted.items() if found.get(key) != value)
        raise ValueError(
            f"policy.model_name={name!r}: the conversion kept in {kept} is stale, its {' and '.join(different)} "
            f"differing from the model's; set {FORCE}=true to make it anew, or {DIRECTORY} to another directory"
        )


def readable_model(name: str, model_path: str, config: PretrainedConfig, weight_map: WeightMap, *, force: bool) -> str:
    """A directory with the weights of `model_path` as safetensors: itself, or a conversion. Collective.

    Args:
        name: policy.model_name, which a conversion is kept under.
        force: convert again, over one that is there.

    Raises:
        ValueError: on all ranks: as `check_conversion`, for names that are not those of the architecture, and when it
            cannot be written.
    """
    if checkpoint_files(model_path) is not None:
        return model_path
    run = [uuid.uuid4().hex]
    dist.broadcast_object_list(run, src=0)
    problem: str | None = None
    try:
        _convert_once(name, model_path, config, weight_map, force=force, run=run[0])
    except (OSError, SafetensorError) as error:  # a full disk is either, by who writes
        problem = f"{cache_directory()} cannot be written: {error}; set {DIRECTORY} to another directory"
    except ValueError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [text for text in problems if text is not None]
    if found:
        raise ValueError(found[0])
    return str(_kept(name))


def _convert_once(
    name: str, model_path: str, config: PretrainedConfig, weight_map: WeightMap, *, force: bool, run: str
) -> None:
    kept = _kept(name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(kept.with_name(f"{kept.name}.lock")):
        check_conversion(name, model_path, config, force=force)
        if kept.is_dir() and (not force or _read_record(kept).get("run") == run):
            return
        partial = kept.with_name(f"{kept.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        logger.info("%s holds no safetensors: converting it into %s (once; it may be deleted)", model_path, kept)
        write_safetensors(_stored(model_path), partial)
        names = json.loads((partial / "model.safetensors.index.json").read_text())["weight_map"]
        weight_map.check_names(names)
        (partial / _RECORD).write_text(json.dumps(_record(name, model_path, config) | {"run": run}))
        if kept.exists():
            shutil.rmtree(kept)
        partial.rename(kept)


def _stored(model_path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of torch's weight files, mapped into memory one after the other; nothing in them is executed."""
    index = cached_file(model_path, "pytorch_model.bin.index.json", _raise_exceptions_for_missing_entries=False)
    single = cached_file(model_path, "pytorch_model.bin", _raise_exceptions_for_missing_entries=False)
    files = [single] if index is None else get_checkpoint_shard_files(model_path, index)[0]
    for file in files or ():
        if file is None:
            raise ValueError(f"{model_path} holds neither *.safetensors nor pytorch_model*.bin")
        state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        yield from state.items()


def _kept(name: str) -> Path:
    return cache_directory() / re.sub(r"[^\w.-]+", "--", name).strip("-")


def _record(name: str, model_path: str, config: PretrainedConfig) -> dict[str, Any]:
    return {"weights": weights_identity(name, model_path, config), "version": VERSION}


def _read_record(kept: Path) -> dict[str, Any]:
    path = kept / _RECORD
    return json.loads(path.read_text()) if path.is_file() else {}

"""Checkpoints of Megatron policies as files, without Megatron Core: for the driver and the converters.

    policy/megatron.json   marks a checkpoint of Megatron; holds the counters of optimizer and schedule
    policy/weights/        torch.distributed.checkpoint, under Hugging Face names, one tensor per expert
    policy/optimizer/      likewise, `<name>.<state>`
    policy/generators/     random generators by rank

The names are those of `WeightMap.hf_tensors`, whatever layout the checkpoint was saved on. Model weights in torch's
`*.bin` files are converted once (`readable_model`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from transformers import PretrainedConfig
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from nemo_rl.models.policy.checkpoint import write_safetensors
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.head.scalar import is_scalar
from nemo_rl.models.policy.megatron.adapter_map import adapted_layers, trained_map
from nemo_rl.models.policy.megatron.config import MegatronPeftConfig
from nemo_rl.models.policy.megatron.mapping import WeightMap, scalar_map, weight_map
from nemo_rl.models.policy.weight_loading import checkpoint_files, weights_identity
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.tensors import DamagedTensorsError, check_checkpoint_fits, saved_tensors
from nemo_rl.utils.files import file_lock

logger = logging.getLogger(__name__)

MARKER = "megatron.json"
_FORMAT = "nemo_rl megatron checkpoint 1"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a checkpoint records besides its tensors."""

    optimizer: str | None = None  # megatron_cfg.optimizer.optimizer; None: no optimizer was saved
    optimizer_steps: int | None = None  # counted by Adam
    scheduler_steps: int | None = None

    def write(self, directory: Path) -> None:
        """Write `directory/megatron.json`. Raises OSError."""
        (directory / MARKER).write_text(json.dumps({"format": _FORMAT, **asdict(self)}))

    @classmethod
    def read(cls, directory: Path) -> Counters:
        """Inverse of `write`. CheckpointError for a checkpoint that another backend saved, or a damaged one."""
        path = directory / MARKER
        if not path.is_file():
            raise CheckpointError(
                f"{directory} was not saved by megatron_cfg: {MARKER} is missing. Resume it with dtensor_cfg; or start "
                "anew from its weights: make a model directory of them with examples/converters/convert_dcp_to_hf.py, "
                "and name that as model_name with another checkpointing.checkpoint_dir"
            )
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
            if values.pop("format") != _FORMAT:
                raise ValueError("of another format")
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedTensorsError(f"{path} is damaged ({error}); restore it from a copy") from error


def is_megatron_checkpoint(directory: Path) -> bool:
    """Whether the `policy/` (or `value/`) folder `directory` of a checkpoint was saved by Megatron."""
    return (directory / MARKER).is_file()


def refuse_megatron_checkpoint(directory: Path) -> None:
    """CheckpointError if Megatron saved `directory`, which dtensor_cfg cannot resume."""
    if is_megatron_checkpoint(directory):
        raise CheckpointError(
            f"{directory} was saved by megatron_cfg. Resume it with that; or start anew from its weights: make a model "
            "directory of them with examples/converters/convert_megatron_to_hf.py, and name that as model_name with "
            "another checkpointing.checkpoint_dir"
        )


def checkpoint_shapes(model: PretrainedConfig, peft: MegatronPeftConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the checkpoint of a model or, with `peft`, of its adapters.

    Raises:
        ValueError: the model has no mapping, or `peft` names layers that it lacks.
    """
    weights = weight_map(model, implementation="local")  # Transformer Engine has the same tensors
    if is_scalar(model):
        weights = scalar_map(weights, model.get_text_config().hidden_size)
    if peft is not None and peft.enabled:
        weights = trained_map(weights, adapted_layers(weights, peft))
    return shapes_of(weights)


def shapes_of(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `weights` maps."""
    return {tensor.name: tensor.shape for tensor in weights.hf_tensors}


def problems_of_all(problem: str | None, group: dist.ProcessGroup | None = None) -> list[str]:
    """The problems of all ranks that have one. Every rank then raises, where one alone would leave others waiting."""
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return [text for text in problems if text is not None]


def check_checkpoint(directory: Path, policy: PolicyConfig, model: PretrainedConfig) -> None:
    """Check by headers that the folder `directory` of a checkpoint holds the weights of this model.

    Damaged headers are only logged: the resuming run falls back to an older checkpoint.

    Raises:
        CheckpointError: a checkpoint of the other backend or optimizer, or tensors that are missing, unexpected or
            have other shapes, which the text lists.
    """
    try:
        counters = Counters.read(directory)
        check_checkpoint_fits(directory / "weights", checkpoint_shapes(model, policy.megatron_cfg.peft))
    except DamagedTensorsError as error:
        logger.warning("%s", error)
        return
    check_optimizer(directory, counters, policy.megatron_cfg.optimizer.optimizer)


def check_optimizer(directory: Path, counters: Counters, optimizer: str) -> None:
    """CheckpointError if `directory` holds the state of another optimizer."""
    if counters.optimizer in (None, optimizer) or {counters.optimizer, optimizer} == {"muon", "dist_muon"}:
        return
    raise CheckpointError(
        f"{directory} holds the state of {counters.optimizer}, this run has {optimizer}: set "
        f"megatron_cfg.optimizer.optimizer={counters.optimizer}"
    )


def read_tensors(
    weights: Path, names: list[str], *, dtype: torch.dtype | None = None, max_bytes: int = 4 << 30
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) in the order of `names`, as saved or in `dtype`. Holds `max_bytes`, or one larger tensor.

    Works in one process, without a process group. CheckpointError if they cannot be read.
    """
    saved = saved_tensors(weights)
    batch: dict[str, Any] = {}
    num_bytes = 0
    for name in names:
        wanted = dtype if dtype is not None and saved[name].properties.dtype.is_floating_point else None
        tensor = torch.empty(saved[name].size, dtype=wanted or saved[name].properties.dtype)
        if batch and num_bytes + tensor.nbytes > max_bytes:
            yield from _read(weights, batch)
            num_bytes = 0
        batch[name] = tensor
        num_bytes += tensor.nbytes
    if batch:
        yield from _read(weights, batch)


def _read(weights: Path, batch: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        dcp.load(dict(batch), checkpoint_id=str(weights), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{weights} could not be read: {error}") from error
    while batch:  # frees each tensor when the caller is done with it
        name = next(iter(batch))
        yield name, batch.pop(name)


# -- conversion of weights that cannot be read by slices: `*.bin` files of torch -> safetensors under the same names
#
#     <NRL_MEGATRON_CHECKPOINT_DIR>/<model>/conversion.json, model-00001.safetensors, ..., model.safetensors.index.json
#
# Safetensors need no conversion: every rank reads the slices it owns, also of fused experts, straight from the model.
# The first rank of each machine to take the lock converts, some tensors at a time, and the others wait.

DIRECTORY = "NRL_MEGATRON_CHECKPOINT_DIR"
VERSION = 1
"""Version of the converted files; a cache with another one is stale."""

_RECORD = "conversion.json"


def cache_directory() -> Path:
    """The directory of conversions."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get(DIRECTORY) or Path(home) / "nemo_rl")


def check_conversion(policy: PolicyConfig, model_path: str, config: PretrainedConfig) -> None:
    """ValueError if the cached conversion of the model is of other weights or another version."""
    name = policy.model_name
    kept, wanted = _kept(name), _record(name, model_path, config)
    if policy.megatron_cfg.force_reconvert_from_hf or not kept.is_dir() or checkpoint_files(model_path) is not None:
        return
    found = _read_record(kept)
    if different := sorted(key for key, value in wanted.items() if found.get(key) != value):
        raise ValueError(
            f"{policy.key('model_name')}={name!r}: the conversion kept in {kept} is stale, its "
            f"{' and '.join(different)} differing from the model's; set "
            f"{policy.key('megatron_cfg.force_reconvert_from_hf')}=true to make it anew, or {DIRECTORY} to another "
            "directory"
        )


def readable_model(policy: PolicyConfig, model_path: str, config: PretrainedConfig, weight_map: WeightMap) -> str:
    """A directory with the weights of `model_path` as safetensors: itself, or a conversion. Collective.

    `model_name` names the conversion, and `force_reconvert_from_hf` replaces an existing one.

    Raises:
        ValueError: on all ranks: as `check_conversion`; the names do not fit the architecture; or writing failed.
    """
    if checkpoint_files(model_path) is not None:
        return model_path
    run = [uuid.uuid4().hex]
    dist.broadcast_object_list(run, src=0)
    problem: str | None = None
    try:
        _convert_once(policy, model_path, config, weight_map, run[0])
    except (OSError, SafetensorError) as error:  # the writer decides which of them a full disk raises
        problem = f"{cache_directory()} cannot be written: {error}; set {DIRECTORY} to another directory"
    except ValueError as error:
        problem = str(error)
    if problems := problems_of_all(problem):
        raise ValueError(problems[0])
    return str(_kept(policy.model_name))


def _convert_once(
    policy: PolicyConfig, model_path: str, config: PretrainedConfig, weight_map: WeightMap, run: str
) -> None:
    name, force = policy.model_name, policy.megatron_cfg.force_reconvert_from_hf
    kept = _kept(name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(kept.with_name(f"{kept.name}.lock")):
        check_conversion(policy, model_path, config)
        if kept.is_dir() and (not force or _read_record(kept).get("run") == run):
            return
        partial = kept.with_name(f"{kept.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        logger.info("%s holds no safetensors: converting it into %s (once; it may be deleted)", model_path, kept)
        write_safetensors(_stored(model_path), partial)
        weight_map.locate(json.loads((partial / "model.safetensors.index.json").read_text())["weight_map"])
        (partial / _RECORD).write_text(json.dumps(_record(name, model_path, config) | {"run": run}))
        if kept.exists():
            shutil.rmtree(kept)
        partial.rename(kept)


def _stored(model_path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) from torch's weight files, memory-mapped one after the other; nothing in them is executed."""
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

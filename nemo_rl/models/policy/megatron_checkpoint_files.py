"""Checkpoints of Megatron policies as files, for those who know nothing of Megatron Core.

    policy/megatron.json   says that Megatron saved it; what no tensor holds: counters of optimizer and schedule
    policy/weights/        torch.distributed.checkpoint, under Hugging Face names, one tensor per expert
    policy/optimizer/      likewise, `<name>.<state>`
    policy/generators/     random generators by rank

The names are those of `WeightMap.hf_tensors`, whatever layout the checkpoint was saved on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from transformers import PretrainedConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron.adapter_map import adapted_layers, trained_map
from nemo_rl.models.policy.megatron.mapping import OUTPUT_LAYER, WeightMap, weight_map
from nemo_rl.models.policy.megatron_config import MegatronPeftConfig
from nemo_rl.models.policy.scalar_head import HEAD_WEIGHT, is_scalar
from nemo_rl.utils.checkpoint import CheckpointError
from nemo_rl.utils.checkpoint_tensors import DamagedTensorsError, check_checkpoint_fits, saved_tensors

logger = logging.getLogger(__name__)

MARKER = "megatron.json"
_FORMAT = "nemo_rl megatron checkpoint 1"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a checkpoint says beside its tensors."""

    optimizer: str | None = None  # megatron_cfg.optimizer.optimizer; None: no optimizer was saved
    optimizer_steps: int | None = None  # of Adam, which counts them
    scheduler_steps: int | None = None

    def write(self, directory: Path) -> None:
        """Make `directory/megatron.json`. Raises OSError."""
        (directory / MARKER).write_text(json.dumps({"format": _FORMAT, **asdict(self)}))

    @classmethod
    def read(cls, directory: Path) -> Counters:
        """Inverse of `write`. Raises CheckpointError for a checkpoint that Megatron did not save, and a damaged one."""
        path = directory / MARKER
        if not path.is_file():
            raise CheckpointError(
                f"{directory} was not saved by policy.megatron_cfg: {MARKER} is missing. Resume it with "
                "policy.dtensor_cfg; or start anew from its weights: make a model directory of them with "
                "examples/converters/convert_dcp_to_hf.py, and name that as policy.model_name with another "
                "checkpointing.checkpoint_dir"
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
    """Raises CheckpointError when `directory` cannot be resumed with policy.dtensor_cfg."""
    if is_megatron_checkpoint(directory):
        raise CheckpointError(
            f"{directory} was saved by policy.megatron_cfg. Resume it with that; or start anew from its weights: make "
            "a model directory of them with examples/converters/convert_megatron_to_hf.py, and name that as "
            "policy.model_name with another checkpointing.checkpoint_dir"
        )


def checkpoint_shapes(model: PretrainedConfig, peft: MegatronPeftConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the checkpoint of a model, or, with `peft`, of what adapts it.

    Raises:
        ValueError: for a model without a mapping, or layers that it has not.
    """
    weights = weight_map(model, implementation="local")  # the other one is made of the same tensors
    head = {}
    if is_scalar(model):
        weights = replace(weights, entries=tuple(e for e in weights.entries if e.template != OUTPUT_LAYER))
        head = {HEAD_WEIGHT: (1, model.get_text_config().hidden_size)}
    if peft is not None and peft.enabled:
        weights = trained_map(weights, adapted_layers(weights, peft))
    return shapes_of(weights) | head


def shapes_of(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `weights` maps."""
    return {tensor.name: tensor.shape for tensor in weights.hf_tensors}


def check_checkpoint(directory: Path, policy: PolicyConfig, model: PretrainedConfig) -> None:
    """Whether the folder `directory` of a checkpoint holds the weights of this model, by their headers.

    Damaged headers are left to the resuming run, which falls back to an older checkpoint.

    Raises:
        CheckpointError: for a checkpoint of the other backend or optimizer, and with the missing, the unexpected and
            the differently shaped tensors.
    """
    try:
        counters = Counters.read(directory)
        check_checkpoint_fits(directory / "weights", checkpoint_shapes(model, policy.megatron_cfg.peft))
    except DamagedTensorsError as error:
        logger.warning("%s", error)
        return
    check_optimizer(directory, counters, policy.megatron_cfg.optimizer.optimizer)


def check_optimizer(directory: Path, counters: Counters, optimizer: str) -> None:
    """Raises CheckpointError when the state in `directory` is that of another optimizer."""
    same = ("muon", "dist_muon")
    if counters.optimizer in (None, optimizer) or {counters.optimizer, optimizer} == set(same):
        return
    raise CheckpointError(
        f"{directory} holds the state of {counters.optimizer}, this run has {optimizer}: set "
        f"policy.megatron_cfg.optimizer.optimizer={counters.optimizer}"
    )


def read_tensors(
    weights: Path, names: list[str], *, dtype: torch.dtype | None = None, max_bytes: int = 4 << 30
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) in the order of `names`, as saved or in `dtype`; `max_bytes` or one tensor are held.

    In one process, without a process group. Raises CheckpointError when they cannot be read.
    """
    saved = saved_tensors(weights)
    batch: dict[str, torch.Tensor] = {}
    for name in names:
        wanted = dtype if dtype is not None and saved[name].properties.dtype.is_floating_point else None
        tensor = torch.empty(saved[name].size, dtype=wanted or saved[name].properties.dtype)
        if batch and sum(other.nbytes for other in batch.values()) + tensor.nbytes > max_bytes:
            yield from _read(weights, batch)
            batch = {}
        batch[name] = tensor
    if batch:
        yield from _read(weights, batch)


def _read(weights: Path, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    state: dict[str, Any] = dict(batch)
    try:
        dcp.load(state, checkpoint_id=str(weights), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{weights} could not be read: {error}") from error
    while batch:  # each is let go when the reader is done with it
        name = next(iter(batch))
        yield name, batch.pop(name)

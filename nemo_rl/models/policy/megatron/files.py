"""Checkpoints of Megatron policies as files, without Megatron Core: for the driver and the converters.

    policy/megatron.json   marks a checkpoint of Megatron; holds the counters of optimizer and schedule
    policy/weights/        torch.distributed.checkpoint, under Hugging Face names, one tensor per expert
    policy/optimizer/      likewise, `<name>.<state>`
    policy/generators/     random generators by rank

The names are those of `WeightMap.hf_tensors`, whatever layout the checkpoint was saved on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron.adapter_map import adapted_layers, trained_map
from nemo_rl.models.policy.megatron.config import MegatronPeftConfig
from nemo_rl.models.policy.megatron.mapping import weight_map
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.tensors import DamagedTensorsError, check_checkpoint_fits, load_tensors, saved_tensors

logger = logging.getLogger(__name__)

MARKER = "megatron.json"
_BATCH_BYTES = 4 << 30
_FORMAT = "nemo_rl megatron checkpoint 1"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The values that a checkpoint records besides its tensors."""

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
                "over from its weights: make a model directory of them with examples/converters/convert_dcp_to_hf.py, "
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
            f"{directory} was saved by megatron_cfg. Resume it with that; or start over from its weights: make a model "
            "directory of them with examples/converters/convert_megatron_to_hf.py, and name that as model_name with "
            "another checkpointing.checkpoint_dir"
        )


def checkpoint_shapes(model: PretrainedConfig, peft: MegatronPeftConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the checkpoint of a model or, with `peft`, of its adapters.

    Raises:
        ValueError: the model has no mapping, or `peft` names layers that it lacks.
    """
    weights = weight_map(model)  # Transformer Engine has the same tensors
    if peft is not None and peft.enabled:
        weights = trained_map(weights, adapted_layers(weights, peft))
    return weights.shapes


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
    weights: Path, model: PretrainedConfig, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of all of `model`, as saved or, except buffers, in `dtype`. Holds 4 GiB, or a larger tensor.

    Works in one process, without a process group. CheckpointError if they cannot be read.
    """
    saved = saved_tensors(weights)
    batch: dict[str, torch.Tensor] = {}
    num_bytes = 0
    is_buffer = {source.name: entry.is_buffer for entry in weight_map(model).entries for source in entry.sources}
    for name, keeps_dtype in is_buffer.items():  # the bias that chooses experts needs more precision than weights
        wanted = None if keeps_dtype else dtype
        tensor = torch.empty(saved[name].size, dtype=wanted or saved[name].properties.dtype)
        if batch and num_bytes + tensor.nbytes > _BATCH_BYTES:
            yield from _filled(batch, weights)
            num_bytes = 0
        batch[name] = tensor
        num_bytes += tensor.nbytes
    if batch:
        yield from _filled(batch, weights)


def _filled(batch: dict[str, torch.Tensor], weights: Path) -> Iterator[tuple[str, torch.Tensor]]:
    load_tensors(batch, weights)
    while batch:  # frees each tensor when the caller is done with it
        name = next(iter(batch))
        yield name, batch.pop(name)

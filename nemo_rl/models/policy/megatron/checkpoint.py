"""A Megatron policy on disk, saved on one layout and loaded on any: see `megatron_checkpoint_files`.

Every rank writes boxes of Hugging Face tensors, without gathering anything: the parts of parameters it holds, and of
main parameters and moments the parts it updates, which with the distributed optimizer are stretches of a parameter.
Nothing is pickled but torch's own .metadata, which is read by names that it may hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nemo_rl.models.policy.megatron.files import Counters, check_optimizer, shapes_of
from nemo_rl.models.policy.megatron.mapping import OUTPUT_LAYER, MappedTensor, WeightMap
from nemo_rl.models.policy.megatron.optimizer import OptimizerPart, optimizer_parts, set_steps_taken, steps_taken
from nemo_rl.models.policy.megatron.shard_layout import Shape, ShardPlace
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.save import ModelSaveFormat
from nemo_rl.utils.checkpoint.tensors import check_checkpoint_fits, holds_tensors, saved_tensors

# -- What a rank holds of Hugging Face tensors, as boxes that torch.distributed.checkpoint writes and reads.
#
#     Megatron parameter, or rows a to b of it laid out flat  ->  (Hugging Face name, offset in that tensor, view)
#
# Under Hugging Face names a checkpoint knows nothing of the layout it was saved on, so any layout reads it.


@dataclass(kw_only=True)
class Boxes:
    """Parts of a tensor of `shape`, by offset: views of what they are saved from and loaded into.

    Speaks the protocol by which torch.distributed.checkpoint takes objects for sharded tensors. Several ranks may hold
    the same box; it is written once. Boxes that overlap otherwise are refused when they are saved.
    """

    shape: Shape
    dtype: torch.dtype
    parts: dict[Shape, torch.Tensor] = field(default_factory=dict)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape) for offset, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]

    def on_host(self) -> Boxes:
        """Copies in host memory."""
        copies = {offset: part.detach().to("cpu", copy=True) for offset, part in self.parts.items()}
        return Boxes(shape=self.shape, dtype=self.dtype, parts=copies)


class BoxSavePlanner(DefaultSavePlanner):
    """Finds the boxes again that it planned to write."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of a box."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Likewise for reading. What it is given is flat already, and has memory."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take over `state_dict`, names and `Boxes`."""
        self.flatten_state_dict = False
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """What a box is read into."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def add_boxes(
    boxes: dict[str, Boxes],
    entry: MappedTensor,
    place: ShardPlace,
    values: torch.Tensor,
    *,
    flat: range | None = None,
    suffix: str = "",
) -> None:
    """Add to `boxes` what `values` are of the Hugging Face tensors of `entry`, under their names and `suffix`.

    `values`: this rank's shard, or, with `flat`, these elements of it in a row [stop - start]. Rows that pad the
    vocabulary are left out.
    """
    rank, size = entry.rank_and_size(place)
    shape = entry.shard_shape(size)
    for start, part in _stretch(shape, values.detach(), flat):
        for piece in entry.pieces(rank, size):
            low = max(piece.at, start[piece.dim])
            high = min(piece.at + piece.length, start[piece.dim] + part.shape[piece.dim])
            if low >= high:
                continue
            source = entry.sources[piece.source]
            name = source.name + suffix
            offset = list(start)
            offset[piece.dim] = low - piece.at + piece.start
            held = boxes.setdefault(name, Boxes(shape=source.shape, dtype=values.dtype))
            assert tuple(offset) not in held.parts, f"{name} is held twice from {offset} on"
            held.parts[tuple(offset)] = part.narrow(piece.dim, low - start[piece.dim], high - low)


def _stretch(shape: Shape, values: torch.Tensor, flat: range | None) -> Iterator[tuple[Shape, torch.Tensor]]:
    """(where it begins in a shard of `shape`, view) of the boxes that make up elements `flat` of it: at most three."""
    if flat is None:
        assert tuple(values.shape) == shape, f"{tuple(values.shape)} is not {shape}"
        yield (0,) * len(shape), values
        return
    assert values.shape == (len(flat),), f"{tuple(values.shape)} is not {len(flat)} elements"
    if len(shape) == 1:
        yield (flat.start,), values
        return
    _, columns = shape
    at = 0
    while at < len(values):
        row, column = divmod(flat.start + at, columns)
        left = len(values) - at
        is_part = column > 0 or left < columns
        rows, width = (1, min(left, columns - column)) if is_part else (left // columns, columns)
        yield (row, column), values[at : at + rows * width].view(rows, width)
        at += rows * width


def on_host(boxes: Mapping[str, Boxes]) -> dict[str, Boxes]:
    """Copies in host memory, which later steps do not change."""
    return {name: box.on_host() for name, box in boxes.items()}


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MegatronPolicy:
    """What of a rank is saved and loaded. `parameters`: as for `weights.load_weights`."""

    parameters: Mapping[str, torch.Tensor]
    weights: WeightMap
    place: ShardPlace
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    optimizer_kind: str  # megatron_cfg.optimizer.optimizer


@dataclass(frozen=True, kw_only=True)
class MegatronState:
    """This rank's part of a policy: references into the model and the optimizer, or copies of them (`on_host`)."""

    weights: Mapping[str, Boxes]
    optimizer: Mapping[str, Boxes] | None  # None: not saved
    counters: Counters
    generators: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, policy: MegatronPolicy, *, save_optimizer: bool) -> MegatronState:
        """Of now. The copy of a tied embedding on the last stage is left out."""
        weights: dict[str, Boxes] = {}
        for name, entry in _own_entries(policy, policy.parameters).items():
            add_boxes(weights, entry, policy.place, policy.parameters[name])
        generators = dict(_random_tracker().get_states())
        if not save_optimizer:
            return cls(weights=weights, optimizer=None, counters=Counters(), generators=generators)
        assert policy.optimizer is not None and policy.scheduler is not None
        state: dict[str, Boxes] = {}
        for name, part in _named_parts(policy).items():
            if not (name == OUTPUT_LAYER and policy.weights.is_tied):
                _add_state(state, policy, name, part, part.tensors())
        counters = Counters(
            optimizer=policy.optimizer_kind,
            optimizer_steps=steps_taken(policy.optimizer),
            scheduler_steps=policy.scheduler.num_steps,
        )
        return cls(weights=weights, optimizer=state, counters=counters, generators=generators)

    def on_host(self) -> MegatronState:
        """Copies in host memory, which later steps do not change."""
        return replace(
            self,
            weights=on_host(self.weights),
            optimizer=None if self.optimizer is None else on_host(self.optimizer),
            generators={name: state.clone() for name, state in self.generators.items()},
        )


def save_state(
    state: MegatronState, directory: Path, model_save_format: ModelSaveFormat, group: dist.ProcessGroup | None = None
) -> None:
    """Every rank writes its part of the folder `directory` of a checkpoint. Collective over `group`.

    Raises RuntimeError on all ranks when one of them cannot write; the text holds its error.
    """
    assert model_save_format == "torch_save", "safetensors hold one part of a tensor per rank"

    def beside() -> None:
        for name in ("weights", "generators", *(() if state.optimizer is None else ("optimizer",))):
            (directory / name).mkdir(parents=True, exist_ok=True)
        if state.generators:
            save_file(dict(state.generators), directory / "generators" / f"{dist.get_rank()}.safetensors")
        if dist.get_rank() == 0:
            state.counters.write(directory)

    _on_all(beside, directory, group)
    _save_boxes(state.weights, directory / "weights", group)
    if state.optimizer is not None:
        _save_boxes(state.optimizer, directory / "optimizer", group)


def load_state(policy: MegatronPolicy, directory: Path, *, load_optimizer: bool) -> None:
    """Inverse of `save_state`, in place, whatever ranks and layout it was saved on. Collective.

    Raises:
        CheckpointError: for a checkpoint of another backend, model or optimizer, and one that cannot be read.
    """
    counters = Counters.read(directory)
    check_checkpoint_fits(directory / "weights", shapes_of(policy.weights))
    weights: dict[str, Boxes] = {}
    for name, entry in _entries(policy, policy.parameters).items():
        add_boxes(weights, entry, policy.place, policy.parameters[name])
    _load_boxes(weights, directory / "weights")
    if policy.optimizer is not None:
        policy.optimizer.reload_model_params()
    if load_optimizer:
        check_optimizer(directory, counters, policy.optimizer_kind)
        _load_optimizer(policy, directory / "optimizer", counters)
    _load_generators(directory / "generators")


def _load_optimizer(policy: MegatronPolicy, directory: Path, counters: Counters) -> None:
    assert policy.optimizer is not None and policy.scheduler is not None
    if counters.optimizer is None or counters.scheduler_steps is None:
        raise CheckpointError(f"{directory.parent} was saved without the optimizer; start anew from its weights")
    keys: dict[str, set[str]] = {}
    saved = saved_tensors(directory) if holds_tensors(directory) else {}
    for name, metadata in saved.items():
        tensor, _, key = name.rpartition(".")
        if key == "main_param" and metadata.properties.dtype != torch.float32:
            raise CheckpointError(
                f"{directory} holds {name} as {metadata.properties.dtype}, and main parameters are float32; start anew "
                "from its weights, with another checkpointing.checkpoint_dir"
            )
        keys.setdefault(tensor, set()).add(key)
    boxes: dict[str, Boxes] = {}
    loaded: list[tuple[OptimizerPart, dict[str, torch.Tensor]]] = []
    for name, part in _named_parts(policy).items():
        there = keys.get(_entries(policy, [name])[name].sources[0].name, set())
        part.allocate(there - {"main_param"})
        tensors = {key: value for key, value in part.tensors().items() if key in there}
        _add_state(boxes, policy, name, part, tensors)
        loaded.append((part, tensors))
    _load_boxes(boxes, directory)
    for part, tensors in loaded:
        part.put(tensors)
    set_steps_taken(policy.optimizer, counters.optimizer_steps)
    # The schedule is that of the configuration; where it stands is that of the checkpoint.
    policy.scheduler.num_steps = 0
    policy.scheduler.step(counters.scheduler_steps)


def _load_generators(directory: Path) -> None:
    """Megatron's own random generators, when as many ranks were there."""
    if len(list(directory.glob("*.safetensors"))) != dist.get_world_size():
        return
    saved = load_file(directory / f"{dist.get_rank()}.safetensors")
    _random_tracker().set_states(saved)


def _random_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "the groups are made first"
    return tracker


# -- parameters and what belongs to them


def _entries(policy: MegatronPolicy, names: Mapping[str, Any] | list[str]) -> dict[str, MappedTensor]:
    held = policy.weights.held(policy.place)
    return {name: held[name] for name in names}


def _own_entries(policy: MegatronPolicy, names: Mapping[str, Any]) -> dict[str, MappedTensor]:
    entries = _entries(policy, names)
    return {name: e for name, e in entries.items() if not (name == OUTPUT_LAYER and policy.weights.is_tied)}


def _named_parts(policy: MegatronPolicy) -> dict[str, OptimizerPart]:
    assert policy.optimizer is not None
    names = {id(parameter): name for name, parameter in policy.parameters.items()}
    return {names[id(part.parameter)]: part for part in optimizer_parts(policy.optimizer)}


def _add_state(
    boxes: dict[str, Boxes],
    policy: MegatronPolicy,
    name: str,
    part: OptimizerPart,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    entry = policy.weights.held(policy.place)[name]
    for key, values in tensors.items():
        add_boxes(boxes, entry, policy.place, values, flat=part.flat, suffix=f".{key}")


# -- boxes <-> files


def _save_boxes(boxes: Mapping[str, Boxes], directory: Path, group: dist.ProcessGroup | None) -> None:
    try:
        dcp.save(dict(boxes), checkpoint_id=str(directory), planner=BoxSavePlanner(), process_group=group)
    except CheckpointException as error:  # which is no Exception: it would pass by those who report failures
        raise RuntimeError(f"{directory} could not be written: {error}") from error


def _load_boxes(boxes: Mapping[str, Boxes], directory: Path) -> None:
    if not holds_tensors(directory):
        return
    saved_tensors(directory)  # torch reads the same header, and would run what stands in it
    state: dict[str, Any] = dict(boxes)
    try:
        with torch.no_grad():
            dcp.load(state, checkpoint_id=str(directory), planner=BoxLoadPlanner())
    except CheckpointException as error:
        raise CheckpointError(f"{directory} could not be read: {error}") from error


def _on_all(action: Callable[[], None], directory: Path, group: dist.ProcessGroup | None) -> None:
    """Do `action` on every rank; RuntimeError on all of them when it fails on one."""
    problem = None
    try:
        action()
    except (OSError, SafetensorError) as error:  # a full disk is either, by who writes
        problem = f"rank {dist.get_rank()}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    found = [text for text in problems if text is not None]
    if found:
        raise RuntimeError(f"{directory} could not be written: {'; '.join(found)}")

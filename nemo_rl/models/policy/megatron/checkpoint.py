"""Checkpoints of a Megatron policy, saved on one layout and loaded on any other. The files: see `files.py`.

Every rank writes chunks of Hugging Face tensors, without gathering: its shards of parameters and the elements of main
parameters and moments that it updates, which with the distributed optimizer are a range of a flat parameter. Only
torch's own .metadata is pickled, and it is read with a list of allowed names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nemo_rl.models.policy.checkpoint import ModelSaveFormat, require_finite
from nemo_rl.models.policy.megatron.files import Counters, check_optimizer
from nemo_rl.models.policy.megatron.mapping import MappedTensor, ParallelRanks, Shape, WeightMap
from nemo_rl.models.policy.megatron.optimizer import ParameterState, parameter_states, set_steps_taken, steps_taken
from nemo_rl.refit.shard_plan import slices_of_range
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.tensors import check_checkpoint_fits, holds_tensors, saved_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MegatronPolicy:
    """The state that a rank saves and loads. `parameters` as for `weights.load_weights`."""

    parameters: Mapping[str, torch.Tensor]
    weights: WeightMap
    ranks: ParallelRanks
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    optimizer_kind: str  # megatron_cfg.optimizer.optimizer

    def entries(self, names: Iterable[str], *, with_tied_output: bool) -> dict[str, MappedTensor]:
        """The mapping of the parameters `names`. The last stage's copy of a tied embedding is read, never saved."""
        entries = self.weights.on_rank(self.ranks, with_tied_output=with_tied_output)
        return {name: entries[name] for name in names if name in entries}

    def states(self) -> dict[str, ParameterState]:
        """The optimizer's state by parameter name."""
        assert self.optimizer is not None
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {names[id(state.parameter)]: state for state in parameter_states(self.optimizer)}


@dataclass(frozen=True, kw_only=True)
class MegatronState:
    """This rank's part of a policy: references into the model and the optimizer, or copies of them (`on_host`)."""

    weights: Mapping[str, Chunks]
    optimizer: Mapping[str, Chunks] | None  # None: not saved
    counters: Counters
    generators: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, policy: MegatronPolicy, *, save_optimizer: bool) -> MegatronState:
        """The present state."""
        require_finite(policy.parameters)
        weights: dict[str, Chunks] = {}
        # Without the copy of tied embeddings: on a rank that has both, their chunks would be the same twice.
        for name, entry in policy.entries(policy.parameters, with_tied_output=False).items():
            add_chunks(weights, entry, policy.ranks, policy.parameters[name])
        # What is drawn inside of tensor-parallel regions comes from generators of Megatron's own.
        tracker: Any = get_cuda_rng_tracker()
        state = cls(weights=weights, optimizer=None, counters=Counters(), generators=dict(tracker.get_states()))
        if not save_optimizer:
            return state
        assert policy.optimizer is not None and policy.scheduler is not None
        optimizer: dict[str, Chunks] = {}
        states = policy.states()
        for name, entry in policy.entries(states, with_tied_output=False).items():
            for key, values in states[name].tensors().items():
                add_chunks(optimizer, entry, policy.ranks, values, flat=states[name].flat, suffix=f".{key}")
        counters = Counters(
            optimizer=policy.optimizer_kind,
            optimizer_steps=steps_taken(policy.optimizer),
            scheduler_steps=policy.scheduler.num_steps,
        )
        return replace(state, optimizer=optimizer, counters=counters)

    def on_host(self) -> MegatronState:
        """Copies in host memory, which later steps do not change."""
        return replace(
            self,
            weights=_on_host(self.weights),
            optimizer=None if self.optimizer is None else _on_host(self.optimizer),
            generators={name: state.clone() for name, state in self.generators.items()},
        )

    def save(self, directory: Path, model_save_format: ModelSaveFormat, group: dist.ProcessGroup | None = None) -> None:
        """As `SavedState`; also writes the counters and every rank's generators."""
        assert model_save_format == "torch_save", "safetensors hold one chunk of a tensor per rank"
        problem = None
        try:
            for name in ("weights", "generators", *(() if self.optimizer is None else ("optimizer",))):
                (directory / name).mkdir(parents=True, exist_ok=True)
            if self.generators:
                # A file per rank: each has generators of its own.
                save_file(dict(self.generators), directory / "generators" / f"{dist.get_rank()}.safetensors")
            if dist.get_rank() == 0:
                self.counters.write(directory)
        except (OSError, SafetensorError) as error:  # the writer decides which of them a full disk raises
            problem = f"rank {dist.get_rank()}: {error}"
        # Every rank raises if one does, because one alone would leave the others waiting.
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        if any(problems):
            raise RuntimeError(f"{directory} could not be written: {'; '.join(filter(None, problems))}")
        _save_chunks(self.weights, directory / "weights", group)
        if self.optimizer is not None:
            _save_chunks(self.optimizer, directory / "optimizer", group)


def load_state(policy: MegatronPolicy, directory: Path, *, load_optimizer: bool) -> None:
    """Inverse of `MegatronState.save`, in place, from any number of ranks and any layout. Collective.

    Raises:
        CheckpointError: a checkpoint of another backend, model or optimizer, or one that cannot be read.
    """
    counters = Counters.read(directory)
    check_checkpoint_fits(directory / "weights", policy.weights.shapes)
    weights: dict[str, Chunks] = {}
    # The copy of tied embeddings on the last stage reads what the first stage wrote.
    for name, entry in policy.entries(policy.parameters, with_tied_output=True).items():
        add_chunks(weights, entry, policy.ranks, policy.parameters[name])
    _load_chunks(weights, directory / "weights")
    if policy.optimizer is not None:
        # The float32 main parameters are copies, made from the weights that were there before.
        policy.optimizer.reload_model_params()
    if load_optimizer:
        check_optimizer(directory, counters, policy.optimizer_kind)
        _load_optimizer(policy, directory / "optimizer", counters)
    generators = directory / "generators"
    # On another number of ranks there is no saved generator for each of them, so all keep the generators of the seed.
    if len(list(generators.glob("*.safetensors"))) == dist.get_world_size():
        tracker: Any = get_cuda_rng_tracker()
        tracker.set_states(load_file(generators / f"{dist.get_rank()}.safetensors"))


def _load_optimizer(policy: MegatronPolicy, directory: Path, counters: Counters) -> None:
    assert policy.optimizer is not None and policy.scheduler is not None
    if counters.optimizer is None or counters.scheduler_steps is None:
        raise CheckpointError(f"{directory.parent} was saved without the optimizer; start over from its weights")
    keys: dict[str, set[str]] = {}
    saved = saved_tensors(directory) if holds_tensors(directory) else {}
    for name, metadata in saved.items():
        tensor, _, key = name.rpartition(".")
        if key == "main_param" and metadata.properties.dtype != torch.float32:
            raise CheckpointError(
                f"{directory} holds {name} as {metadata.properties.dtype}, and main parameters are float32; start over "
                "from its weights, with another checkpointing.checkpoint_dir"
            )
        keys.setdefault(tensor, set()).add(key)
    chunks: dict[str, Chunks] = {}
    loaded: list[tuple[ParameterState, dict[str, torch.Tensor]]] = []
    states = policy.states()
    for name, entry in policy.entries(states, with_tied_output=True).items():
        available = keys.get(entry.sources[0].name, set())
        if states[name].is_of_muon(available):
            logger.warning("%s: %s: its state is Muon's, and Adam updates it: it starts from zero", directory, name)
            available &= {"main_param"}
        # A new optimizer has no moments before its first step: make those that were saved.
        states[name].allocate(available - {"main_param"})
        tensors = {key: value for key, value in states[name].tensors().items() if key in available}
        for key, values in tensors.items():
            add_chunks(chunks, entry, policy.ranks, values, flat=states[name].flat, suffix=f".{key}")
        loaded.append((states[name], tensors))
    _load_chunks(chunks, directory)
    for state, tensors in loaded:
        state.put(tensors)
    set_steps_taken(policy.optimizer, counters.optimizer_steps)
    # The schedule comes from the configuration, its position from the checkpoint.
    policy.scheduler.num_steps = 0
    policy.scheduler.step(counters.scheduler_steps)


# -- a rank's values as chunks of Hugging Face tensors, which torch.distributed.checkpoint writes and reads
#
#     Megatron parameter, or a range of its flat elements  ->  (Hugging Face name, offset in that tensor, view)
#
# Under Hugging Face names a checkpoint is independent of the layout it was saved on, so any layout reads it.


@dataclass(kw_only=True)
class Chunks:
    """Chunks of a tensor of `shape`, by offset: views of the memory they are saved from and loaded into.

    Implements the protocol by which torch.distributed.checkpoint accepts objects as sharded tensors. Several ranks may
    hold the same chunk; it is written once. Saving refuses chunks that overlap otherwise.
    """

    shape: Shape
    dtype: torch.dtype
    views: dict[Shape, torch.Tensor] = field(default_factory=dict)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=self.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=view.shape) for offset, view in self.views.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.views[tuple(index.offset)]


def _on_host(chunks: Mapping[str, Chunks]) -> dict[str, Chunks]:
    return {
        name: replace(held, views={at: view.detach().to("cpu", copy=True) for at, view in held.views.items()})
        for name, held in chunks.items()
    }


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, which finds chunks only of torch's own sharded tensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    """The same for reading. The given state is flat and allocated, so torch's preparations are skipped."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.flatten_state_dict = False
        # Nothing is flattened, so both are the given one.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def add_chunks(
    chunks: dict[str, Chunks],
    entry: MappedTensor,
    ranks: ParallelRanks,
    values: torch.Tensor,
    *,
    flat: range | None = None,
    suffix: str = "",
) -> None:
    """Add to `chunks` the parts of the Hugging Face tensors of `entry` that `values` are, under their names + `suffix`.

    `values`: this rank's shard or, with `flat`, these elements of the flat shard, [stop - start]. Padding rows of the
    vocabulary are left out.
    """
    rank, size = entry.rank_and_size(ranks)
    shape = entry.shard_shape(size)
    for start, view in _rectangles(shape, values.detach(), flat):
        for part in entry.slices(rank, size):
            low = max(part.at, start[part.dim])
            high = min(part.at + part.length, start[part.dim] + view.shape[part.dim])
            if low >= high:
                continue
            source = entry.sources[part.source]
            name = source.name + suffix
            offset = list(start)
            offset[part.dim] = low - part.at + part.start
            held = chunks.setdefault(name, Chunks(shape=source.shape, dtype=values.dtype))
            assert tuple(offset) not in held.views, f"{name} has two chunks at {offset}"
            held.views[tuple(offset)] = view.narrow(part.dim, low - start[part.dim], high - low)


def _rectangles(shape: Shape, values: torch.Tensor, flat: range | None) -> Iterator[tuple[Shape, torch.Tensor]]:
    """(offset in a shard of `shape`, view) of the rectangles that elements `flat` are: of a matrix at most three."""
    if flat is None:
        assert tuple(values.shape) == shape, f"{tuple(values.shape)} is not {shape}"
        yield (0,) * len(shape), values
        return
    assert values.shape == (len(flat),), f"{tuple(values.shape)} is not {len(flat)} elements"
    # The distributed optimizer cuts flat buffers anywhere, but files hold rectangles.
    for low, high in slices_of_range(shape, flat.start, flat.stop):
        size = [stop - start for start, stop in zip(low, high, strict=True)]
        part, values = values.split([math.prod(size), len(values) - math.prod(size)])
        yield tuple(low), part.view(size)


def _save_chunks(chunks: Mapping[str, Chunks], directory: Path, group: dist.ProcessGroup | None) -> None:
    try:
        dcp.save(dict(chunks), checkpoint_id=str(directory), planner=_SavePlanner(), process_group=group)
    except CheckpointException as error:  # not an Exception: callers that report failures would miss it
        raise RuntimeError(f"{directory} could not be written: {error}") from error


def _load_chunks(chunks: Mapping[str, Chunks], directory: Path) -> None:
    if not holds_tensors(directory):
        return
    saved_tensors(directory)  # checks the pickled header, which torch then reads without a check
    state: dict[str, Any] = dict(chunks)
    try:
        with torch.no_grad():
            dcp.load(state, checkpoint_id=str(directory), planner=_LoadPlanner())
    except CheckpointException as error:
        raise CheckpointError(f"{directory} could not be read: {error}") from error

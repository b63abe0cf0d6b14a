"""Weights and optimizer of a sharded policy on disk.

    policy/config.json, generation_config.json
    policy/weights/                the tensors, parameters and persistent buffers, under their Hugging Face names
    policy/weights/consolidated/   a Hugging Face model directory, on request
    policy/optimizer/              the optimizer's state, `<parameter>.<state>`, and settings.pt

`weights/` and `optimizer/` are torch distributed checkpoints: every rank writes its part, and a policy on other ranks
or another mesh reads what it needs. A rank may hold any part of the model: functions take name -> tensor.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim.lr_scheduler import LRScheduler
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from nemo_rl.config.errors import some_of
from nemo_rl.models.policy.head.scalar import is_scalar
from nemo_rl.models.policy.weight_loading import local_part, named_tensors
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.save import ModelSaveFormat
from nemo_rl.utils.checkpoint.tensors import load_tensors, saved_tensors

SETTINGS_NAME = "settings.pt"

_PUT_BACK = "put `optimizer` back to what the checkpoint's config.yaml says"


def policy_tensors(modules: Iterable[nn.Module], *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of the parts of a model that this rank holds, by Hugging Face name.

    Tied tensors appear once. `trained_only` leaves out buffers and frozen parameters, so that adapters remain. FSDP
    modules must be resharded: the optimizer does not know gathered parameters.
    """
    tensors = dict(named for module in modules for named in named_tensors(module))
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad or not trained_only}


# -- saving


class SavedState(Protocol):
    """This rank's part of a policy: references into the model and the optimizer, or copies of them (`on_host`)."""

    def on_host(self) -> Self:
        """Copies in host memory, which later steps do not change."""
        ...

    def save(self, directory: Path, model_save_format: ModelSaveFormat, group: dist.ProcessGroup | None = None) -> None:
        """Every rank writes its part of `weights/` and `optimizer/` under `directory`. Collective over `group`.

        Raises:
            RuntimeError: on all ranks if one of them cannot write, with the text of its error.
        """


@dataclass(frozen=True)
class PolicyState:
    """The `SavedState` of a policy whose optimizer is torch's."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor] | None  # None: not saved
    settings: Mapping[str, Any] | None  # of the optimizer and the scheduler

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        scheduler: LRScheduler | None,
    ) -> PolicyState:
        """`tensors`: as `policy_tensors` returns them, the parameters of the optimizer among them."""
        weights = {name: tensor.detach() for name, tensor in tensors.items()}
        require_finite(weights)
        if optimizer is None:
            return cls(weights, None, None)
        # Plain values, copied, equal on all ranks: hyperparameters of each group and the scheduler's counters.
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        counters = None if scheduler is None else scheduler.state_dict()
        settings = copy.deepcopy({"class": _class_name(optimizer), "param_groups": groups, "scheduler": counters})
        return cls(weights, _as_tensors(_optimizer_values(tensors, optimizer)), settings)

    def on_host(self) -> PolicyState:
        optimizer = None if self.optimizer is None else _on_host(self.optimizer)
        return replace(self, weights=_on_host(self.weights), optimizer=optimizer)

    def save(self, directory: Path, model_save_format: ModelSaveFormat, group: dist.ProcessGroup | None = None) -> None:
        save_tensors(self.weights, directory / "weights", model_save_format, group)
        if self.optimizer is not None:
            save_tensors(self.optimizer, directory / "optimizer", "torch_save", group)
            if _is_first():
                torch.save(self.settings, directory / "optimizer" / SETTINGS_NAME)


def require_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Raises RuntimeError if a tensor, or this rank's part of it, is not finite: every run from it would be lost."""
    local = {name: local_part(tensor) for name, tensor in weights.items()}
    bad = [name for name, tensor in local.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise RuntimeError(f"weights are not finite, so no checkpoint of them is written: {some_of(bad)}")


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def save_tensors(
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    model_save_format: ModelSaveFormat,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parts of `tensors` (name -> tensor or DTensor) that this rank holds. Collective over `group`.

    Ranks may name different tensors; a part that several ranks hold is written once. Raises as `SavedState.save`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_safe = model_save_format == "safetensors"
    writer = HuggingFaceStorageWriter(path=str(directory), save_distributed=True) if is_safe else None
    try:
        dcp.save(dict(tensors), checkpoint_id=str(directory), storage_writer=writer, process_group=group)
    except CheckpointException as error:  # not a subclass of Exception: handlers that report failures would miss it
        raise RuntimeError(f"{directory} could not be written: {error}") from error


class AsyncSaver:
    """Writes the state of a policy in a thread while training goes on: one save at a time, the same on every rank.

    Construction is a collective over all ranks: the thread has a gloo group of its own, because two threads must not
    share a group.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, state: SavedState, directory: Path, model_save_format: ModelSaveFormat) -> None:
        """Copy `state` to host memory and begin to write the copy."""
        assert self._pending is None, "finish() comes before the next start()"
        assert isinstance(self._group, dist.ProcessGroup)
        self._pending = self._thread.submit(state.on_host().save, directory, model_save_format, self._group)

    def finish(self) -> None:
        """Wait until every rank has written. Raises as `SavedState.save`."""
        assert self._pending is not None, "start() comes first"
        pending, self._pending = self._pending, None
        pending.result()

    def close(self) -> None:
        """Wait for a running save; its errors are ignored. Call it before the process group is destroyed."""
        self._thread.shutdown(wait=True)


# -- loading


def load_optimizer(
    tensors: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    directory: Path,
    *,
    with_schedule: bool = True,
) -> int:
    """Restore the optimizer of the parameters in `tensors`, and the scheduler, from `directory/optimizer`. Collective.

    `with_schedule=False` does not touch the scheduler. Returns the number of its steps until the checkpoint.

    Raises:
        CheckpointError: another kind of optimizer or schedule saved them.
    """
    folder = directory / "optimizer"
    _allocate_saved(tensors, optimizer, set(saved_tensors(folder)))
    values = _optimizer_values(tensors, optimizer)
    loaded = _as_tensors(values)
    load_tensors(loaded, folder)
    for full_name, value in values.items():
        if not isinstance(value, torch.Tensor):
            name, _, key = full_name.rpartition(".")
            optimizer.state[tensors[name]][key] = type(value)(loaded[full_name].item())
    settings = torch.load(folder / SETTINGS_NAME, weights_only=True)
    _load_settings(settings, optimizer, scheduler, with_schedule=with_schedule)
    return 0 if scheduler is None else settings["scheduler"]["last_epoch"]


# -- the state of an optimizer by parameter name
#
# Names are the parameters' Hugging Face names on whichever pipeline stage holds them. torch's own state-dict helpers
# (torch.distributed.checkpoint.state_dict) would name parameters after one root module per rank, invent state for
# parameters that had no gradient yet, and move step counters between number and tensor: a resumed run would not be
# bitwise the uninterrupted one.


def _optimizer_values(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`<parameter>.<state>` -> tensor or number, for every trained parameter with state.

    `parameters` names all parameters that the optimizer holds, and perhaps more.
    """
    return {
        f"{name}.{key}": value
        for name, parameter in _trained(parameters, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _as_tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Numbers become 0-d tensors. CheckpointError for values that are neither numbers nor tensors."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor | int | float):
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} as {name}, which cannot be saved; use another "
                "`optimizer`, or set checkpointing.save_optimizer=false"
            )
    return {name: value if isinstance(value, torch.Tensor) else torch.tensor(value) for name, value in values.items()}


def _allocate_saved(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, saved_names: set[str]
) -> None:
    """Give the optimizer the state tensors that were saved, and no others; their values are loaded later.

    A parameter that had no gradient before the checkpoint has no state in it.
    """
    optimizer.state.clear()
    optimizer.zero_grad()
    _init_optim_state(optimizer)  # a step without gradient and learning rate, which changes no parameter
    saved: dict[str, set[str]] = {}
    for full_name in saved_names:
        parameter_name, _, key = full_name.rpartition(".")
        saved.setdefault(parameter_name, set()).add(key)
    for name, parameter in _trained(parameters, optimizer):
        keys = set(optimizer.state.get(parameter, ()))
        if name not in saved:
            optimizer.state.pop(parameter, None)
        elif keys != saved[name]:
            there, here = (", ".join(sorted(found)) or "nothing" for found in (saved[name], keys))
            raise CheckpointError(
                f"the checkpoint keeps {there} of {name}, {type(optimizer).__name__} needs {here}: {_PUT_BACK}"
            )


def _load_settings(
    settings: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    *,
    with_schedule: bool,
) -> None:
    """Restore `PolicyState.settings`. CheckpointError if they are of another optimizer or schedule."""
    # Compared by name, because Adam and AdamW, for example, keep the same state.
    if settings["class"] != _class_name(optimizer):
        raise CheckpointError(
            f"the checkpoint was saved by {settings['class']}, this run has {_class_name(optimizer)}: {_PUT_BACK}"
        )
    groups = settings["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} groups of parameters, this run's "
            f"{len(optimizer.param_groups)}: {_PUT_BACK}"
        )
    if (settings["scheduler"] is None) != (scheduler is None):
        was = "without a scheduler: remove" if scheduler is not None else "with a scheduler: put back"
        raise CheckpointError(f"the checkpoint was saved by a run {was} `scheduler`")
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    if scheduler is not None and with_schedule:
        scheduler.load_state_dict(settings["scheduler"])


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _trained(named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in named.items()}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return ((names[id(parameter)], parameter) for parameter in parameters if parameter.requires_grad)


# -- Hugging Face model directories


GENERATION_CONFIG = "generation_config.json"


def own_generation_config(model_path: str) -> str | None:
    """The text of generation_config.json of a directory or hub model; None if it has none.

    It may name more end tokens than config.json does.
    """
    file = cached_file(model_path, GENERATION_CONFIG, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file).read_text(encoding="utf-8")


def save_model_files(config: PretrainedConfig, directory: Path, generation_config: str | None = None) -> None:
    """Rank 0 writes config.json and, for a model that generates, generation_config.json.

    The latter is the text `generation_config` or, without one, what follows from config.json.
    """
    if not _is_first():
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    config.get_text_config().use_cache = True  # off while training, but needed to generate
    config.save_pretrained(directory)
    if generation_config is not None and not is_scalar(config):
        (directory / GENERATION_CONFIG).write_text(generation_config, encoding="utf-8")
    elif not is_scalar(config):
        GenerationConfig.from_model_config(config).save_pretrained(directory)


def save_consolidated_tensors(tensors: Iterable[ExportedTensor], directory: Path) -> None:
    """The weights of a Hugging Face model directory, in their own dtypes, gathered one at a time.

    Collective over all ranks, which list the same tensors in the same order; rank 0 writes.
    """
    whole = ((tensor.name, tensor.gather(None)) for tensor in tensors)
    if _is_first():
        write_safetensors(whole, directory)
    deque(whole, maxlen=0)  # the other ranks take part in the gathers
    dist.barrier()


def write_safetensors(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, max_file_bytes: int = 4 << 30
) -> None:
    """Write files of at most `max_file_bytes` (or one tensor) and their index. Holds one file's tensors at a time."""
    weight_map: dict[str, str] = {}
    sizes: list[int] = []
    for number, pending in enumerate(_files(tensors, max_file_bytes), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(pending, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(pending, file)
        sizes += [tensor.nbytes for tensor in pending.values()]
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _files(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_bytes:
            yield pending
            pending = {}
        pending[name] = tensor.to("cpu", copy=True)
    yield pending


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0

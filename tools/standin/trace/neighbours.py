"""What a rank must believe of its absent neighbours, where the unchanged memory of torch's `fake` group is no answer.

A collective of the fake group returns at once and leaves its outputs as they are. That is good enough for numbers that
are only computed with. Here is what decides how the rank goes on.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules, stage
from torch.testing._internal.distributed.fake_pg import FakeStore


class Zeros(dict):
    """Metrics of the last pipeline stage, which this rank does not know: each is 0."""

    def __missing__(self, key: str) -> float:
        return 0.0

    def __or__(self, other: Any) -> Zeros:
        return Zeros(dict(self) | dict(other))


def join(rank: int, world_size: int, objects: Path | None = None) -> None:
    """Become `rank` of a world whose other ranks do not exist.

    `objects`: a folder in which every rank leaves the Python objects that it gathers with others, such as tables of
    its shards. A rank that finds those of all others there gets true answers.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    dist.new_group = torch.distributed.new_group = _all_fake(dist.new_group)
    dist.all_gather_object = _all_like_own if objects is None else _exchanged(objects)
    dist.broadcast_object_list = _zeros_of_others
    torch.Tensor.tolist = _answered(torch.Tensor.tolist)
    # Pipelines ask their neighbours by message whether shapes must be inferred; ours are known beforehand.
    for kind in (schedules._PipelineSchedule, *schedules._PipelineSchedule.__subclasses__()):
        if "_warmup_p2p" in vars(kind):
            kind._warmup_p2p = _shapes_are_known


def _all_fake(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Groups over gloo would wait for their members."""

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        return new_group(*args, **kwargs | {"backend": "fake"})

    return new_fake_group


def _all_like_own(out: list[Any], own: Any, group: Any = None) -> None:
    """Every rank has the same, but other pipeline stages export as many tensors as this one under other names."""
    from nemo_rl.refit.layout import ExportedTensor

    if isinstance(own, list) and own and isinstance(own[0], ExportedTensor):
        out[:] = [[replace(tensor, name=f"{rank}.{tensor.name}") for tensor in own] for rank in range(len(out))]
    else:
        out[:] = [own] * len(out)
    out[dist.get_rank(group)] = own


def _exchanged(folder: Path) -> Callable[..., None]:
    numbers: Counter[str] = Counter()

    def gather(out: list[Any], own: Any, group: Any = None, **how: Any) -> None:
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        name = "-".join(map(str, ranks))
        numbers[name] += 1
        paths = [folder / f"{name}.{numbers[name]}.{rank}" for rank in ranks]
        paths[ranks.index(dist.get_rank())].write_bytes(pickle.dumps(own))
        if not all(path.exists() for path in paths):
            _all_like_own(out, own, group)
            return
        out[:] = [pickle.loads(path.read_bytes()) for path in paths]
        out[ranks.index(dist.get_rank())] = own

    return gather


def _zeros_of_others(objects: list[Any], src: int | None = None, group: Any = None, **how: Any) -> None:
    if dist.get_rank() != src:
        objects[:] = [Zeros() if isinstance(value, dict) else value for value in objects]


def _answered(tolist: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Numbers that the host reads of kernels that did not run, on data of ranks that are absent.

    Rows that experts send to each rank and get from it are as many for all. `IndexValues` would find them, too, and
    sort the rows of every layer on the host, which takes minutes. What Megatron's routers count are sums of scores,
    which have no values: each is 1.
    """

    def answered(self: torch.Tensor) -> Any:
        caller = sys._getframe(1)
        place = Path(caller.f_code.co_filename).stem, caller.f_code.co_name
        if place == ("moe", "read"):
            return torch.ones(self.shape).tolist()
        if place != ("moe", "parallel_experts"):
            return tolist(self)
        rows, ranks = caller.f_locals["top_k_index"].numel(), caller.f_locals["ranks"]
        each = [rows // ranks + (number < rows % ranks) for number in range(ranks)]
        return [each, each]

    return answered


def _shapes_are_known(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    for one in stages:
        one._inference_mode = stage.InferenceMode.STATIC

"""The arrangement of a policy's ranks: how many lie along each axis, where each one sits, which layers a stage holds.

Free of torch, because the configuration is checked with it before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_rl.config.rules import divisors, remedy, value_of
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.megatron.config import MegatronConfig


@dataclass(frozen=True, kw_only=True)
class Share:
    """Parameters of one rank, as numbers: memory and seconds are predicted from the same."""

    whole: float  # with which it computes
    own: float  # of these, what it holds between passes
    optimized: float  # of these, what it has the optimizer state of
    experts: float  # of `whole`


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The number of ranks along each axis of the PyTorch backend."""

    pipeline_parallel: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    @classmethod
    def of(cls, config: DTensorConfig, world_size: int) -> ParallelSizes:
        """The sizes of `policy.dtensor_cfg` on `world_size` ranks, which they have to fit (`training_problems`)."""
        return cls(
            pipeline_parallel=config.pipeline_parallel_size,
            dp_replicate=config.dp_replicate_size,
            dp_shard=world_size // (config.model_parallel_size * config.dp_replicate_size),
            context_parallel=config.context_parallel_size,
            tensor_parallel=config.tensor_parallel_size,
            expert_parallel=config.expert_parallel_size,
        )

    @property
    def data_parallel(self) -> int:
        """Ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pipeline_parallel * self.data_parallel * self.context_parallel * self.tensor_parallel

    def share(self, dense: float, experts: float, uncut: float = 0.0) -> Share:
        """What a rank has of the parameters of its stage. `uncut`: those that every tensor rank has whole."""
        cut, own_experts = dense / self.tensor_parallel + uncut, experts / self.expert_parallel
        shards = self.dp_shard * self.context_parallel
        # The ranks that share experts are taken out of those that shard the parameters.
        own = cut / shards + own_experts / (shards / self.expert_parallel)
        return Share(whole=cut + own_experts, own=own, optimized=own, experts=own_experts)

    def describe(self) -> str:
        """The axes that share the work, as in `8 data x 2 context x 2 tensor`."""
        axes = ("pipeline", "data", "context", "tensor")
        counts = {axis: getattr(self, f"{axis}_parallel") for axis in axes}
        return " x ".join(f"{count} {axis}" for axis, count in counts.items() if count > 1 or axis == "data")

    def describe_shards(self) -> str:
        """The ranks over which parameters are sharded, as in `tensor 2 x FSDP2 over 8`."""
        shards = self.dp_shard * self.context_parallel  # FSDP2 shards over context-parallel ranks too
        kinds = [f"{self.pipeline_parallel} stages"] * (self.pipeline_parallel > 1)
        kinds += [f"tensor {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        if shards > 1 or kinds:
            kinds.append(f"FSDP2 over {shards}")
        text = " x ".join(kinds) if kinds else "whole"
        if self.expert_parallel > 1:
            text += f"; experts over groups of {self.expert_parallel}, then FSDP2 over {shards // self.expert_parallel}"
        return text + (f"; {self.dp_replicate} copies (HSDP)" if self.dp_replicate > 1 else "")

    def place(self, rank: int) -> dict[str, int]:
        """Index of `rank` along every axis with more than one rank, by the axis' short name."""
        coordinates = self.sharding().get_worker_coords(rank)
        data, context = coordinates["data_parallel"], coordinates["context_parallel"]
        # Experts are spread over neighbours among the ranks that shard the parameters of one copy.
        shard = data % self.dp_shard * self.context_parallel + context
        axes = {
            "stage": (self.pipeline_parallel, coordinates["pipeline_parallel"]),
            "copy": (self.dp_replicate, data // self.dp_shard),
            "data": (self.data_parallel, data),
            "context": (self.context_parallel, context),
            "tensor": (self.tensor_parallel, coordinates["tensor_parallel"]),
            "experts": (self.expert_parallel, shard % self.expert_parallel),
        }
        return {name: index for name, (size, index) in axes.items() if size > 1}

    def sharding(self) -> NamedSharding:
        """Coordinates of every rank. Data-parallel ranks get different rows; all others get the same."""
        # Tensor-parallel ranks are neighbours, because they exchange most; stages lie furthest apart.
        shape = (self.pipeline_parallel, self.data_parallel, self.context_parallel, self.tensor_parallel)
        names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
        return NamedSharding(np.arange(self.world_size).reshape(shape), names)


@dataclass(frozen=True, kw_only=True)
class MegatronSizes(ParallelSizes):
    """The number of ranks along each axis of Megatron Core; `dp_shard` counts the data-parallel ranks.

    Ranks are numbered in Megatron's order `tp-cp-ep-dp-pp`. Experts have a second arrangement of each stage's ranks:
    (expert data) x (expert) x (expert tensor).
    """

    expert_tensor_parallel: int = 1
    stages_per_rank: int = 1
    shards_optimizer: bool = True

    @classmethod
    def of_megatron(cls, config: MegatronConfig, world_size: int) -> MegatronSizes:
        """The sizes of `policy.megatron_cfg` on `world_size` ranks, which they have to fit (`training_problems`)."""
        return cls(
            pipeline_parallel=config.pipeline_model_parallel_size,
            dp_shard=world_size // config.model_parallel_size,
            context_parallel=config.context_parallel_size,
            tensor_parallel=config.tensor_model_parallel_size,
            expert_parallel=config.expert_model_parallel_size,
            expert_tensor_parallel=config.expert_tensor_parallel_size,
            stages_per_rank=config.stages_per_rank,
            shards_optimizer=config.optimizer.shards_optimizer,
        )

    def share(self, dense: float, experts: float, uncut: float = 0.0) -> Share:
        cut = dense / self.tensor_parallel + uncut
        own_experts = experts / self.expert_parallel / self.expert_tensor_parallel
        whole = cut + own_experts
        spread = cut / (self.data_parallel * self.context_parallel) + own_experts / self.expert_data_parallel
        optimized = spread if self.shards_optimizer else whole
        return Share(whole=whole, own=whole, optimized=optimized, experts=own_experts)

    def describe_shards(self) -> str:
        stages = self.pipeline_parallel * self.stages_per_rank
        per_rank = f" ({self.stages_per_rank} per rank)" if self.stages_per_rank > 1 else ""
        kinds = [f"{stages} stages{per_rank}"] * (stages > 1)
        kinds += [f"tensor {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        return "Megatron Core, " + (" x ".join(kinds) or "whole")

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same part of the same experts."""
        per_stage = self.world_size // self.pipeline_parallel
        return per_stage // (self.expert_parallel * self.expert_tensor_parallel)

    def place(self, rank: int) -> dict[str, int]:
        axes = super().place(rank)
        if self.expert_parallel > 1:
            axes["experts"] = rank // self.expert_tensor_parallel % self.expert_parallel
        if self.expert_tensor_parallel > 1:
            axes["expert tensor"] = rank % self.expert_tensor_parallel
        return axes


def training_sizes(policy: PolicyConfig, world_size: int) -> ParallelSizes:
    """The number of ranks along each axis. ValueError if they do not divide `world_size`."""
    for key, message in training_problems(policy, world_size):
        raise ValueError(f"{key}: {message}")
    if policy.megatron_cfg.enabled:
        return MegatronSizes.of_megatron(policy.megatron_cfg, world_size)
    return ParallelSizes.of(policy.dtensor_cfg, world_size)


def training_problems(policy: PolicyConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """(dotted key, what would work) if the sizes do not fit `world_size` ranks."""
    if policy.megatron_cfg.enabled:
        problems = _megatron_problems(policy.megatron_cfg, world_size)
    else:
        problems = _dtensor_problems(policy.dtensor_cfg, world_size)
    for key, message in problems:
        yield policy.backend_cfg.key(key), message


def _dtensor_problems(config: DTensorConfig, world_size: int) -> Iterator[tuple[str, str]]:
    names = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
    data_parallel, copies = world_size // config.model_parallel_size, config.dp_replicate_size
    shards = data_parallel // copies * config.context_parallel_size
    if world_size % config.model_parallel_size:
        yield _not_dividing({name: value_of(config, name) for name in names}, world_size)
    elif data_parallel % copies:
        text = f"{copies} does not divide the {data_parallel} data-parallel ranks"
        yield "dp_replicate_size", f"{text}; these would: {divisors(data_parallel)}"
    elif shards % config.expert_parallel_size:
        yield (
            "expert_parallel_size",
            f"{config.expert_parallel_size} does not divide the {shards} ranks that shard the parameters (data x "
            f"context parallel); these would: {divisors(shards)}",
        )


def _megatron_problems(config: MegatronConfig, world_size: int) -> Iterator[tuple[str, str]]:
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    per_stage = world_size // config.pipeline_model_parallel_size
    sizes = {name: value_of(config, name) for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")}
    if world_size % config.model_parallel_size:
        yield _not_dividing({name: value_of(config, name) for name in names}, world_size)
    elif per_stage % math.prod(sizes.values()):
        used = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        yield (
            max(sizes, key=sizes.__getitem__),
            f"{used} does not divide the {per_stage} ranks of a pipeline stage (data x context x tensor parallel); "
            f"these would: {divisors(per_stage)}",
        )


def _not_dividing(sizes: dict[str, int], world_size: int) -> tuple[str, str]:
    """(the key of `sizes` to change, what would work) if their product does not divide the ranks."""
    used = {key: size for key, size in sizes.items() if size > 1}
    if len(used) == 1:
        [(key, size)] = used.items()
        return key, f"{size} does not divide the {world_size} training ranks; these would: {divisors(world_size)}"
    total = math.prod(used.values())
    fixes = {}  # each size that would do if the others stay
    for key, size in used.items():
        if world_size % (total // size) == 0:
            others = ", ".join(f"{name}={value}" for name, value in used.items() if name != key)
            fixes[key] = f"with {others}, {key} may be {divisors(world_size // (total // size))}"
    key = max(fixes or used, key=lambda key: used[key])
    works = "; ".join(fixes.values()) or f"the product may be {divisors(world_size)}"
    product = " x ".join(f"{name}={size}" for name, size in used.items())
    return key, f"{product} = {total} does not divide the {world_size} training ranks; {works}"


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, as even as possible. The first and last stage, which also have embeddings or head, get
    fewer.

    >>> [len(layers) for layers in layers_of_stages(10, 4)]
    [2, 3, 3, 2]
    """
    assert num_layers >= num_stages
    each, left = divmod(num_layers, num_stages)
    middle_first = [*range(1, num_stages - 1), 0]
    # The last stage gets none of the layers left over, the first stage the last one: a head over the vocabulary costs
    # more than a lookup of embeddings.
    sizes = [each + (stage in middle_first[:left]) for stage in range(num_stages)]
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(num_stages)]


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
STAGES, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"


def layers_of_ranks(policy: PolicyConfig, num_layers: int) -> list[list[int]]:
    """The layers that every pipeline rank holds. ValueError if Megatron cannot divide them so."""
    if policy.megatron_cfg.enabled:
        of_ranks = stage_layers(policy.megatron_cfg, num_layers)
    else:
        size = policy.dtensor_cfg.pipeline_parallel_size
        stages = layers_of_stages(num_layers, size * policy.dtensor_cfg.pipeline.stages_per_rank)
        of_ranks = [stages[rank::size] for rank in range(size)]
    return [[layer for piece in pieces for layer in piece] for pieces in of_ranks]


def stage_layers(config: MegatronConfig, num_layers: int) -> list[list[range]]:
    """Layers of every pipeline rank: one range per piece that it holds (virtual stages), in the order of the model.

    Raises:
        ValueError: naming the key and what would work, if the layers cannot be divided so.
    """
    per_rank = _layers_per_rank(config, num_layers)
    pieces = config.stages_per_rank
    if uneven := [count for count in per_rank if count % pieces]:
        raise ValueError(
            f"{config.key('virtual_pipeline_model_parallel_size')}={pieces} does not divide the {min(uneven)} layers "
            f"of a pipeline rank; these would: {divisors(*per_rank)}"
        )
    # Pieces are dealt out in turns: piece 0 of every rank, then piece 1 of every rank.
    stages: list[list[range]] = [[] for _ in per_rank]
    start = 0
    for _ in range(pieces):
        for rank, count in enumerate(per_rank):
            stages[rank].append(range(start, start + count // pieces))
            start += count // pieces
    assert start == num_layers
    return stages


def _layers_per_rank(config: MegatronConfig, num_layers: int) -> list[int]:
    size = config.pipeline_model_parallel_size
    ends = {FIRST: config.num_layers_in_first_pipeline_stage, LAST: config.num_layers_in_last_pipeline_stage}
    given = {name: count for name, count in ends.items() if count is not None}
    key = f"{config.key('pipeline_model_parallel_size')}={size}"
    if size > num_layers:
        raise ValueError(f"{key}: the model has {num_layers} layers; {_what_would(config, num_layers)}")
    others, left = size - len(given), num_layers - sum(given.values())
    if not given and left % size:
        would = _what_would(config, num_layers)
        raise ValueError(f"{key} does not divide the {num_layers} layers of the model; {would}")
    if left != 0 if others == 0 else (left < others or left % others):
        rest = f"leaves {left} of the model's {num_layers} layers to {others} other stage(s), which share them evenly"
        if others == 0:
            rest = f"holds {num_layers - left} of the {num_layers} layers of the model"
        uneven = " and ".join(f"{name}={count}" for name, count in given.items())
        raise ValueError(f"{key} with {uneven} {rest}; {_what_would(config, num_layers)}")
    per_rank = [left // others if others else 0] * size
    per_rank[0] = given.get(FIRST, per_rank[0])
    per_rank[-1] = given.get(LAST, per_rank[-1])
    return per_rank


def _what_would(config: MegatronConfig, num_layers: int) -> str:
    """The remedies: the most even uneven stages, if there are any, or so many stages as are even and divide the ranks
    as the present ones do."""
    size = config.pipeline_model_parallel_size
    even = math.gcd(size, num_layers)
    pieces_fit = even > 1 and num_layers // even % config.stages_per_rank == 0
    away = {name: getattr(config, name) for name in (FIRST, LAST, *([] if pieces_fit else [VIRTUAL]))}
    keys = {**{name: "null" for name, value in away.items() if value is not None}, STAGES: even}
    ways = [keys] if size > 1 else []
    if 2 <= size < num_layers and num_layers % size:
        # The middle stages hold m layers each and the two ends the rest, none of them more than m if possible.
        middle = -(-num_layers // size)
        if num_layers - middle * (size - 2) < 2:
            middle -= 1
        ends = num_layers - middle * (size - 2)
        ways.insert(0, {FIRST: ends // 2, LAST: ends - ends // 2})
    return remedy(*(" and ".join(f"{config.key(name)}={value}" for name, value in way.items()) for way in ways))

"""Models cut over ranks at random, for the tests of plans and of their execution."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl.refit.layout import TensorMeta
from nemo_rl.refit.shard_plan import ShardPlan, Shards, build_plan

DTYPES = ("float32", "bfloat16", "uint8", "int64")


@dataclass
class Case:
    metas: list[TensorMeta]
    sources: Shards
    wants: dict[int, list[int]]
    nodes: list[int]

    def plan(self, bucket_bytes: int) -> ShardPlan:
        return build_plan(self.metas, self.sources, self.wants, nodes=self.nodes, bucket_bytes=bucket_bytes)

    def value(self, tensor: int) -> torch.Tensor:
        """The whole tensor: bytes that depend on tensor and place."""
        meta = self.metas[tensor]
        values = (torch.arange(meta.nbytes) * 31 + tensor * 7) % 251
        return values.to(torch.uint8).view(meta.torch_dtype).view(meta.shape)

    def shards(self, rank: int) -> dict[int, torch.Tensor]:
        """What `rank` holds; parts cut on an inner dimension are strided views."""
        held = {}
        for row in np.flatnonzero(self.sources.rank == rank).tolist():
            tensor, dim = int(self.sources.tensor[row]), int(self.sources.dim[row])
            lo, hi = int(self.sources.lo[row]), int(self.sources.hi[row])
            value = self.value(tensor)
            held[tensor] = value.narrow(dim, lo, hi - lo) if value.dim() else value
        return held

    def wanted_bytes(self, rank: int) -> list[torch.Tensor]:
        """Of everything `rank` wants, in its order: the bytes (uint8)."""
        return [self.value(tensor).contiguous().view(-1).view(torch.uint8) for tensor in self.wants.get(rank, [])]


def shards_of(rows: list[tuple[int, int, int, int, int]]) -> Shards:
    """From rows (rank, tensor, dim, lo, hi)."""
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 5).T
    return Shards(*columns)


def random_case(seed: int, world: int = 6, num_tensors: int = 40) -> Case:
    """Tensors of every shape, cut on any dimension into equal and unequal parts with replicas; wants of all kinds."""
    draw = random.Random(seed)
    metas, sources = [], []
    for tensor in range(num_tensors):
        shape = tuple(draw.choice((1, 2, 3, 4, 6, 12, 25)) for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3))))
        if draw.random() < 0.05:
            shape = (0, *shape)
        metas.append(TensorMeta(f"layers.{tensor}", draw.choice(DTYPES), shape))
        dim = draw.randrange(len(shape)) if shape else 0
        full = shape[dim] if shape else 1
        cuts = draw.choice([n for n in (1, 1, 2, 3, 4) if n <= world])
        bounds = sorted({0, full, *(full * i // cuts for i in range(1, cuts))}) if full else [0, 0]
        parts = list(itertools.pairwise(bounds))
        for number, rank in enumerate(draw.sample(range(world), draw.randrange(len(parts), world + 1))):
            sources.append((rank, tensor, dim, *parts[number % len(parts)]))
    # The last one only sends.
    wants = {rank: draw.sample(range(num_tensors), draw.randrange(num_tensors)) for rank in range(world - 1)}
    draw.shuffle(sources)
    return Case(metas, shards_of(sources), wants, [rank // 2 for rank in range(world)])


# -- the cost of a plan


def messages_per_bucket(plan: ShardPlan) -> np.ndarray:
    """[ranks, buckets]: number of messages that each receiver gets for each of its buckets."""
    leaves = plan.source != plan.receiver
    counts = np.zeros((plan.world_size, len(plan.num_rounds)), dtype=np.int64)
    np.add.at(counts, (plan.receiver[leaves], plan.bucket[leaves]), 1)
    return counts


def received_bytes(plan: ShardPlan) -> np.ndarray:
    """[ranks]: bytes of weights in each receiver's buckets, including those from itself."""
    itemsize = np.array([meta.torch_dtype.itemsize for meta in plan.tensors])
    sums = np.zeros(plan.world_size, dtype=np.int64)
    np.add.at(sums, np.repeat(plan.receiver, np.diff(plan.first)), plan.size.prod(axis=1) * itemsize[plan.tensor])
    return sums


def transferred_bytes(plan: ShardPlan) -> np.ndarray:
    """[ranks, ranks]: bytes in messages from source to receiver, with trailers and alignment."""
    sums = np.zeros((plan.world_size, plan.world_size), dtype=np.int64)
    np.add.at(sums, (plan.source, plan.receiver), plan.nbytes)
    return sums


def peak_send_bytes(plan: ShardPlan) -> int:
    """Maximum number of bytes that one rank sends in one exchange."""
    sums = np.zeros((len(plan.num_rounds), int(plan.num_rounds.max(initial=1)), plan.world_size), dtype=np.int64)
    np.add.at(sums, (plan.bucket, plan.round, plan.source), plan.nbytes)
    return int(sums.max(initial=0))

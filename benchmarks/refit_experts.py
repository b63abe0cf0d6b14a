"""Refit of a large mixture of experts: every engine rank gets its own experts and nothing else.

    python benchmarks/refit_experts.py [--bucket-mib 128] [--skip-exchange]

First the plan alone, for a model with the names, shapes and 8-bit block scales of DeepSeek-V3 (about 90,000 tensors),
trained on 64 ranks (TP=4, EP=16, PP=4, ETP=1) and generated with on the same 64 as one expert-parallel group, whose
ranks hold 4 experts of each layer and all other weights. Nothing of that size is allocated. It prints how long the
plan takes, how many messages a receiver gets per bucket, what it is sent against what it wants, and against sending
everything to everyone. Then four processes carry out a plan for a small model of the same kind over gloo, and what
arrives is compared with the sources bit by bit. The last line is the ratio of bytes.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl.refit.layout import NUM_HALVES, TensorMeta
from nemo_rl.refit.shard_plan import ShardPlan, Shards, build_plan
from nemo_rl.refit.shard_sender import ShardExchange
from tests.unit.refit.shard_cases import messages_per_bucket, peak_send_bytes, received_bytes, transferred_bytes

BLOCK = 128


@dataclass(frozen=True)
class Sizes:
    """A mixture of experts with latent attention."""

    layers: int = 61
    dense_layers: int = 3
    experts: int = 256
    hidden: int = 7168
    dense_mlp: int = 18432
    expert_mlp: int = 2048
    heads: int = 128
    query_rank: int = 1536
    latent_rank: int = 512
    vocabulary: int = 129280


@dataclass(frozen=True)
class Layout:
    """Ranks of training: pipeline outermost, then data, then tensor; experts over data and tensor of a stage."""

    tensor: int = 4
    pipeline: int = 4
    data: int = 4
    ranks_per_node: int = 8

    @property
    def stage(self) -> int:
        return self.tensor * self.data

    @property
    def size(self) -> int:
        return self.stage * self.pipeline


class Model:
    """Its tensors, and of each the layer, the expert (-1: none) and the dimension that TP cuts (-1: none)."""

    def __init__(self, sizes: Sizes) -> None:
        self.metas: list[TensorMeta] = []
        self.layer: list[int] = []
        self.expert: list[int] = []
        self.cut: list[int] = []
        self._add("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden), 0, cut=0)
        for layer in range(sizes.layers):
            self._add_layer(sizes, layer)
        self._add("model.norm.weight", (sizes.hidden,), sizes.layers - 1)
        self._add("lm_head.weight", (sizes.vocabulary, sizes.hidden), sizes.layers - 1, cut=0)

    def _add_layer(self, sizes: Sizes, layer: int) -> None:
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._add(f"{at}.{norm}.weight", (sizes.hidden,), layer)
        self._add(f"{at}.self_attn.q_a_layernorm.weight", (sizes.query_rank,), layer)
        self._add(f"{at}.self_attn.kv_a_layernorm.weight", (sizes.latent_rank,), layer)
        self._linear(f"{at}.self_attn.q_a_proj", (sizes.query_rank, sizes.hidden), layer)
        self._linear(f"{at}.self_attn.q_b_proj", (sizes.heads * 192, sizes.query_rank), layer, cut=0)
        self._linear(f"{at}.self_attn.kv_a_proj_with_mqa", (sizes.latent_rank + 64, sizes.hidden), layer)
        self._linear(f"{at}.self_attn.kv_b_proj", (sizes.heads * 256, sizes.latent_rank), layer, cut=0)
        self._linear(f"{at}.self_attn.o_proj", (sizes.hidden, sizes.heads * 128), layer, cut=1)
        if layer < sizes.dense_layers:
            self._mlp(f"{at}.mlp", sizes.hidden, sizes.dense_mlp, layer)
            return
        self._add(f"{at}.mlp.gate.weight", (sizes.experts, sizes.hidden), layer)
        self._add(f"{at}.mlp.gate.e_score_correction_bias", (sizes.experts,), layer, dtype="float32")
        self._mlp(f"{at}.mlp.shared_experts", sizes.hidden, sizes.expert_mlp, layer)
        for expert in range(sizes.experts):
            self._mlp(f"{at}.mlp.experts.{expert}", sizes.hidden, sizes.expert_mlp, layer, expert=expert)

    def _mlp(self, name: str, hidden: int, width: int, layer: int, expert: int = -1) -> None:
        cuts = (0, 0, 1) if expert < 0 else (-1, -1, -1)
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        for projection, shape, cut in zip(("gate_proj", "up_proj", "down_proj"), shapes, cuts, strict=True):
            self._linear(f"{name}.{projection}", shape, layer, cut=cut, expert=expert)

    def _linear(self, name: str, shape: tuple[int, int], layer: int, *, cut: int = -1, expert: int = -1) -> None:
        self._add(f"{name}.weight", shape, layer, cut=cut, expert=expert, dtype="float8_e4m3fn")
        scales = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        self._add(f"{name}.weight_scale_inv", scales, layer, cut=cut, expert=expert, dtype="float32")

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        layer: int,
        *,
        cut: int = -1,
        expert: int = -1,
        dtype: str = "bfloat16",
    ) -> None:
        self.metas.append(TensorMeta(name, dtype, shape))
        self.layer.append(layer)
        self.expert.append(expert)
        self.cut.append(cut)


def whole_shards(tensors: Sequence[TensorMeta], rank: np.ndarray, tensor: np.ndarray) -> Shards:
    """Rows of unsplit tensors: `tensor[i]` on `rank[i]`."""
    first = np.array([meta.shape[0] if meta.shape else 1 for meta in tensors], dtype=np.int64)
    zeros = np.zeros(len(tensor), dtype=np.int64)
    return Shards(np.asarray(rank, dtype=np.int64), tensor, zeros, zeros, first[tensor])


def sources_of(model: Model, sizes: Sizes, layout: Layout) -> Shards:
    """Training: experts on one rank each, TP parts on every data-parallel replica, the rest on all ranks of a stage."""
    expert, cut = np.array(model.expert), np.array(model.cut)
    first_rank = np.array(model.layer) * layout.pipeline // sizes.layers * layout.stage
    full = np.array([meta.shape for meta in model.metas if len(meta.shape) == 2], dtype=np.int64)
    size = np.ones(len(model.metas), dtype=np.int64)
    two = np.array([len(meta.shape) == 2 for meta in model.metas])
    size[two] = np.where(cut[two] == 1, full[:, 1], full[:, 0])
    parts = []
    experts = np.flatnonzero(expert >= 0)
    of_rank = expert[experts] * layout.stage // sizes.experts
    parts.append(whole_shards(model.metas, first_rank[experts] + of_rank, experts))
    whole, divided = np.flatnonzero((expert < 0) & (cut < 0)), np.flatnonzero((expert < 0) & (cut >= 0))
    for rank in range(layout.stage):
        part = rank % layout.tensor
        parts.append(whole_shards(model.metas, first_rank[whole] + rank, whole))
        lo, hi = size[divided] * part // layout.tensor, size[divided] * (part + 1) // layout.tensor
        parts.append(Shards(first_rank[divided] + rank, divided, cut[divided], lo, hi))
    return Shards(*map(np.concatenate, zip(*parts, strict=True)))


def first_layer(rank: int, num_layers: int) -> int:
    """The layer with which a receiver's order begins; earlier layers come last.

    If all receivers began with the first layer, the ranks of the first pipeline stage would send alone. Multiples of
    the golden ratio, modulo 1, are spread evenly for any number of receivers, also for neighbours, which often want
    from the same source.
    """
    golden = (math.sqrt(5) - 1) / 2
    return int(rank * golden % 1 * num_layers)


def wants_of(model: Model, sizes: Sizes, num_receivers: int) -> dict[int, list[int]]:
    """Engines: own experts and everything else. Each begins at a layer of its own, so that all stages send at once."""
    expert, layer = np.array(model.expert), np.array(model.layer)
    wants = {}
    for rank in range(num_receivers):
        own = np.flatnonzero((expert < 0) | (expert * num_receivers // sizes.experts == rank))
        turned = (layer[own] - first_layer(rank, sizes.layers)) % sizes.layers
        wants[rank] = own[np.argsort(turned, kind="stable")].tolist()
    return wants


def planned(sizes: Sizes, layout: Layout, bucket_bytes: int) -> tuple[Model, ShardPlan, float]:
    """The model, its plan, and the seconds that the plan took."""
    model = Model(sizes)
    started = time.perf_counter()
    sources, wants = sources_of(model, sizes, layout), wants_of(model, sizes, layout.size)
    nodes = [rank // layout.ranks_per_node for rank in range(layout.size)]
    plan = build_plan(model.metas, sources, wants, nodes=nodes, bucket_bytes=bucket_bytes)
    return model, plan, time.perf_counter() - started


def report_plan(bucket_bytes: int) -> float:
    """Plan for the large model; what everything-to-everyone sends over what the plan sends, per receiver."""
    layout = Layout()
    model, plan, seconds = planned(Sizes(), layout, bucket_bytes)
    total = sum(meta.nbytes for meta in model.metas)
    print(
        f"{len(model.metas)} tensors, {total / 2**30:.0f} GiB, {layout.size} ranks: plan in {seconds:.2f} s", flush=True
    )
    started = time.perf_counter()
    mine = plan.for_rank(layout.size - 1)
    print(f"one rank's part of it: {time.perf_counter() - started:.2f} s, {len(mine.layout.tensors)} tensors wanted")
    messages = messages_per_bucket(plan)
    print(f"buckets of {bucket_bytes >> 20} MiB: {messages.shape[1]} at most, {plan.num_rounds.sum()} exchanges")
    print(f"messages per receiver and bucket: {messages.max()} at most, {messages.mean():.1f} on average")
    own = np.array([plan.layouts[rank].total_bytes for rank in range(layout.size)])
    received, moved = received_bytes(plan), transferred_bytes(plan)
    wire = moved.sum(axis=0)
    print(f"bytes per receiver: {received.max() / 2**30:.1f} GiB, {(received / own).max():.6f} of its own part")
    print(f"of which in messages, fingerprints and alignment included: {wire.max() / 2**30:.1f} GiB at most")
    sent, peak = moved.sum(axis=1), peak_send_bytes(plan)
    print(f"busiest source: {sent.max() / sent.mean():.2f} of the mean; sends {peak / 2**20:.0f} MiB at most at once")
    node = np.arange(layout.size) // layout.ranks_per_node
    print(f"share of bytes that leave their node: {moved[node[:, None] != node].sum() / moved.sum():.2f}")
    return total / received.max()


SMALL = Sizes(
    layers=6,
    dense_layers=1,
    experts=16,
    hidden=512,
    dense_mlp=2048,
    expert_mlp=256,
    heads=4,
    query_rank=256,
    latent_rank=128,
    vocabulary=4096,
)
SMALL_LAYOUT = Layout(tensor=2, pipeline=2, data=1, ranks_per_node=2)


def values_of(meta: TensorMeta, index: int) -> torch.Tensor:
    """The tensor's values, the same in every process."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 100, meta.shape, dtype=torch.uint8, generator=generator).to(meta.torch_dtype)


def exchange_as(rank: int, folder: str, bucket_bytes: int) -> None:
    """One of the four processes. Prints from rank 0."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), SMALL_LAYOUT.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SMALL_LAYOUT.size)
    model, plan, _ = planned(SMALL, SMALL_LAYOUT, bucket_bytes)
    rows = sources_of(model, SMALL, SMALL_LAYOUT)
    shards = {}
    for row in np.flatnonzero(rows.rank == rank).tolist():
        tensor, dim, lo, hi = (int(column[row]) for column in (rows.tensor, rows.dim, rows.lo, rows.hi))
        shards[tensor] = values_of(model.metas[tensor], tensor).narrow(dim, lo, hi - lo)
    exchange = ShardExchange(plan.for_rank(rank), shards.__getitem__, torch.device("cpu"))
    layout = exchange.plan.layout
    buffer = torch.zeros(NUM_HALVES * layout.bucket_bytes, dtype=torch.uint8)
    numbers = {meta.name: index for index, meta in enumerate(model.metas)}
    expected = [values_of(m, numbers[m.name]).view(-1).view(torch.uint8) for m in layout.tensors]
    seconds, differing = 0.0, 0
    for bucket in range(len(exchange.plan.rounds)):
        begin = layout.half_offset(bucket)
        half = buffer[begin : begin + layout.bucket_bytes]
        dist.barrier()
        started = time.perf_counter()
        exchange.fill(bucket, half)
        seconds += time.perf_counter() - started
        for piece in layout.buckets[bucket] if bucket < len(layout.buckets) else ():
            got = half[piece.offset : piece.offset + piece.nbytes]
            differing += int((got != expected[piece.tensor][piece.start : piece.start + piece.nbytes]).sum())
    counted = torch.tensor([differing, layout.total_bytes])
    dist.all_reduce(counted)
    if rank == 0:
        moved = transferred_bytes(plan).sum()
        print(
            f"exchanged over gloo by 4 processes: {len(model.metas)} tensors, {len(exchange.plan.rounds)} buckets, "
            f"{counted[1] / 2**20:.0f} MiB into {NUM_HALVES} halves of {layout.bucket_bytes >> 10} KiB each, "
            f"{moved / 2**20:.0f} MiB of them in messages, {seconds:.2f} s; differing bytes: {int(counted[0])}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    if differing:
        raise SystemExit(f"rank {rank}: {differing} bytes differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--skip-exchange", action="store_true")
    args = parser.parse_args()
    ratio = report_plan(args.bucket_mib << 20)
    if not args.skip_exchange:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.get_context("spawn")
            processes = [context.Process(target=exchange_as, args=(r, folder, 1 << 20)) for r in range(4)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise SystemExit("the exchange failed")
    print(f"everything to everyone is {ratio:.1f} times as many bytes per receiver")


if __name__ == "__main__":
    main()

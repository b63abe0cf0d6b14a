"""Weights sent from Megatron shards without gathering: what lies in the buffer is what lies on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from nemo_rl.models.policy.megatron.mapping import ParallelRanks, weight_map
from nemo_rl.models.policy.megatron.weights import local_shards
from nemo_rl.refit.buffers import SharedMemoryBuffer
from nemo_rl.refit.shard_sender import ShardSender
from tests.unit.policy.megatron.hf_models import CONFIGS, MOE, random_model
from tests.unit.policy.megatron.test_weights import ETP2, TP2, loaded, on_disk
from tests.worlds import run_world

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Family -> directory."""
    directories = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, directory in directories.items():
        random_model(name).save_pretrained(directory)
    return directories


def sent(directory: Path, rank: int, place: ParallelRanks, stage: int | None) -> dict[str, torch.Tensor]:
    """What reaches the buffer of this rank, which has one for itself."""
    mapping = weight_map(AutoConfig.from_pretrained(directory), implementation="local")
    sender = ShardSender(
        [(tensor.name, tensor.shape) for tensor in mapping.hf_tensors],
        local_shards(loaded(directory, place, stage), mapping, place, CPU),
        device=CPU,
        rank=rank,
        local_rank=0,
        transport="packed_shm",
        wire_dtype="bfloat16",
        bucket_bytes=3000,
    )
    buffer = SharedMemoryBuffer.attach(next(iter(sender.describe()["endpoints"].values())))
    whole = {m.name: torch.empty(m.nbytes, dtype=torch.uint8) for m in sender.layout.tensors}
    for bucket in range(len(sender.layout.buckets)):
        sender.pack(bucket)
        for piece in sender.layout.buckets[bucket]:
            at = sender.layout.half_offset(bucket) + piece.offset
            part = whole[sender.layout.tensors[piece.tensor].name][piece.start : piece.start + piece.nbytes]
            part.copy_(buffer.bytes[at : at + piece.nbytes])
    return {m.name: whole[m.name].view(m.torch_dtype).view(m.shape) for m in sender.layout.tensors}


def assert_sent(directory: Path, got: dict[str, torch.Tensor]) -> None:
    want = on_disk(directory)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        keeps = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, want[name] if keeps else want[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("places", [TP2, ETP2, [ParallelRanks(ep_rank=rank, ep_size=2) for rank in range(2)]])
def test_two_ranks(saved, places):
    def on_rank(rank: int, world_size: int) -> None:
        for name in ("qwen2-tied", MOE[0], MOE[-1]):
            assert_sent(saved[name], sent(saved[name], rank, places[rank], None))

    run_world(on_rank, 2)


@pytest.mark.slow
@pytest.mark.parametrize("places", [TP2, ETP2])
def test_two_stages_of_two_ranks(saved, places):
    def on_rank(rank: int, world_size: int) -> None:
        for directory in saved.values():
            assert_sent(directory, sent(directory, rank, places[rank % 2], rank // 2))

    run_world(on_rank, 4)

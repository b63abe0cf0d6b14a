"""Megatron parameters filled from checkpoints and exported again, without Megatron."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nemo_rl.models.policy.megatron.mapping import ParallelRanks, WeightMap, weight_map
from nemo_rl.models.policy.megatron.weights import export_weights, load_weights, local_shards
from nemo_rl.refit.buffers import SharedMemoryBuffer
from nemo_rl.refit.layout import ExportedTensor
from nemo_rl.refit.shard_sender import ShardSender
from tests.unit.policy.megatron.hf_models import FAMILIES, MOE, full_name, random_model
from tests.worlds import run_world

TP2 = [ParallelRanks(tp_rank=rank, tp_size=2, ep_rank=rank, ep_size=2) for rank in range(2)]
ETP2 = [ParallelRanks(tp_rank=rank, tp_size=2, etp_rank=rank, etp_size=2) for rank in range(2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Family -> directory."""
    directories = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, directory in directories.items():
        random_model(name).save_pretrained(directory)
    return directories


def mapped(directory: Path) -> WeightMap:
    return weight_map(AutoConfig.from_pretrained(directory), implementation="local")


def empty_parameters(mapping: WeightMap, place: ParallelRanks, stage: int | None = None) -> dict[str, torch.Tensor]:
    """What a rank holds: of one stage of one layer (0, or 1 with an output layer), or of all."""
    parameters = {}
    for name, entry in mapping.on_rank(place).items():
        is_last = name.startswith(("decoder.layers.1", "decoder.final", "output"))
        if stage is None and name == "output_layer.weight" and mapping.is_tied:
            continue
        if stage is None or is_last == (stage == 1):
            parameters[name] = torch.full(entry.shard_shape(entry.rank_and_size(place)[1]), 7.0)
    return parameters


def loaded(directory: Path, place: ParallelRanks, stage: int | None = None) -> dict[str, torch.Tensor]:
    mapping = mapped(directory)
    parameters = empty_parameters(mapping, place, stage)
    load_weights(parameters, mapping, place, str(directory))
    return parameters


def on_disk(directory: Path) -> dict[str, torch.Tensor]:
    family = AutoConfig.from_pretrained(directory).model_type
    return {full_name(family, key): tensor for key, tensor in load_file(directory / "model.safetensors").items()}


def test_a_tied_output_layer_on_a_stage_of_its_own_is_read_from_the_embedding(saved):
    parameters = loaded(saved["qwen2"], TP2[1], stage=1)
    embedding = on_disk(saved["qwen2"])["model.embed_tokens.weight"]
    assert torch.equal(parameters["output_layer.weight"][:30], embedding[31:])
    assert torch.count_nonzero(parameters["output_layer.weight"][30:]) == 0


@pytest.mark.parametrize("name", MOE)
def test_experts_fused_on_disk_are_read(saved, tmp_path, name):
    model = random_model(name)
    model.config.save_pretrained(tmp_path)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    want = loaded(saved[name], TP2[1])
    got = loaded(tmp_path, TP2[1])
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_a_shape_that_is_not_that_of_the_configuration_is_told(saved, tmp_path):
    config = AutoConfig.from_pretrained(saved["llama"])
    config.intermediate_size = 32
    config.save_pretrained(tmp_path)
    save_file(on_disk(saved["llama"]), tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"gate_proj.weight has shape \(48, 32\), the model's config.json says \(32, 32"
    ):
        loaded(tmp_path, ParallelRanks())


# -- export


def gathered(tensors: list[ExportedTensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    whole = {}
    for tensor in tensors:
        whole[tensor.name] = tensor.gather(None if tensor.keeps_dtype else dtype)
        assert tuple(whole[tensor.name].shape) == tensor.shape
        assert whole[tensor.name].is_contiguous()
    assert len(whole) == len(tensors)
    return whole


def exported(
    parameters: dict[str, torch.Tensor], directory: Path, place: ParallelRanks | None = None
) -> list[ExportedTensor]:
    shards = local_shards(parameters, mapped(directory), place or ParallelRanks(), torch.device("cpu"))
    return export_weights(shards, mapped(directory), torch.device("cpu"))


def layouts() -> Iterator[tuple[list[ParallelRanks], list[int | None]]]:
    """(places, stages) of both ranks of a world of two."""
    yield TP2, [None, None]
    yield ETP2, [None, None]
    yield [ParallelRanks(), ParallelRanks()], [0, 1]
    yield [ParallelRanks(ep_rank=rank, ep_size=2) for rank in range(2)], [None, None]


def sent(directory: Path, rank: int, place: ParallelRanks, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What reaches the buffer of this rank, which has one for itself, without gathering."""
    mapping = mapped(directory)
    sender = ShardSender(
        [(tensor.name, tensor.shape) for tensor in mapping.hf_tensors],
        local_shards(held, mapping, place, torch.device("cpu")),
        device=torch.device("cpu"),
        rank=rank,
        local_rank=0,
        transport="packed_shm",
        wire_dtype="bfloat16",
        bucket_bytes=3000,
    )
    layout = sender.layout
    buffer = SharedMemoryBuffer.attach(next(iter(sender.describe()["endpoints"].values())))
    whole = {m.name: torch.empty(m.nbytes, dtype=torch.uint8) for m in layout.tensors}
    for bucket in range(len(layout.buckets)):
        sender.pack(bucket)
        for piece in layout.buckets[bucket]:
            at = layout.half_offset(bucket) + piece.offset
            part = whole[layout.tensors[piece.tensor].name][piece.start : piece.start + piece.nbytes]
            part.copy_(buffer.bytes[at : at + piece.nbytes])
    return {m.name: whole[m.name].view(m.torch_dtype).view(m.shape) for m in layout.tensors}


def assert_on_disk(directory: Path, got: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    want = on_disk(directory)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        keeps = dtype is None or name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, want[name] if keeps else want[name].to(dtype)), name


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exported_and_sent_tensors_are_those_on_disk_whatever_the_layout(saved, world):
    """On four ranks there are two stages, whose ranks share the experts, or each expert."""
    cuts = list(layouts()) if world == 2 else [(TP2, None), (ETP2, None)]

    def on_rank(rank: int, world_size: int) -> None:
        for places, stages in cuts:
            place, stage = places[rank % 2], rank // 2 if world == 4 else stages[rank]
            for directory in saved.values():
                parameters = loaded(directory, place, stage)
                tensors = exported(parameters, directory, place)
                assert_on_disk(directory, gathered(tensors))
                assert_on_disk(directory, gathered(tensors, torch.bfloat16), torch.bfloat16)
                assert_on_disk(directory, sent(directory, rank, place, parameters), torch.bfloat16)

    run_world(on_rank, world)

"""Megatron parameters filled from checkpoints and exported again, without Megatron."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nemo_rl.models.policy.megatron.mapping import ParallelRanks, WeightMap, weight_map
from nemo_rl.models.policy.megatron.weights import export_weights, load_weights, local_shards
from nemo_rl.refit.buffers import SharedMemoryBuffer
from nemo_rl.refit.shard_sender import ShardSender
from tests.unit.policy.megatron.hf_models import MOE, full_name, random_model
from tests.worlds import run_world

CPU = torch.device("cpu")
TP2 = [ParallelRanks(tp_rank=rank, tp_size=2, ep_rank=rank, ep_size=2) for rank in range(2)]
ETP2 = [ParallelRanks(tp_rank=rank, tp_size=2, etp_rank=rank, etp_size=2) for rank in range(2)]
EP2 = [ParallelRanks(ep_rank=rank, ep_size=2) for rank in range(2)]


@cache
def mapped(directory: Path) -> WeightMap:
    return weight_map(AutoConfig.from_pretrained(directory))


def loaded(directory: Path, place: ParallelRanks, stage: int | None = None) -> dict[str, torch.Tensor]:
    """Parameters of a rank: of one stage of one layer (0, or 1 with an output layer), or of all."""
    mapping, last = mapped(directory), ("decoder.layers.1", "decoder.final", "output")
    entries = mapping.on_rank(place, with_tied_output=stage is not None)
    held = {name: entry for name, entry in entries.items() if stage in (None, int(name.startswith(last)))}
    shapes = {name: entry.shard_shape(entry.rank_and_size(place)[1]) for name, entry in held.items()}
    parameters = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
    load_weights(parameters, mapping, place, str(directory))
    return parameters


@cache
def on_disk(directory: Path) -> dict[str, torch.Tensor]:
    family = AutoConfig.from_pretrained(directory).model_type
    return {full_name(family, key): tensor for key, tensor in load_file(directory / "model.safetensors").items()}


def test_a_tied_output_layer_on_a_stage_of_its_own_is_read_from_the_embedding(saved):
    head = loaded(saved["qwen2"], TP2[1], stage=1)["output_layer.weight"]
    embedding = on_disk(saved["qwen2"])["model.embed_tokens.weight"]
    assert torch.equal(head[:30], embedding[31:]) and torch.count_nonzero(head[30:]) == 0


@pytest.mark.parametrize("name", MOE)
def test_experts_fused_on_disk_are_read(saved, tmp_path, name):
    model = random_model(name)
    model.config.save_pretrained(tmp_path)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(loaded(tmp_path, TP2[1]), loaded(saved[name], TP2[1]), rtol=0, atol=0)


@pytest.mark.parametrize("is_old", [False, True])
def test_torch_files_are_read(saved, tmp_path, is_old):
    """`is_old`: in the format before torch 1.6, which cannot be mapped into memory."""
    model = random_model("qwen2")
    model.config.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    files = {name: f"pytorch_model-{number % 2:05d}.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        part = {name: state[name] for name in state if files[name] == file}
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=not is_old)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    torch.testing.assert_close(loaded(tmp_path, TP2[1]), loaded(saved["qwen2"], TP2[1]), rtol=0, atol=0)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(ValueError, match="holds neither"):
        loaded(tmp_path, TP2[1])


def test_a_shape_that_is_not_that_of_the_configuration_is_told(saved, tmp_path):
    AutoConfig.from_pretrained(saved["llama"], intermediate_size=32).save_pretrained(tmp_path)
    save_file(on_disk(saved["llama"]), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"gate_proj.weight has shape \(48, 32\), .* config.json says \(32, 32"):
        loaded(tmp_path, ParallelRanks())


def gathered(held: dict[str, torch.Tensor], directory: Path, place: ParallelRanks) -> dict[str, torch.Tensor]:
    mapping = mapped(directory)
    tensors = export_weights(local_shards(held, mapping, place, CPU), mapping, CPU)
    whole = {tensor.name: tensor.gather(None) for tensor in tensors}
    assert [tuple(found.shape) for found in whole.values()] == [tensor.shape for tensor in tensors]
    assert all(found.is_contiguous() for found in whole.values())
    return whole


def sent(directory: Path, rank: int, place: ParallelRanks, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the buffer of this rank, which has one for itself. Nothing is gathered."""
    mapping = mapped(directory)
    shapes, shards = list(mapping.shapes.items()), local_shards(held, mapping, place, CPU)
    how: dict[str, Any] = {"transport": "packed_shm", "wire_dtype": "bfloat16", "bucket_bytes": 3000}
    sender = ShardSender(shapes, shards, device=CPU, rank=rank, local_rank=0, **how)
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
    alone, whole = [ParallelRanks()] * 2, [None, None]  # (places, stages) of the ranks
    cuts: Any = [(TP2, whole), (ETP2, whole), (alone, [0, 1]), (EP2, whole)]
    if world == 4:
        cuts = [(TP2, [0, 0, 1, 1]), (ETP2, [0, 0, 1, 1])]

    def on_rank(rank: int, world_size: int) -> None:
        for number, (places, stages) in enumerate(cuts):
            place, stage = places[rank % 2], stages[rank]
            # Layouts 1 and 3 of two ranks cut experts otherwise than 0 and 2 do.
            for directory in (saved[name] for name in saved if name in MOE or number % 2 == 0 or world_size == 4):
                parameters = loaded(directory, place, stage)
                assert_on_disk(directory, gathered(parameters, directory, place))
                assert_on_disk(directory, sent(directory, rank, place, parameters), torch.bfloat16)

    run_world(on_rank, world)

"""Weights on disk under other names, and nothing drawn at random in silence. test_reward_model.py has torch files."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.unit.policy.models import edit_json, save_model
from tests.unit.policy.steps import make_worker, policy_config, whole_weights
from tests.worlds import run_world


def load(directory: Path) -> dict[str, torch.Tensor]:
    return run_world(lambda rank, world: whole_weights(make_worker(directory, policy_config())), 2)[1]


def test_names_of_the_base_model_are_found_and_what_is_missing_or_does_not_fit_is_refused_by_name(tmp_path):
    """Those that `model.base_model.save_pretrained` writes."""
    save_model("qwen2-tied", tmp_path)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    edit_json(config, intermediate_size=128)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.mlp.* has shape \(96, 64\).*\(128, 64\)"):
        load(tmp_path)
    edit_json(config, intermediate_size=96)
    want = load_file(file)
    others = {name.removeprefix("model."): tensor for name, tensor in want.items()}
    save_file(others, file, metadata={"format": "pt"})
    got = load(tmp_path)
    assert all(torch.equal(tensor, got[name]) for name, tensor in want.items())
    del others["layers.1.mlp.up_proj.weight"]
    save_file(others, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight; it is not the mod"):
        load(tmp_path)


@pytest.mark.parametrize("head_dim", [2, 4])
def test_a_tensor_with_a_row_for_each_rank_is_sent_as_it_is(tmp_path: Path, head_dim: int):
    """Norms of heads, which the ranks gather together. With as many rows as ranks each rank has one."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=64, num_hidden_layers=2, head_dim=head_dim, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)

    def sent(rank: int, world_size: int) -> dict[str, torch.Tensor]:
        os.environ["LOCAL_RANK"] = str(rank)
        worker = make_worker(tmp_path, policy_config())
        worker.prepare_refit({"transport": "packed_shm", "wire_dtype": "float32", "bucket_bytes": 1 << 20})
        layout, found = worker.sender.layout, {}
        for number, bucket in enumerate(layout.buckets):
            worker.pack(number)
            for piece in bucket if rank == 0 else ():
                meta, begin = layout.tensors[piece.tensor], layout.half_offset(number) + piece.offset
                data = worker.sender._buffer.bytes[begin : begin + piece.nbytes].clone()
                found[meta.name] = data.view(torch.float32).view(meta.shape)
        return found

    torch.testing.assert_close(run_world(sent, 2)[0], dict(model.state_dict()), rtol=0, atol=0)

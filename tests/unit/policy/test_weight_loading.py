"""Weights on disk under other names, and nothing drawn at random in silence. test_reward_model.py has torch files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.policy.models import edit_json, save_model
from tests.unit.policy.steps import make_worker, policy_config, whole_weights
from tests.worlds import run_world


def save_under_the_names_of_the_base_model(directory: Path, *, without: str | None = None) -> dict[str, torch.Tensor]:
    """As `model.base_model.save_pretrained` writes it. Returns the tensors by their names in the whole model."""
    save_model("qwen2-tied", directory)
    tensors = load_file(directory / "model.safetensors")
    others = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != without}
    save_file(others, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def load(directory: Path) -> dict[str, torch.Tensor]:
    return run_world(lambda rank, world: whole_weights(make_worker(directory, policy_config())), 2)[1]


def test_weights_of_the_base_model_are_found_and_a_missing_one_is_named_and_not_drawn(tmp_path):
    want = save_under_the_names_of_the_base_model(tmp_path)
    got = load(tmp_path)
    assert all(torch.equal(tensor, got[name]) for name, tensor in want.items())
    save_under_the_names_of_the_base_model(tmp_path, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight; it is not the mod"):
        load(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path):
    save_model("llama", tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=128)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.mlp.* has shape \(96, 64\).*\(128, 64\)"):
        run_world(lambda rank, world: make_worker(tmp_path, policy_config()) and None, 1)

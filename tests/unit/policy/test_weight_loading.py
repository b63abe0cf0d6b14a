"""Weights on disk under other names, and nothing drawn at random in silence. test_reward_model.py has torch files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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

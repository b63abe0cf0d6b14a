"""Weights in torch's own files: converted once, read by slices, never by mistake those of another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.megatron.config import MegatronConfig
from nemo_rl.models.policy.megatron.files import DIRECTORY, cache_directory, check_conversion, readable_model
from nemo_rl.models.policy.megatron.mapping import weight_map
from tests.unit.policy.megatron.hf_models import random_model
from tests.unit.policy.steps import policy_config
from tests.worlds import run_world

NAME = "someone/model"


def save_bin(path: Path, *, seed: int = 0, num_files: int = 1) -> dict[str, torch.Tensor]:
    """A tied model as pytorch_model*.bin; returns its tensors."""
    model = random_model("qwen2-tied", seed=seed)
    model.config.save_pretrained(path)
    state = dict(model.state_dict())
    if num_files == 1:
        torch.save(state, path / "pytorch_model.bin")
        return state
    names = list(state)
    files = {name: f"pytorch_model-{number % num_files:05d}.bin" for number, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: state[name] for name in names if files[name] == file}, path / file)
    index = {"metadata": {}, "weight_map": files}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return state


def policy_of(force: bool) -> PolicyConfig:
    megatron = MegatronConfig(enabled=True, force_reconvert_from_hf=force)
    off = DTensorConfig(enabled=False)
    return policy_config(model_name=NAME, optimizer=None, dtensor_cfg=off, megatron_cfg=megatron)


def convert(path: Path, *, force: bool = False) -> list[str]:
    def rank(rank: int, world: int) -> str:
        config = AutoConfig.from_pretrained(path)
        return readable_model(policy_of(force), str(path), config, weight_map(config, implementation="local"))

    return run_world(rank, 2)


def tensors_of(directory: str) -> dict[str, torch.Tensor]:
    return {k: v for file in Path(directory).glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("num_files", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_torch_files_are_converted_once_to_the_bit(tmp_path, num_files):
    (tmp_path / "model").mkdir()
    want = save_bin(tmp_path / "model", num_files=num_files)
    first, second = convert(tmp_path / "model")
    assert first == second == str(tmp_path / "cache" / "someone--model")
    got = tensors_of(first)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    record = Path(first) / "conversion.json"
    before = record.stat().st_mtime_ns
    convert(tmp_path / "model")
    assert record.stat().st_mtime_ns == before
    convert(tmp_path / "model", force=True)
    assert record.stat().st_mtime_ns > before
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_safetensors_are_read_where_they_are(tmp_path, cache):
    random_model("llama").save_pretrained(tmp_path / "model")
    assert convert(tmp_path / "model") == [str(tmp_path / "model")] * 2
    assert not cache.exists()


def test_a_stale_conversion_is_refused_until_it_is_made_anew(tmp_path):
    (tmp_path / "model").mkdir()
    save_bin(tmp_path / "model")
    convert(tmp_path / "model")
    want = save_bin(tmp_path / "model", seed=1)
    config: Any = AutoConfig.from_pretrained(tmp_path / "model")
    message = r"'someone/model': the conversion kept in .* is stale, its weights differing.*force_reconvert"
    with pytest.raises(ValueError, match=message):
        check_conversion(policy_of(False), str(tmp_path / "model"), config)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "model")
    got = tensors_of(convert(tmp_path / "model", force=True)[0])
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_tensors_of_another_architecture_leave_nothing_behind(tmp_path, cache):
    (tmp_path / "model").mkdir()
    state = save_bin(tmp_path / "model")
    torch.save(state | {"model.other.weight": torch.zeros(1)}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"unknown are model\.other\.weight"):
        convert(tmp_path / "model")
    assert not (cache / "someone--model").exists()


def test_where_conversions_are_kept(tmp_path, monkeypatch):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv(DIRECTORY)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/nemo_rl")
    monkeypatch.delenv("HF_HOME")
    assert cache_directory() == Path.home() / ".cache" / "huggingface" / "nemo_rl"

"""Weights in torch's own files: converted once, read by slices, never by mistake those of another model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.megatron.checks import check_megatron
from nemo_rl.models.policy.megatron.files import DIRECTORY, cache_directory, readable_model
from nemo_rl.models.policy.megatron.mapping import weight_map
from tests.unit.policy.megatron.hf_models import random_model
from tests.unit.policy.steps import megatron_policy
from tests.worlds import run_world

NAME = "someone/model"


def save_bin(path: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A tied model as two pytorch_model-*.bin; returns its tensors."""
    path.mkdir(exist_ok=True)
    model = random_model("qwen2", seed=seed)
    model.config.save_pretrained(path)
    state = dict(model.state_dict())
    files = {name: f"pytorch_model-{number % 2:05d}.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: state[name] for name in state if files[name] == file}, path / file)
    index = {"metadata": {}, "weight_map": files}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return state


def policy_of(force: bool) -> PolicyConfig:
    return megatron_policy({"model_name": NAME}, force_reconvert_from_hf=force)


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


def test_torch_files_are_converted_once_to_the_bit_and_a_stale_conversion_is_refused_until_it_is_made_anew(tmp_path):
    want, model = save_bin(tmp_path / "model"), tmp_path / "model"
    check_megatron(policy_of(False), AutoConfig.from_pretrained(model), str(model))  # nothing is kept yet
    first, second = convert(model)
    assert first == second == str(tmp_path / "cache" / "someone--model")
    got = tensors_of(first)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    record = Path(first) / "conversion.json"
    before = record.stat().st_mtime_ns
    convert(model)
    assert record.stat().st_mtime_ns == before
    want = save_bin(model, seed=1)
    config: Any = AutoConfig.from_pretrained(model)
    message = r"'someone/model': the conversion kept in .* is stale, its weights differing.*force_reconvert"
    with pytest.raises(ValueError, match=message):
        check_megatron(policy_of(False), config, str(model))
    check_megatron(policy_of(True), config, str(model))
    with pytest.raises(ValueError, match=message):
        convert(model)
    got = tensors_of(convert(model, force=True)[0])
    assert record.stat().st_mtime_ns > before
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_safetensors_are_read_where_they_are(tmp_path, cache):
    random_model("llama").save_pretrained(tmp_path / "model")
    assert convert(tmp_path / "model") == [str(tmp_path / "model")] * 2
    assert not cache.exists()


def test_tensors_of_another_architecture_leave_nothing_behind(tmp_path, cache):
    save_bin(tmp_path / "model")
    file = tmp_path / "model" / "pytorch_model.bin.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.other.weight"] = "pytorch_model-00000.bin"
    file.write_text(json.dumps(index))
    first = tmp_path / "model" / "pytorch_model-00000.bin"
    torch.save(torch.load(first) | {"model.other.weight": torch.zeros(1)}, first)
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

"""Checkpoints of NeMo RL, in its layouts: converted, or named for what they are, wherever they may be given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.converters import convert_dcp_to_hf, convert_megatron_to_hf
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.convert import find_adapter, model_of_checkpoint
from nemo_rl.models.policy.pretrained import read_model_config
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager
from nemo_rl.utils.config import CheckpointingConfig
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import policy_config

Tensors = dict[str, torch.Tensor]


def as_torch(weights: Path, tensors: Tensors) -> None:
    dcp.save({"model": tensors}, checkpoint_id=str(weights))


def as_automodel(weights: Path, tensors: Tensors) -> None:
    folder = weights / "model"
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(path=str(folder), save_distributed=True))


def as_automodel_in_torch(weights: Path, tensors: Tensors) -> None:
    dcp.save(dict(tensors), checkpoint_id=str(weights / "model"))


def as_megatron(weights: Path, tensors: Tensors) -> None:
    dcp.save({"decoder.layers.mlp.linear_fc1.weight": torch.ones(2)}, checkpoint_id=str(weights / "iter_0000000"))
    (weights / "latest_checkpointed_iteration.txt").write_text("0")


def step_of(folder: Path, model: Path, write: Callable[[Path, Tensors], None], **policy: Any) -> Path:
    """`folder/step_7` with the weights of `model`, each larger by 1, in bfloat16. Tied tensors have both names."""
    step = folder / "step_7"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    step.joinpath("policy", "weights").mkdir(parents=True)
    write(step / "policy" / "weights", {name: tensor + 1 for name, tensor in loaded.state_dict().items()})
    (step / "training_info.json").write_text('{"step": 7, "val_reward": 0.5}')
    section = {"model_name": str(model), "tokenizer": {"name": "${policy.model_name}"}, **policy}
    (step / "config.yaml").write_text(f"policy: {section}\ngrpo: {{n: '${{mul:2,3}}'}}\n")
    build_tiny_tokenizer().save_pretrained(step / "policy" / "tokenizer")
    return step


READABLE = [as_torch, as_automodel, as_automodel_in_torch]


@pytest.mark.parametrize("write", READABLE, ids=lambda write: write.__name__)
def test_tensors_under_hugging_face_names_become_a_model_directory(write, llama, tmp_path):
    step = step_of(tmp_path, llama, write)
    own = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).state_dict()
    config = ["--config", str(step / "config.yaml")]
    for number, (given, words) in enumerate({step: [], step / "policy" / "weights": config}.items()):
        out = tmp_path / str(number)
        assert convert_dcp_to_hf.main(["--dcp-ckpt-path", str(given), "--hf-ckpt-path", str(out), *words]) == 0
        found = AutoModelForCausalLM.from_pretrained(out)
        assert found.dtype == torch.bfloat16
        assert all(torch.equal(tensor, own[name] + 1) for name, tensor in found.state_dict().items())
        assert len(AutoTokenizer.from_pretrained(out)) == len(build_tiny_tokenizer())
    # An evaluation converts by itself, and once.
    how: dict[str, Any] = {"dtype": "float32", "cache": tmp_path / "cache", "resolve_base": str}
    first = model_of_checkpoint(tmp_path, **how)
    assert first == model_of_checkpoint(step, **how) and first.step == step
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(first.model / "model.safetensors")[name], (own[name] + 1).float())


@pytest.mark.parametrize("write", READABLE, ids=lambda write: write.__name__)
def test_a_run_begins_with_a_checkpoint_that_it_converts_once(write, tmp_path):
    save_model("llama", tmp_path / "model", vocab_size=len(build_tiny_tokenizer()))
    step = step_of(tmp_path, tmp_path / "model", write)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    paths = set()
    for given in (step, step / "policy" / "weights"):
        names = {"model_name": str(given), "tokenizer": {"name": str(given)}}
        policy = policy_config(**names, max_total_sequence_length=64)
        model = Model.prepare(policy, CheckpointingConfig())
        paths.add(model.model_path)
    [path] = paths
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(Path(path) / "model.safetensors")[name], own[name] + 1), "as saved"
    (step / "policy" / "weights" / "other.distcp").touch()
    (step / "config.yaml").write_text("policy: {model_name: lost/model}")
    with pytest.raises(ValueError, match=r"^policy\.model_name: .*config.yaml: policy.model_name 'lost/model'"):
        Model.prepare(policy, CheckpointingConfig())


def test_experts_may_be_one_tensor_or_one_for_each(tmp_path):
    save_model("qwen3-moe", tmp_path / "model")
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert any(".experts.0." in name for name in files), "as published models have them"
    for number, write in enumerate((as_torch, lambda weights, _: as_torch(weights, files))):
        step = step_of(tmp_path / str(number), tmp_path / "model", write)
        out = tmp_path / f"out{number}"
        assert convert_dcp_to_hf.main(["--checkpoint", str(step), "--hf-ckpt-path", str(out)]) == 0
        found = load_file(out / "model.safetensors")
        assert found.keys() == files.keys()
        added = 1 - number
        assert all(torch.equal(found[name].bfloat16(), (files[name].bfloat16() + added)) for name in files)


def test_what_the_checkpoint_lacks_or_has_too_much_is_named(llama, tmp_path, capsys):
    step = step_of(tmp_path, llama, as_torch, hf_config_overrides={"num_hidden_layers": 1})
    arguments = ["--dcp-ckpt-path", str(step), "--hf-ckpt-path", str(tmp_path / "out")]
    assert convert_dcp_to_hf.main(arguments) == 2
    assert "unknown to the model: model.model.layers.1." in capsys.readouterr().err
    (step / "config.yaml").unlink()
    assert convert_dcp_to_hf.main(arguments) == 2
    assert "config.yaml is missing: it says what model the weights are of; name it with --config" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_a_reward_model_and_an_adapter_are_known(llama, tmp_path, capsys):
    def with_score(weights: Path, tensors: Tensors) -> None:
        hidden = tensors.pop("lm_head.weight").shape[1]
        as_torch(weights, tensors | {"score.weight": torch.ones(1, hidden)})

    step = step_of(tmp_path / "rm", llama, with_score, reward_model_cfg={"enabled": True})
    assert convert_dcp_to_hf.main(["--dcp-ckpt-path", str(step), "--hf-ckpt-path", str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["score.weight"].sum() > 1
    step = step_of(tmp_path / "lora", llama, as_automodel)
    (step / "policy" / "weights" / "model" / "adapter_config.json").write_text("{}")
    assert find_adapter(step) == step / "policy" / "weights" / "model"
    assert convert_dcp_to_hf.main(["--dcp-ckpt-path", str(step), "--hf-ckpt-path", str(tmp_path / "no")]) == 2
    assert "convert_lora_to_hf.py merges them" in capsys.readouterr().err


KINDS = {as_torch: r"\(torch\.distributed\.checkpoint\)", as_automodel: "NeMo Automodel", as_megatron: "Megatron Core"}


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_no_run_starts_from_it_or_continues_it_without_a_word_of_what_it_is(write, llama, tmp_path, caplog):
    step = step_of(tmp_path, llama, write)
    kind = f"is a checkpoint of NeMo RL .*{KINDS[write]}"
    own = "NeMo RL's own examples/converters/convert_megatron_to_hf.py, where it was trained"
    remedy = own if write is as_megatron else r"convert_dcp_to_hf\.py --dcp-ckpt-path .* --hf-ckpt-path NEW_FOLDER"
    for given in (step, step / "policy", step / "policy" / "weights"):
        with pytest.raises(ValueError, match=rf"(?s)^policy\.model_name: '{given}' {kind}.*{remedy}"):
            read_model_config(policy_config(model_name=str(given)), str(given))
    manager = CheckpointManager({"checkpoint_dir": tmp_path, "metric_name": None})
    with pytest.raises(
        CheckpointError, match=rf"step_7 {kind}.*{remedy}.*set checkpointing\.checkpoint_dir to another"
    ):
        manager.latest_sound()


def test_a_checkpoint_of_a_run_here_is_named_too(tmp_path):
    (tmp_path / "step_7" / "policy" / "weights").mkdir(parents=True)
    (tmp_path / "step_7" / "policy" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a checkpoint and no model directory: make .* --checkpoint .*/step_7 "):
        read_model_config(policy_config(model_name=str(tmp_path / "step_7")), str(tmp_path / "step_7"))


@pytest.mark.parametrize("tool", [convert_dcp_to_hf, convert_megatron_to_hf])
def test_tensors_of_megatron_are_not_converted(tool, llama, tmp_path, capsys):
    weights = step_of(tmp_path, llama, as_megatron) / "policy" / "weights"
    for given in (weights, weights / "iter_0000000"):
        words = ["--checkpoint", str(given), "--hf-ckpt-path", str(tmp_path / "out")]
        assert tool.main(words) == 2
        assert f"{given} is a checkpoint of NeMo RL (Megatron Core): its tensors have" in capsys.readouterr().err

"""Every format of a checkpoint becomes a Hugging Face model with the logits of the policy it was saved from."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.converters import convert_dcp_to_hf
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.checkpoint import PolicyState, policy_tensors, save_model_files, save_tensors
from nemo_rl.models.policy.convert import convert_checkpoint as convert
from nemo_rl.models.policy.convert import find_source
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager
from nemo_rl.utils.config import CheckpointingConfig
from tests.unit.policy.models import save_model
from tests.worlds import run_world

IDS = torch.arange(2, 26).view(2, 12)
EXPERTS = ("qwen3-moe", "mixtral", "deepseek_v3")


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def save(directory: Path, family: str, save_format: Any) -> torch.Tensor:
    """A checkpoint of two ranks under `directory/policy`; the logits of the policy."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(family, Path(folder))  # here: in a world, save_pretrained writes on rank 0 alone
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def rank_main(rank: int, world: int) -> torch.Tensor:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        policy = directory / "policy"
        PolicyState.of(policy_tensors([model]), None, None).save(policy, save_format)
        save_model_files(model, policy)
        (policy / "tokenizer").mkdir(exist_ok=True)
        (policy / "tokenizer" / "tokenizer_config.json").write_text("{}")
        return logits_of(model)

    return run_world(rank_main, 2)[0]


@pytest.mark.parametrize(
    ("family", "save_format", "given"),
    [
        ("qwen2-tied", "torch_save", "."),
        ("qwen3-moe", "torch_save", "policy/weights"),
        ("mixtral", "safetensors", "."),
        ("deepseek_v3", "torch_save", "."),
    ],
)
def test_the_converted_model_has_the_logits_of_the_policy(tmp_path, family, save_format, given):
    want = save(tmp_path, family, save_format)
    convert(tmp_path / given, tmp_path / "out")
    assert not list(tmp_path.glob("*.partial*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    torch.testing.assert_close(logits_of(model), want, rtol=1e-5, atol=1e-6)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} < names
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("use_cache", True) is True
    stored = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    if family in EXPERTS:
        assert any(".experts.3." in name for name in stored), "experts one by one, as models come"
    if family == "deepseek_v3":
        assert any(name.endswith("e_score_correction_bias") for name in stored)


def test_the_command_of_nemo_rl_converts(tmp_path):
    want = save(tmp_path, "llama", "torch_save")
    shutil.rmtree(tmp_path / "policy" / "tokenizer")
    build_tiny_tokenizer().save_pretrained(tmp_path / "hub")
    (tmp_path / "base.yaml").write_text(f"policy: {{model_name: {tmp_path}/hub}}\n")
    (tmp_path / "config.yaml").write_text("defaults: base.yaml\npolicy: {tokenizer: {name: '${policy.model_name}'}}\n")
    arguments = [f"--config={tmp_path}/config.yaml", f"--dcp-ckpt-path={tmp_path}/policy/weights/"]
    assert convert_dcp_to_hf.main([*arguments, f"--hf-ckpt-path={tmp_path}/out"]) == 0
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), want)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert find_source(tmp_path / "policy" / "weights" / "iter_0000000").weights == tmp_path / "policy" / "weights"


# -- what is refused


def test_a_checkpoint_of_adapters_points_to_the_other_converter(tmp_path):
    tensors = {f"model.layers.0.q_proj.lora_{part}": torch.zeros(2, 2) for part in "AB"}
    run_world(lambda rank, world: save_tensors(tensors, tmp_path / "policy" / "weights", "torch_save"), 1)
    with pytest.raises(ValueError, match=r"adapters alone.*convert_lora_to_hf\.py"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"convert_lora_to_hf\.py"):
        convert(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused_with_the_differences(tmp_path):
    save(tmp_path, "llama", "torch_save")
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    (tmp_path / "policy" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"9 missing there: model\.layers\.2\."):
        convert(tmp_path, tmp_path / "out")


def test_a_damaged_step_is_refused_by_file(tmp_path):
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(tmp_path / "c"), metric_name=None))
    tmp = manager.init_tmp_checkpoint(1, {})
    save(tmp, "llama", "torch_save")
    step = manager.finalize_checkpoint(tmp)
    shard = next((step / "policy" / "weights").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=rf"is damaged: policy/weights/{shard.name} is not what was saved"):
        convert(step, tmp_path / "out")


def test_what_is_no_checkpoint_ends_with_status_2_and_what_to_give(tmp_path, capsys):
    (tmp_path / "c" / "policy" / "weights").mkdir(parents=True)
    assert convert_dcp_to_hf.main([f"--checkpoint={tmp_path}/c", f"--hf-ckpt-path={tmp_path}/o"]) == 2
    assert "holds no policy/weights; give a step_N directory" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()

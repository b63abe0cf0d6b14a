"""Every format of a checkpoint, and an adapter with its base, become a Hugging Face model with the same logits."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from examples.converters.convert_dcp_to_hf import main as convert_dcp
from examples.converters.convert_lora_to_hf import main as merge
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.checkpoint import PolicyState, policy_tensors, save_model_files, save_tensors
from nemo_rl.models.policy.convert import convert_adapter, find_source
from nemo_rl.models.policy.convert import convert_checkpoint as convert
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.manifest import seal
from tests.functional.test_bad_input import edited, without
from tests.unit.policy.megatron.hf_models import full_name, random_model
from tests.unit.policy.models import save_model
from tests.unit.policy.test_vision import FAMILY_MODELS, shapes
from tests.worlds import run_world

IDS = torch.arange(2, 26).view(2, 12)


def logits_of(model: Any) -> torch.Tensor:
    """Of a model, or of the folder of one."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def save(directory: Path, family: str, save_format: Any) -> torch.Tensor:
    """A checkpoint of two ranks under `directory/policy`; the logits of the policy."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(family, Path(folder))  # here: in a world, save_pretrained writes on rank 0 alone
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def rank_main(rank: int, world: int) -> torch.Tensor:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        policy = directory / "policy"
        PolicyState.of(policy_tensors([model]), None, None).save(policy, save_format)
        save_model_files(model.config, policy)
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
    torch.testing.assert_close(logits_of(tmp_path / "out"), want, rtol=1e-5, atol=1e-6)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} < names
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("use_cache", True) is True
    stored = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    if family != "qwen2-tied":
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
    assert convert_dcp([*arguments, f"--hf-ckpt-path={tmp_path}/out"]) == 0
    torch.testing.assert_close(logits_of(tmp_path / "out"), want)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert find_source(tmp_path / "policy" / "weights" / "iter_0000000").weights == tmp_path / "policy" / "weights"


# -- what is refused


def test_a_checkpoint_of_adapters_points_to_the_other_converter(tmp_path):
    tensors = {f"model.layers.0.q_proj.lora_{part}": torch.zeros(2, 2) for part in "AB"}
    run_world(lambda rank, world: save_tensors(tensors, tmp_path / "policy" / "weights", "torch_save"), 1)
    with pytest.raises(ValueError, match=r"only adapters.*convert_lora_to_hf\.py"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"convert_lora_to_hf\.py"):
        convert(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused_with_the_differences(tmp_path):
    save(tmp_path, "llama", "torch_save")
    edited("policy/config.json", num_hidden_layers=3)(tmp_path)
    with pytest.raises(CheckpointError, match=r"9 missing there: model\.layers\.2\."):
        convert(tmp_path, tmp_path / "out")


def test_a_damaged_step_is_refused_by_file(tmp_path):
    shard = tmp_path / "policy" / "weights" / "0.distcp"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"sound")
    seal(tmp_path)
    shard.write_bytes(b"bound")
    with pytest.raises(ValueError, match=r"is damaged: policy/weights/0\.distcp is not what was saved"):
        convert(tmp_path, tmp_path / "out")


def test_what_is_no_checkpoint_ends_with_status_2_and_what_to_give(tmp_path, capsys):
    (tmp_path / "c" / "policy" / "weights").mkdir(parents=True)
    assert convert_dcp([f"--checkpoint={tmp_path}/c", f"--hf-ckpt-path={tmp_path}/o"]) == 2
    assert "holds no policy/weights; give a step_N directory" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


# -- adapters


RANK = 3


def save_base(directory: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    save_model("qwen2-tied", directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    (directory / "model.safetensors").unlink()
    model.to(dtype).save_pretrained(directory, **settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(json.dumps({"of": "base"}))
    (directory / "pytorch_model.bin.index.json").write_text("{}")
    return model


def save_adapter(directory: Path, base: Any, **settings: Any) -> Any:
    """An adapter of PEFT on `base` (which it changes); returns PEFT's model."""
    asked = {"r": RANK, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    base.name_or_path = "models/base"
    model = get_peft_model(base, LoraConfig(**asked | settings))
    model.save_pretrained(str(directory))
    return model.eval()


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_the_merged_model_gives_the_logits_of_base_and_adapter(max_shard_size, tmp_path, capsys) -> None:
    adapted = save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", max_shard_size=max_shard_size))
    output = tmp_path / "new" / "merged"
    command = ["--adapter", f"{tmp_path}/adapter", "--base-model", f"{tmp_path}/base", "--out", f"{output}"]
    assert merge(command) == 0
    torch.testing.assert_close(logits_of(output), logits_of(adapted), rtol=0, atol=1e-5)
    assert (logits_of(output) - logits_of(tmp_path / "base")).abs().max() > 1e-2
    kept = {file.name for file in (tmp_path / "base").iterdir()} - {"pytorch_model.bin.index.json"}
    assert {file.name for file in output.iterdir()} == kept
    assert json.loads((output / "tokenizer.json").read_text()) == {"of": "base"}
    assert not list(output.parent.glob("*.partial*"))
    assert merge(command) == 2
    assert "name a directory that is new or empty" in capsys.readouterr().err


def test_the_commands_of_nemo_rl_take_a_step_and_a_base_that_megatron_converted(tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path / "step_3" / "policy" / "adapter", save_base(tmp_path / "base"))
    step, base = f"{tmp_path}/step_3/policy/weights/iter_0000000", f"{tmp_path}/base"
    (tmp_path / "step_3" / "policy" / "weights").mkdir()
    converted = ["--base-ckpt", f"{tmp_path}/nemo_rl/base/iter_0000000", "--hf-model-name", base]
    assert merge([*converted, "--adapter-ckpt", step, "--hf-ckpt-path", f"{tmp_path}/one"]) == 0
    assert merge(["--base-ckpt", base, "--adapter-ckpt", step, "--hf-ckpt-path", f"{tmp_path}/two"]) == 0
    for output in ("one", "two"):
        torch.testing.assert_close(logits_of(tmp_path / output), logits_of(adapted), rtol=0, atol=1e-5)
    alone = ["--adapter-ckpt", f"{tmp_path}/step_3", "--hf-ckpt-path", f"{tmp_path}/alone", "--adapter-only"]
    assert merge(alone) == 0
    assert all((tmp_path / "alone" / f"adapter_{name}").is_file() for name in ("config.json", "model.safetensors"))
    with pytest.raises(SystemExit, match="2"):
        merge(["--adapter-ckpt", step, "--hf-ckpt-path", f"{tmp_path}/three"])


def test_dtypes_and_untouched_tensors_stay_as_they_are(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", torch.bfloat16).float())
    convert_adapter(tmp_path / "adapter", f"{tmp_path}/base", f"{tmp_path}/base", tmp_path / "merged")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    matrices = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert list(base) == list(merged)
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert len(changed) == 4
    for name in changed:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        update = matrices[f"{layer}.lora_B.weight"].double() @ matrices[f"{layer}.lora_A.weight"].double() * 7 / RANK
        expected = (base[name].double() + update).to(torch.bfloat16)
        torch.testing.assert_close(merged[name], expected, rtol=2**-7, atol=0)  # one unit in the last place
        assert (merged[name] == expected).float().mean() > 0.99


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_5_text"])
def test_layers_are_merged_under_their_names_on_disk(family, tmp_path: Path) -> None:
    base = FAMILY_MODELS[family](*shapes()) if family in FAMILY_MODELS else random_model(family)
    base.save_pretrained(tmp_path / "base")
    weights, merged = (tmp_path / name / "model.safetensors" for name in ("base", "merged"))
    before = {full_name(family, name): tensor for name, tensor in load_file(weights).items()}
    save_file(before, weights, metadata={"format": "pt"})
    want = save_adapter(tmp_path / "adapter", base).merge_and_unload().state_dict()
    convert_adapter(tmp_path / "adapter", f"{tmp_path}/base", f"{tmp_path}/base", tmp_path / "merged")
    after = load_file(merged)
    assert after.keys() == before.keys() != want.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    torch.testing.assert_close(type(base).from_pretrained(merged.parent).state_dict(), want, rtol=0, atol=1e-5)


def of_size(**sizes: int) -> Callable[[Path], Any]:
    return lambda folder: save_model("qwen2-tied", folder / "base", **sizes)


OF_ADAPTER = "adapter/adapter_config.json"
BAD: dict[str, Callable[[Path], Any]] = {
    "was trained on 'models/other', not on ": edited(OF_ADAPTER, base_model_name_or_path="models/other"),
    "is neither a directory nor a model of the hub": lambda folder: (folder / "base").rename(folder / "moved"),
    "No such file or directory": without("base/config.json"),
    "is quantised; merge into the model it was made from": edited("base/config.json", quantization_config={"a": 1}),
    "has no *.safetensors": without("base/model.safetensors"),
    "down_proj: the adapter's [64, 3] x [3, 96] does not go with the weight's [16, 96]": of_size(hidden_size=16),
    "model.layers.1.mlp.down_proj.weight is not in the base model": of_size(num_hidden_layers=1),
    "lora_embedding_A is no matrix of a linear layer": lambda folder: save_adapter(
        folder / "adapter", save_base(folder / "base"), target_modules=["q_proj", "embed_tokens"]
    ),
}
"""What is said -> what spoils the folder of both, `adapter` and `base`."""


@pytest.mark.parametrize("message", BAD)
def test_bad_input_ends_with_code_2_and_says_what_to_do(message, tmp_path, capsys) -> None:
    adapter, base, output = tmp_path / "adapter", tmp_path / "base", tmp_path / "merged"
    save_adapter(adapter, save_base(base))
    BAD[message](tmp_path)
    assert merge(["--adapter", f"{adapter}", "--base-model", f"{base}", "--out", f"{output}"]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists() and not list(tmp_path.glob("*.partial*"))

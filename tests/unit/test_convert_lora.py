"""The merged model directory: its logits, its files, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.converters.convert_lora_to_hf import main
from nemo_rl.models.policy.convert import convert_adapter
from tests.functional.test_bad_input import edited, without
from tests.unit.policy.models import save_model

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


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_the_merged_model_gives_the_logits_of_base_and_adapter(max_shard_size, tmp_path, capsys) -> None:
    adapted = save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", max_shard_size=max_shard_size))
    output = tmp_path / "new" / "merged"
    command = ["--adapter", f"{tmp_path}/adapter", "--base-model", f"{tmp_path}/base", "--out", f"{output}"]
    assert main(command) == 0
    merged = AutoModelForCausalLM.from_pretrained(output).eval()
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval())).abs().max() > 1e-2
    kept = {file.name for file in (tmp_path / "base").iterdir()} - {"pytorch_model.bin.index.json"}
    assert {file.name for file in output.iterdir()} == kept
    assert json.loads((output / "tokenizer.json").read_text()) == {"of": "base"}
    assert not list(output.parent.glob("*.partial*"))
    assert main(command) == 2
    assert "name a directory that is new or empty" in capsys.readouterr().err


def test_the_commands_of_nemo_rl_take_a_step_and_a_base_that_megatron_converted(tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path / "step_3" / "policy" / "adapter", save_base(tmp_path / "base"))
    step, base = f"{tmp_path}/step_3/policy/weights/iter_0000000", f"{tmp_path}/base"
    (tmp_path / "step_3" / "policy" / "weights").mkdir()
    converted = ["--base-ckpt", f"{tmp_path}/nemo_rl/base/iter_0000000", "--hf-model-name", base]
    assert main([*converted, "--adapter-ckpt", step, "--hf-ckpt-path", f"{tmp_path}/one"]) == 0
    assert main(["--base-ckpt", base, "--adapter-ckpt", step, "--hf-ckpt-path", f"{tmp_path}/two"]) == 0
    for output in ("one", "two"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / output).eval()
        torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-5)
    alone = ["--adapter-ckpt", f"{tmp_path}/step_3", "--hf-ckpt-path", f"{tmp_path}/alone", "--adapter-only"]
    assert main(alone) == 0
    assert all((tmp_path / "alone" / f"adapter_{name}").is_file() for name in ("config.json", "model.safetensors"))
    with pytest.raises(SystemExit, match="2"):
        main(["--adapter-ckpt", step, "--hf-ckpt-path", f"{tmp_path}/three"])


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


OF_ADAPTER = "adapter/adapter_config.json"
BAD: dict[str, Callable[[Path], Any]] = {
    "is no adapter in PEFT's format: adapter_config.json is missing": without(OF_ADAPTER),
    "use_dora=True is not implemented": edited(OF_ADAPTER, use_dora=True),
    "was trained on 'models/other', not on ": edited(OF_ADAPTER, base_model_name_or_path="models/other"),
    "is neither a directory nor a model of the hub": lambda folder: (folder / "base").rename(folder / "moved"),
    "it has no config.json": without("base/config.json"),
    "is quantised; merge into the model it was made from": edited("base/config.json", quantization_config={"a": 1}),
    "has no *.safetensors": without("base/model.safetensors"),
    "down_proj: the adapter's [64, 3] x [3, 96] does not go with the weight's [16, 96]": (
        lambda folder: save_model("qwen2-tied", folder / "base", hidden_size=16)
    ),
    "model.layers.1.mlp.down_proj.weight is not in the base model": (
        lambda folder: save_model("qwen2-tied", folder / "base", num_hidden_layers=1)
    ),
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
    assert main(["--adapter", f"{adapter}", "--base-model", f"{base}", "--out", f"{output}"]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists() and not list(tmp_path.glob("*.partial*"))

"""The merged model directory: its logits, its files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.converters.convert_lora_to_hf import main
from nemo_rl.models.policy.convert import convert_adapter
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
def test_the_merged_model_gives_the_logits_of_base_and_adapter(max_shard_size: str, tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", max_shard_size=max_shard_size))
    output = tmp_path / "new" / "merged"
    assert main(["--adapter", f"{tmp_path}/adapter", "--base-model", f"{tmp_path}/base", "--out", f"{output}"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(output).eval()
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval())).abs().max() > 1e-2
    kept = {file.name for file in (tmp_path / "base").iterdir()} - {"pytorch_model.bin.index.json"}
    assert {file.name for file in output.iterdir()} == kept
    assert json.loads((output / "tokenizer.json").read_text()) == {"of": "base"}
    assert not list(output.parent.glob("*.partial*"))


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
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in (tmp_path / "alone").iterdir()
    }
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


def set_config(directory: Path, name: str, **settings: Any) -> None:
    file = directory / name
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("no adapter", "is no adapter in PEFT's format: adapter_config.json is missing"),
        ("dora", "use_dora=True is not implemented"),
        ("other base", "was trained on 'models/other', not on "),
        ("no base", "is neither a directory nor a model of the hub"),
        ("no config", "it has no config.json"),
        ("quantised", "is quantised; merge into the model it was made from"),
        ("no safetensors", "has no *.safetensors"),
        ("other shapes", "down_proj: the adapter's [64, 3] x [3, 96] does not go with the weight's [16, 96]"),
        ("other layers", "model.layers.1.mlp.down_proj.weight is not in the base model"),
        ("embedding", "lora_embedding_A is no matrix of a linear layer"),
        ("out exists", "name a directory that is new or empty"),
    ],
)
def test_bad_input_ends_with_code_2_and_says_what_to_do(
    mistake: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, base, output = tmp_path / "adapter", tmp_path / "base", tmp_path / "merged"
    targets = ["q_proj", "embed_tokens"] if mistake == "embedding" else ["q_proj", "down_proj"]
    save_adapter(adapter, save_base(base), target_modules=targets)
    match mistake:
        case "no adapter":
            (adapter / "adapter_config.json").unlink()
        case "dora":
            set_config(adapter, "adapter_config.json", use_dora=True)
        case "other base":
            set_config(adapter, "adapter_config.json", base_model_name_or_path="models/other")
        case "no base":
            base = tmp_path / "elsewhere" / "base"
        case "no config":
            (base / "config.json").unlink()
        case "quantised":
            set_config(base, "config.json", quantization_config={"quant_method": "fp8"})
        case "no safetensors":
            (base / "model.safetensors").unlink()
        case "other shapes":
            save_model("qwen2-tied", base, hidden_size=16)
        case "other layers":
            save_model("qwen2-tied", base, num_hidden_layers=1)
        case "out exists":
            output = base
    assert main(["--adapter", f"{adapter}", "--base-model", f"{base}", "--out", f"{output}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob("*.partial*"))

"""A checkpoint used as a model: which one is taken, what is made of it, once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.checkpoint import PolicyState, policy_tensors, save_consolidated_tensors, save_model_files
from nemo_rl.models.policy.convert import CheckpointModel, is_checkpoint, model_of_checkpoint
from nemo_rl.refit.layout import exported
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager
from nemo_rl.utils.config import CheckpointingConfig
from tests.unit.policy.models import save_model
from tests.worlds import run_world

IDS = torch.arange(2, 26).view(2, 12)


def logits_of(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids=IDS).logits


@pytest.fixture
def base(tmp_path) -> Path:
    save_model("llama", tmp_path / "base")
    return tmp_path / "base"


def save(folder: Path, base: Path, step: int, *, consolidated: bool = False, adapter: Path | None = None) -> Path:
    """A finished checkpoint; with an adapter, one of adapters alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += step  # every step is another model

    def write(directory: Path) -> None:
        policy = directory / "policy"

        def rank_main(rank: int, world: int) -> None:
            tensors = policy_tensors([model])
            saved = tensors if adapter is None else {"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(2, 2)}
            PolicyState.of(saved, None, None).save(policy, "torch_save")
            save_model_files(model, policy)
            if consolidated:
                whole = [exported(name, lambda tensor=tensor: tensor) for name, tensor in tensors.items()]
                save_model_files(model, policy / "weights" / "consolidated")
                save_consolidated_tensors(whole, policy / "weights" / "consolidated")

        run_world(rank_main, 1)
        if adapter is not None:
            shutil.copytree(adapter, policy / "adapter")
        (policy / "tokenizer").mkdir()
        (policy / "tokenizer" / "tokenizer_config.json").write_text("{}")

    config = CheckpointingConfig(checkpoint_dir=str(folder), metric_name=None)
    return CheckpointManager(config).start_save(step, write, {}, "", {}).finish()


def taken(path: Path, tmp_path: Path, dtype: str = "float32") -> CheckpointModel:
    return model_of_checkpoint(path, dtype=dtype, cache=tmp_path / "cache", resolve_base=lambda name: name)


def test_the_newest_sound_checkpoint_is_converted_once(tmp_path, base):
    for step in (1, 9, 10):
        save(tmp_path / "run", base, step)
    (tmp_path / "run" / "tmp_step_11").mkdir()
    assert is_checkpoint(tmp_path / "run") and is_checkpoint(tmp_path / "run" / "step_9") and not is_checkpoint(base)
    found = taken(tmp_path / "run", tmp_path)
    assert found.step == tmp_path / "run" / "step_10"
    assert found.model.parent == tmp_path / "run" / "converted"
    assert {"config.json", "tokenizer_config.json"} <= {file.name for file in found.model.iterdir()}
    embeddings = AutoModelForCausalLM.from_pretrained(found.model).get_input_embeddings().weight
    before = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    torch.testing.assert_close(embeddings[5], before[5] + 10)
    stamp = (found.model / "config.json").stat().st_mtime_ns
    assert taken(tmp_path / "run", tmp_path) == found
    assert (found.model / "config.json").stat().st_mtime_ns == stamp, "nothing was converted again"
    half = taken(tmp_path / "run", tmp_path, "bfloat16")
    assert half.model != found.model and half.digest == found.digest
    assert AutoModelForCausalLM.from_pretrained(half.model, dtype="auto").dtype == torch.bfloat16


def test_a_damaged_checkpoint_is_passed_over_in_a_folder_and_refused_by_name(tmp_path, base):
    good, bad = save(tmp_path / "run", base, 1), save(tmp_path / "run", base, 2)
    shard = next((bad / "policy" / "weights").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert taken(tmp_path / "run", tmp_path).step == good
    with pytest.raises(ValueError, match=rf"step_2 is damaged: policy/weights/{shard.name} has \d+ bytes instead of"):
        taken(bad, tmp_path)
    shutil.rmtree(good)
    with pytest.raises(CheckpointError, match=r"holds 1 checkpoints and none is sound:\n  step_2: policy/weights/"):
        taken(tmp_path / "run", tmp_path)


def test_a_consolidated_checkpoint_is_linked_with_its_tokenizer(tmp_path, base):
    step = save(tmp_path / "run", base, 3, consolidated=True)
    found = taken(step, tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    model = tmp_path / "moved" / found.model.relative_to(tmp_path / "run")
    weights = model / "model-00001.safetensors"
    assert weights.is_symlink() and (model / "tokenizer_config.json").is_file()
    assert taken(tmp_path / "moved", tmp_path).model == model
    want = logits_of(tmp_path / "moved" / "step_3" / "policy" / "weights" / "consolidated")
    torch.testing.assert_close(logits_of(model), want)


def test_adapters_are_merged_into_their_base_model(tmp_path, base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.name_or_path = str(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with torch.no_grad():
        want = adapted(input_ids=IDS).logits
    step = save(tmp_path / "run", base, 1, adapter=tmp_path / "adapter")
    config = json.loads((step / "policy" / "config.json").read_text())
    found = taken(step, tmp_path)
    torch.testing.assert_close(logits_of(found.model), want, rtol=0, atol=1e-5)
    assert json.loads((found.model / "config.json").read_text()) == config, "with the overrides it was trained under"
    assert (found.model / "tokenizer_config.json").read_text() == "{}", "the tokenizer is the checkpoint's"


def test_what_a_killed_process_left_is_removed(tmp_path, base):
    step = save(tmp_path / "run", base, 1)
    found = taken(step, tmp_path)
    shutil.rmtree(found.model)
    left = found.model.with_name(f"{found.model.name}.partial-abc")
    left.mkdir()
    assert taken(step, tmp_path).model.is_dir() and not left.exists()

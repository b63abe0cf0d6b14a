"""A worker saved and resumed, to the bit on its own layout, within rounding on others; a checkpoint used as a model."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from nemo_rl.models.policy.checkpoint import PolicyState, policy_tensors, save_model_files
from nemo_rl.models.policy.config import LoRAConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_rl.models.policy.convert import CheckpointModel, is_checkpoint, model_of_checkpoint
from nemo_rl.models.policy.dtensor.optimizer import build_optimizer, build_scheduler, own_schedule
from nemo_rl.types import TrainResult
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.fakes import checkpoints_in
from tests.unit.policy.steps import PACKED, make_worker, policy_config, train_step, whole_weights
from tests.unit.policy.test_layouts import ALIKE, COPIES, CP, EP, PP, SP, TP, cut
from tests.worlds import run_world

LORA = {"lora_cfg": LoRAConfig(enabled=True, dim=4, match_all_linear=False, target_modules=["q_proj", "down_proj"])}
DROPPED = {"lora_cfg": LoRAConfig(enabled=True, dim=4, alpha=8.0, dropout=0.2)}
SCHEDULE = [
    SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "total_iters": 3}),
    SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 10}),
    SchedulerConfig(milestones=[3]),
]
Run = tuple[list[TrainResult], dict[str, torch.Tensor]]


def goes_on(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path, how: SaveRequest) -> Run:
    """A call of two optimizer steps, a checkpoint, and another call, during which it may still be written."""
    worker = make_worker(path, config)
    results = [train_step(worker)]
    worker.save_checkpoint(directory, how)
    results.append(train_step(worker))
    if how.in_background:
        asyncio.run(worker.finish_save_checkpoint())
    return results, whole_weights(worker)


def resumes(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path, *, optimizer: bool = True) -> Run:
    worker = make_worker(path, config)
    worker.load_checkpoint(directory, load_optimizer=optimizer)
    return [train_step(worker)], whole_weights(worker)


def assert_bitwise(got: Run, want: Run) -> None:
    assert got[0] == want[0], "losses, gradient norms, learning rates and metrics"
    assert all(torch.equal(weight, want[1][name]) for name, weight in got[1].items())


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, DROPPED),
        pytest.param(4, {CP: 2, TP: 2, SP: True}, marks=pytest.mark.slow),
        pytest.param(4, {PP: 2, TP: 2} | DROPPED, marks=pytest.mark.slow),
    ],
    ids=["lora with dropout", "cp-tp-sp", "lora with dropout, pp-tp"],
)
def test_two_runs_and_a_resumed_one_are_bitwise_equal_with_the_optimizers_state(models, tmp_path, world, settings):
    how = SaveRequest(model_save_format="safetensors", save_consolidated=True)
    adamw = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 0.01, "weight_decay": 0.1})
    changes = PACKED | {"deterministic": True, "optimizer": adamw, "scheduler": SCHEDULE}
    config = policy_config(**changes, **cut(**settings))
    path, folders = models["llama"], [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()

    def rank_main(rank: int, world: int) -> list[Run]:
        runs = [goes_on(rank, world, path, config, folder, how) for folder in folders]
        late = [resumes(rank, world, path, config, folders[0], optimizer=with_state) for with_state in (True, False)]
        return runs + late

    for one, other, late, without_state in run_world(rank_main, world):
        assert one[0][0].losses != one[0][1].losses
        assert one[0][1].learning_rates == pytest.approx([0.007, 0.01]), "one step of it per optimizer step"
        assert_bitwise(other, one)
        assert_bitwise(late, (one[0][1:], one[1]))
        [got], want = without_state[0], one[0][1]
        assert got.losses[0] == want.losses[0] and got.losses[1] != want.losses[1]


@pytest.mark.parametrize(
    ("family", "saved_on", "resumed_on"),
    [
        ("llama", (2, {TP: 2}), (2, {})),
        pytest.param("llama", (4, {CP: 2, COPIES: 2}), (2, {PP: 2}), marks=pytest.mark.slow),
        pytest.param("llama", (2, {TP: 2} | LORA), (2, LORA), marks=pytest.mark.slow),
        ("qwen3-moe", (4, {EP: 2}), (2, {EP: 2})),
    ],
)
def test_it_resumes_on_another_layout(models, tmp_path, family, saved_on, resumed_on):
    """While it trains on, the checkpoint is written."""
    momentum = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})
    changes, how = ALIKE | {"optimizer": momentum}, SaveRequest(in_background=True)
    before, after = (policy_config(**changes, **cut(**layout)) for _, layout in (saved_on, resumed_on))
    (_, want), want_weights = run_world(goes_on, saved_on[0], models[family], before, tmp_path, how)[0]
    [got], got_weights = run_world(resumes, resumed_on[0], models[family], after, tmp_path)[0]
    assert got.losses == pytest.approx(want.losses, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(got_weights, want_weights, rtol=1e-4, atol=1e-5)


# -- a checkpoint used as a model: which one is taken, what is made of it, once


IDS = torch.arange(2, 26).view(2, 12)


def logits_of(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids=IDS).logits


def save_step(folder: Path, base: Path, step: int, *, consolidated: bool = False, adapter: Path | None = None) -> Path:
    """A finished checkpoint; with an adapter, one of adapters alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += step  # every step is another model
    lora = {"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(2, 2)}
    state = PolicyState.of(lora if adapter else policy_tensors([model]), None, None)

    def write(directory: Path) -> None:
        policy = directory / "policy"
        run_world(lambda rank, world: state.save(policy, "torch_save"), 1)
        save_model_files(model.config, policy, generation_config="{}")
        if consolidated:
            model.save_pretrained(policy / "weights" / "consolidated")
        if adapter:
            shutil.copytree(adapter, policy / "adapter")
        (policy / "tokenizer").mkdir()
        (policy / "tokenizer" / "tokenizer_config.json").write_text("{}")

    return CheckpointManager(checkpoints_in(folder)).start_save(step, write, {}, "", {}).finish()


def taken(path: Path, tmp_path: Path, dtype: str = "float32") -> CheckpointModel:
    return model_of_checkpoint(path, dtype=dtype, cache=tmp_path / "cache", resolve_base=lambda name: name)


def test_the_newest_sound_checkpoint_is_converted_once_and_a_damaged_one_is_refused_by_name(tmp_path, llama):
    folder, older, newest = tmp_path / "c", save_step(tmp_path, llama, 9), save_step(tmp_path, llama, 10)
    (folder / "tmp_step_11").mkdir()
    assert is_checkpoint(folder) and is_checkpoint(older) and not is_checkpoint(llama)
    found = taken(folder, tmp_path)
    assert found.step == newest and found.model.parent == folder / "converted"
    assert {"config.json", "tokenizer_config.json"} <= {file.name for file in found.model.iterdir()}
    models = (AutoModelForCausalLM.from_pretrained(path) for path in (found.model, llama))
    after, before = (model.get_input_embeddings().weight[5] for model in models)
    torch.testing.assert_close(after, before + 10)
    stamp = (found.model / "config.json").stat().st_mtime_ns
    assert taken(folder, tmp_path) == found
    assert (found.model / "config.json").stat().st_mtime_ns == stamp, "nothing was converted again"
    half = taken(folder, tmp_path, "bfloat16")
    assert half.model != found.model and half.digest == found.digest
    assert AutoModelForCausalLM.from_pretrained(half.model, dtype="auto").dtype == torch.bfloat16
    shutil.rmtree(found.model)
    left = found.model.with_name(f"{found.model.name}.partial-abc")  # by a killed process
    left.mkdir()
    assert taken(folder, tmp_path).model.is_dir() and not left.exists()
    shard = next((newest / "policy" / "weights").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert taken(folder, tmp_path).step == older
    with pytest.raises(ValueError, match=rf"step_10 is damaged: policy/weights/{shard.name} has \d+ bytes instead of"):
        taken(newest, tmp_path)
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=r"holds 1 checkpoints and none is sound:\n  step_10: policy/weights/"):
        taken(folder, tmp_path)


def test_a_consolidated_checkpoint_is_linked_with_its_tokenizer(tmp_path, llama):
    step = save_step(tmp_path, llama, 3, consolidated=True)
    found = taken(step, tmp_path)
    (tmp_path / "c").rename(tmp_path / "moved")
    model = tmp_path / "moved" / found.model.relative_to(tmp_path / "c")
    weights = model / "model.safetensors"
    assert weights.is_symlink() and (model / "tokenizer_config.json").is_file()
    assert taken(tmp_path / "moved", tmp_path).model == model
    want = logits_of(tmp_path / "moved" / "step_3" / "policy" / "weights" / "consolidated")
    torch.testing.assert_close(logits_of(model), want)


def test_adapters_are_merged_into_their_base_model(tmp_path, llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.name_or_path = str(llama)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with torch.no_grad():
        want = adapted(input_ids=IDS).logits
    step = save_step(tmp_path, llama, 1, adapter=tmp_path / "adapter")
    config = json.loads((step / "policy" / "config.json").read_text())
    found = taken(step, tmp_path)
    torch.testing.assert_close(logits_of(found.model), want, rtol=0, atol=1e-5)
    assert json.loads((found.model / "config.json").read_text()) == config, "with the overrides it was trained under"
    assert (found.model / "generation_config.json").read_bytes() == (llama / "generation_config.json").read_bytes()
    assert (found.model / "tokenizer_config.json").read_text() == "{}", "the tokenizer is the checkpoint's"


def test_a_resumed_run_takes_the_hyperparameters_and_the_schedule_of_its_configuration_when_told_to():
    def run(kwargs: dict[str, Any], steps: int) -> tuple[PolicyConfig, torch.optim.Optimizer]:
        config = policy_config(optimizer=OptimizerConfig(kwargs=kwargs), scheduler=SCHEDULE)
        optimizer = build_optimizer(config, [torch.nn.Parameter(torch.ones(2))])
        scheduler = build_scheduler(config, optimizer)
        assert scheduler is not None
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return config, optimizer

    _, saved = run({"lr": 0.01, "weight_decay": 0.1}, 2)
    config, want = run({"lr": 0.05}, 2)
    _, got = run({"lr": 0.05}, 7)
    for _ in range(2):  # it may happen again in one process
        got.param_groups[0] |= {key: value for key, value in saved.param_groups[0].items() if key != "params"}
        own_schedule(config, got, steps=2)
        rest = [{key: value for key, value in o.param_groups[0].items() if key != "params"} for o in (got, want)]
        assert rest[0] == rest[1] and rest[0]["weight_decay"] == 0.01

"""Checkpoints of Megatron policies: resumed to the bit, on other layouts, in the background, converted, and refused."""

import asyncio
import math
import os
import pickle
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from examples.converters import convert_megatron_to_hf
from nemo_rl.models.policy.checkpoint import save_tensors
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.convert import convert_checkpoint
from nemo_rl.models.policy.megatron import files
from nemo_rl.models.policy.megatron.checkpoint import _rectangles
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.tables import named
from tests.unit.policy.megatron import hf_models
from tests.unit.policy.megatron.parity import cut
from tests.unit.policy.steps import make_worker, megatron_policy, train_step, whole_weights
from tests.worlds import run_world

Changes = dict[str, Any]
PP, EP, TP = cut("pp2"), cut("ep2"), cut("tp2")
WHOLE: Changes = {"optimizer": {"use_distributed_optimizer": False}}
SGD, MUON, SHARED_MUON = ({"optimizer": {"optimizer": name}} for name in ("sgd", "muon", "dist_muon"))
BF16: Changes = {"precision": "bfloat16"}


def config_of(changes: Changes) -> PolicyConfig:
    megatron = {"optimizer": {}, "freeze_moe_router": False, "precision": "float32"} | changes
    megatron["optimizer"] = {"lr": 1e-3, "min_lr": 1e-5} | megatron["optimizer"]
    schedule = {"lr_decay_style": "linear", "lr_decay_iters": 20}
    return megatron_policy({"precision": megatron.pop("precision")}, scheduler=schedule, **megatron)


def goes_on(path: Path, config: PolicyConfig, directory: Path, *, resumes: bool) -> Any:
    """Losses of two calls after a checkpoint, and the weights then.

    A call that `resumes` reads it from `directory`; another one writes it there during its first call.
    """
    worker = make_worker(path, config)
    if resumes:
        worker.load_checkpoint(directory, load_optimizer=True)
    else:
        train_step(worker)
        worker.save_checkpoint(directory, SaveRequest(save_consolidated=True, in_background=True))
    losses = train_step(worker).losses
    if not resumes:
        asyncio.run(worker.finish_save_checkpoint())
        worker.saver.close()
    losses += train_step(worker).losses
    weights = whole_weights(worker)
    worker.mesh.close()
    return losses, weights


def cannot_write(path: Path, config: PolicyConfig, directory: Path) -> list[str]:
    """Messages on this rank of saves that fail: on all ranks, on the last one alone, and in the background."""
    worker, said = make_worker(path, config), []
    for blocked in ("weights", "generators/1.safetensors", "optimizer/__1_0.distcp"):
        folder = directory / blocked.replace("/", "_")
        in_the_way = folder / "policy" / blocked
        if worker.rank == 0:
            in_the_way.parent.mkdir(parents=True)
            in_the_way.touch() if blocked == "weights" else in_the_way.mkdir()
        torch.distributed.barrier()
        with pytest.raises(RuntimeError, match="could not be written") as refused:
            worker.save_checkpoint(folder, SaveRequest(in_background=True))
            train_step(worker)
            asyncio.run(worker.finish_save_checkpoint())
        said.append(str(refused.value))
    worker.mesh.close()
    return said


def assert_same(got: Any, want: Any, *, to_the_bit: bool) -> None:
    """Losses and weights."""
    of_loss, rtol, atol = (0, 0, 0) if to_the_bit else (1e-5, 1e-3, 1e-4)
    assert got[0] == pytest.approx(want[0], rel=0, abs=of_loss)
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def saved(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(step directory, what went on there, what each rank was told of failures)."""
    folder, config, other = tmp_path_factory.mktemp("megatron_checkpoint"), config_of({}), config_of(TP | WHOLE)

    def rank(rank: int, world: int) -> Any:
        want = goes_on(qwen, config, folder / "step_1", resumes=False)
        others = [goes_on(qwen, layout, folder / "step_1", resumes=True) for layout in (config, other)]
        return want, *others, cannot_write(qwen, config, folder / "failed")

    return folder / "step_1", run_world(rank, 2)


def test_it_resumes_to_the_bit_on_its_layout_within_rounding_on_another_and_a_failed_save_raises_on_all(saved):
    for want, same, other, _ in saved[1]:
        assert_same(same, want, to_the_bit=True)
        assert_same(other, want, to_the_bit=False)
    [_, on_last, _] = saved[1][0][3]
    assert "rank 1" in on_last and "rank 0:" not in on_last


def test_the_consolidated_model_loads_with_transformers_and_the_converter_writes_the_same(saved, tmp_path):
    step, _ = saved
    consolidated = step / "policy" / "weights" / "consolidated"
    model = AutoModelForCausalLM.from_pretrained(consolidated).state_dict()
    arguments = ["--megatron-ckpt-path", str(step), "--hf-ckpt-path", str(tmp_path / "hf")]
    assert convert_megatron_to_hf.main(arguments) == 0
    want, got = (load_file(folder / "model-00001.safetensors") for folder in (consolidated, tmp_path / "hf"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) and torch.equal(model[name], want[name]) for name in want)


def test_a_conversion_keeps_the_precision_of_the_bias_that_chooses_experts(tmp_path):
    model, policy = hf_models.config_of("deepseek_v3"), tmp_path / "step_1" / "policy"
    model.save_pretrained(policy)
    files.Counters().write(policy)
    saved = {name: 1 + torch.rand(shape) for name, shape in files.checkpoint_shapes(model).items()}
    save_tensors(saved, policy / "weights", "torch_save")
    convert_checkpoint(tmp_path / "step_1", tmp_path / "half", "bfloat16")
    for name, tensor in load_file(tmp_path / "half" / "model-00001.safetensors").items():
        assert torch.equal(tensor, saved[name] if "correction_bias" in name else saved[name].bfloat16()), name


def test_a_checkpoint_is_checked_by_its_headers(qwen, saved, tmp_path, caplog):
    step, policy, model = saved[0] / "policy", config_of({}), AutoConfig.from_pretrained(qwen)
    files.check_checkpoint(step, policy, model)
    deeper = AutoConfig.from_pretrained(qwen, num_hidden_layers=3, intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"missing there: model\.layers\.2.*\n.*of another shape.*\[96, 64\]"):
        files.check_checkpoint(step, policy, deeper)
    with pytest.raises(CheckpointError, match=r"state of adam, this run has sgd: set megatron_cfg"):
        files.check_checkpoint(step, config_of(SGD), model)
    with pytest.raises(CheckpointError, match=r"saved by megatron_cfg.*convert_megatron_to_hf"):
        files.refuse_megatron_checkpoint(step)
    foreign = Path(shutil.copytree(step, tmp_path / "policy"))
    marker, header = foreign / files.MARKER, foreign / "weights" / ".metadata"
    damaged = {header: pickle.dumps(os.getenv), marker: b'{"format": "of something else"}'}
    for file, said in (header, "it asks for os.getenv, which no checkpoint needs"), (marker, f"{marker} is damaged"):
        file.write_bytes(damaged[file])
        files.check_checkpoint(foreign, policy, model)  # left to the run, which falls back
        assert said in caplog.text
    marker.unlink()
    with pytest.raises(CheckpointError, match=r"was not saved by megatron_cfg.*convert_dcp_to_hf"):
        files.check_checkpoint(foreign, policy, model)


@named(
    "shape",
    {
        "line": (5,),
        "box": (3, 2, 4),
        "a dimension of one": (5, 1, 3),
    },
)
def test_any_range_of_a_flat_tensor_is_made_of_rectangles(shape):
    flat = torch.arange(1.0, math.prod(shape) + 1)
    for start, stop in combinations(range(len(flat) + 1), 2):
        whole = torch.zeros(shape)
        for at, view in _rectangles(shape, flat[start:stop], range(start, stop)):
            whole[tuple(slice(low, low + size) for low, size in zip(at, view.shape, strict=True))] += view
        assert torch.equal(whole.flatten()[start:stop], flat[start:stop]) and whole.sum() == flat[start:stop].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "saved_on", "resumed_on"),
    [
        ("deep", PP, TP),
        ("qwen2-tied", PP, TP | WHOLE),
        ("deep", SGD, SGD | TP),
        ("deep", SHARED_MUON, MUON | TP),
        ("qwen3-moe", EP, TP | WHOLE),
        ("qwen3-moe", TP | EP, PP),
        ("deep", BF16 | MUON, None),  # to the bit where they had been
        ("qwen3-moe", BF16 | SHARED_MUON | EP, None),
        ("qwen2-tied", PP | BF16, None),
        ("qwen3-moe", EP | WHOLE, None),
        ("gpt-oss", {}, EP | WHOLE),
    ],
)
def test_a_policy_resumes_on_this_and_that_layout(models, tmp_path, family, saved_on, resumed_on):
    path, before, after = models[family], config_of(saved_on), config_of(resumed_on or saved_on)

    def rank(rank: int, world: int) -> Any:
        want = goes_on(path, before, tmp_path / "step_1", resumes=False)
        return want, goes_on(path, after, tmp_path / "step_1", resumes=True)

    for want, got in run_world(rank, 2):
        assert_same(got, want, to_the_bit=resumed_on is None)

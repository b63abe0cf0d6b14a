"""A policy's weights and optimizer on disk: other ranks, other meshes, in the background, and what is refused."""

import asyncio
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from nemo_rl.models.policy import checkpoint
from nemo_rl.models.policy.config import OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_rl.models.policy.convert import convert_checkpoint
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.save import SaveRequest
from nemo_rl.utils.checkpoint.tensors import check_checkpoint_fits, saved_tensors
from tests.tables import named
from tests.unit.policy.models import edit_json
from tests.unit.policy.steps import make_worker, megatron_policy, policy_config, train_step, whole_weights
from tests.worlds import run_world


def trained_by(optimizer: str, **kwargs: Any) -> PolicyConfig:
    warmup = SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"total_iters": 10})
    return policy_config(optimizer=OptimizerConfig(name=optimizer, kwargs=kwargs), scheduler=[warmup])


class CountingSGD(SGD):
    """Keeps a plain number per parameter, and steps ever less."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["num_steps"] = state.get("num_steps", 0) + 1
            parameter.grad /= state["num_steps"]
        return super().step(closure)


def test_on_the_same_ranks_it_resumes_bitwise_with_any_optimizer(llama, tmp_path):
    """test_resume.py has AdamW, and other layouts."""
    configs = [
        trained_by("torch.optim.SGD", lr=0.1),  # without state
        trained_by("torch.optim.Adam", lr=torch.tensor(0.01), amsgrad=True, foreach=False),
        trained_by(f"{__name__}.CountingSGD", lr=0.1),
    ]

    def rank_main(rank: int, world: int) -> None:
        for number, config in enumerate(configs):
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            # Copies: a learning rate that is a tensor is changed in place.
            first, again = (make_worker(llama, config.model_copy(deep=True)) for _ in range(2))
            train_step(first)
            first.save_checkpoint(folder, SaveRequest())
            dist.barrier()
            again.load_checkpoint(folder, load_optimizer=True)
            assert train_step(again) == train_step(first)
            want = whole_weights(first)
            assert all(torch.equal(tensor, want[name]) for name, tensor in whole_weights(again).items())

    run_world(rank_main, 2)


@pytest.mark.parametrize("policy", [policy_config, megatron_policy])
def test_the_generation_config_is_the_models_own(policy, llama, tmp_path):
    shutil.copytree(llama, tmp_path / "model")
    # Sampling keys without do_sample: transformers reads them, and refuses to write them.
    edit_json(tmp_path / "model" / "generation_config.json", eos_token_id=[1, 2], top_p=0.9)

    def rank_main(rank: int, world: int) -> None:
        make_worker(tmp_path / "model", policy()).save_checkpoint(tmp_path, SaveRequest(save_consolidated=True))

    run_world(rank_main, 1)
    consolidated = tmp_path / "policy" / "weights" / "consolidated"
    convert_checkpoint(tmp_path, tmp_path / "converted")
    convert_checkpoint(consolidated, tmp_path / "copied")
    for folder in (tmp_path / "policy", consolidated, tmp_path / "converted", tmp_path / "copied"):
        written = json.loads((folder / "generation_config.json").read_text())
        assert (written["eos_token_id"], written["top_p"]) == ([1, 2], 0.9)


def test_parameters_without_a_gradient_have_no_state_before_and_after(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("used", "unused", "frozen")})
    model["frozen"].requires_grad_(False)
    model.register_buffer("seen", torch.ones(2))
    tensors = checkpoint.policy_tensors([model])

    def rank_main(rank: int, world: int) -> list[list[str]]:
        first, again = (AdamW(model.parameters()) for _ in range(2))
        model["used"](torch.ones(1, 2)).sum().backward()
        first.step()
        checkpoint.PolicyState.of(tensors, first, None).save(tmp_path, "torch_save")
        model.seen.zero_()
        checkpoint.load_tensors(tensors, tmp_path / "weights")
        assert model.seen.tolist() == [1.0, 1.0], "a buffer is saved too"
        checkpoint.load_optimizer(tensors, again, None, tmp_path)
        return [sorted(name for name in tensors if tensors[name] in one.state) for one in (first, again)]

    assert run_world(rank_main, 1) == [[["used.bias", "used.weight"]] * 2]


def warmed(parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = SGD(parameters)
    return optimizer, LinearLR(optimizer)


def in_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One group for each parameter."""
    return SGD([{"params": [parameter]} for parameter in parameters])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (AdamW, partial(SGD, momentum=0.9), r"keeps exp_avg, exp_avg_sq, step of .*, SGD needs momentum_buffer"),
        (AdamW, Adam, r"saved by torch\.optim\.adamw\.AdamW, this run has .*\.Adam:"),
        (in_groups, SGD, r"has 2 groups of parameters, this run's 1: put `optimizer` back"),
        (warmed, SGD, r"saved by a run with a scheduler: put back `scheduler`"),
        (SGD, warmed, r"saved by a run without a scheduler: remove `scheduler`"),
    ],
)
def test_another_optimizer_is_refused_with_what_each_keeps_and_the_remedy(tmp_path, before, after, message):
    def rank_main(rank: int, world: int) -> None:
        model = nn.Linear(2, 2)
        tensors = checkpoint.policy_tensors([model])
        (old, schedule), (new, own) = (
            built if isinstance(built, tuple) else (built, None)
            for built in (before(model.parameters()), after(model.parameters()))
        )
        model(torch.ones(1, 2)).sum().backward()
        old.step()
        checkpoint.PolicyState.of(tensors, old, schedule).save(tmp_path, "torch_save")
        checkpoint.load_optimizer(tensors, new, own, tmp_path)

    with pytest.raises(CheckpointError, match=message):
        run_world(rank_main, 1)


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_leak_into_it(llama, tmp_path):
    config = trained_by("torch.optim.AdamW", lr=1e-2)

    def rank_main(rank: int, world: int) -> None:
        worker, opened = make_worker(llama, config), threading.Event()
        train_step(worker)
        want = whole_weights(worker)
        worker.saver = checkpoint.AsyncSaver()
        worker.saver._thread.submit(opened.wait, 120)  # before the write: the training overtakes it for certain
        worker.save_checkpoint(tmp_path, SaveRequest(in_background=True, model_save_format="safetensors"))
        results = [train_step(worker)]  # collectives of the training, none of the save's done
        assert not (tmp_path / "policy" / "weights").exists()
        dist.barrier()
        opened.set()
        results.append(train_step(worker))  # now both at once
        asyncio.run(worker.finish_save_checkpoint())

        again = make_worker(llama, config)
        again.load_checkpoint(tmp_path, load_optimizer=True)
        assert all(torch.equal(tensor, want[name]) for name, tensor in whole_weights(again).items())
        assert [train_step(again), train_step(again)] == results

    run_world(rank_main, 2)


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_with_its_reason(llama, tmp_path):
    (tmp_path / "policy" / "weights" / "__1_0.distcp").mkdir(parents=True)  # where rank 1 wants to write
    (tmp_path / "elsewhere").mkdir()

    def rank_main(rank: int, world: int) -> None:
        worker = make_worker(llama, policy_config())
        worker.save_checkpoint(tmp_path, SaveRequest(in_background=True))
        with pytest.raises(RuntimeError, match=r"(?s)could not be written.*Is a directory"):
            asyncio.run(worker.finish_save_checkpoint())
        worker.save_checkpoint(tmp_path / "elsewhere", SaveRequest(in_background=True))  # it can be used again
        asyncio.run(worker.finish_save_checkpoint())

    run_world(rank_main, 2)


# -- what is refused


@pytest.mark.parametrize("save_format", ["torch_save", "safetensors", "plain"])
def test_a_checkpoint_of_another_architecture_is_refused_with_the_differences(tmp_path, save_format):
    tensors = {"up.weight": torch.zeros(98, 10), "norm.weight": torch.zeros(10)}
    wanted = {name: tensor.shape for name, tensor in tensors.items()}
    other = {"extra": torch.zeros(2), "up.weight": torch.zeros(97, 10)}
    for folder, saved in ((tmp_path / "same", tensors), (tmp_path / "other", other)):
        if save_format == "plain":
            folder.mkdir()
            save_file(saved, folder / "model.safetensors")
        else:
            run_world(lambda rank, world, *how: checkpoint.save_tensors(*how), 1, saved, folder, save_format)
    check_checkpoint_fits(tmp_path / "same", wanted)
    told = (
        r"(?s)1 missing there: norm\.weight\n.*1 unknown to the model: extra\n.*1 of another shape: up\.weight "
        r"\[97, 10\] instead of \[98, 10\]\n.*\(model_name, hf_config_overrides"
    )
    with pytest.raises(CheckpointError, match=told):
        check_checkpoint_fits(tmp_path / "other", wanted)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        checkpoint.load_tensors(tensors, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"20 missing there: (x\d+, ){7}x\d+ and 12 more"):
        check_checkpoint_fits(tmp_path / "same", {f"x{i}": (1,) for i in range(20)})


class Dangerous:
    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.stdout.write('executed')",)


def test_an_empty_directory_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no saved tensors"):
        saved_tensors(tmp_path)


@named(
    "name, content, message",
    {
        "weights": ("model.safetensors", b"\x00" * 5, "is damaged"),
        "empty header": (".metadata", b"", r"\.metadata is damaged"),
        "no pickle": (".metadata", b"\x80\x05garbage", r"\.metadata is damaged"),
        "another object": (".metadata", pickle.dumps({"a": 1}), r"\.metadata is damaged"),
        "code": (".metadata", pickle.dumps(Dangerous()), r"\.metadata is damaged \(it asks for builtins\.exec"),
    },
)
def test_damaged_files_are_refused_and_reading_a_header_executes_nothing(name, content, message, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        saved_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load_tensors({"a": torch.zeros(1)}, tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_paths_in_a_header_are_those_of_the_python_that_saved_it(tmp_path):
    """Python 3.13 pickles a path as `pathlib._local.PosixPath`, which 3.12 has not."""
    dcp.save({"a": torch.zeros(2)}, checkpoint_id=tmp_path)
    assert list(saved_tensors(tmp_path)) == ["a"]
    header = tmp_path / ".metadata"
    text = pickle.dumps(pickle.loads(header.read_bytes()), protocol=2)
    of_313 = text.replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"pathlib._local" in of_313
    header.write_bytes(of_313)
    if sys.version_info >= (3, 13):
        assert list(saved_tensors(tmp_path)) == ["a"]
    else:
        with pytest.raises(CheckpointError, match=r"Python 3\.13 saved these tensors.*continue with 3\.13"):
            saved_tensors(tmp_path)


def test_large_models_are_written_in_several_files(tmp_path):
    tensors = {f"t{index}": torch.full((10,), float(index)) for index in range(5)}
    checkpoint.write_safetensors(tensors.items(), tmp_path, max_file_bytes=100)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors.items())


def test_weights_that_are_not_finite_are_not_written() -> None:
    """A checkpoint of them would end every run that resumes from it."""
    weights = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16), "steps": torch.ones(1, dtype=torch.int64)}
    checkpoint.require_finite(weights)
    for value in (float("nan"), float("inf")):
        weights["b"][1] = value
        with pytest.raises(RuntimeError, match="weights are not finite, so no checkpoint of them is written: b"):
            checkpoint.require_finite(weights)

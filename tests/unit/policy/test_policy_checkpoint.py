"""A policy's weights and optimizer on disk: other ranks, other meshes, in the background, and what is refused."""

import pickle
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nemo_rl.models.policy import checkpoint
from nemo_rl.refit.layout import gathered
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.tensors import check_checkpoint_fits, saved_tensors
from tests.worlds import run_world

ADAMW: dict[str, Any] = {"cls": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.1}
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    """An MLP of 98 columns (shards are uneven on 4 ranks), a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(10, 98), nn.Linear(98, 10), nn.LayerNorm(10)
        self.register_buffer("correction", torch.zeros(10))
        self.register_buffer("frequencies", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.correction, torch.Tensor)
        return x + self.norm(self.down(torch.relu(self.up(x)))) + self.correction


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


class Trained:
    """Two layers on `world` ranks, with optimizer and scheduler. test_resume.py has whole policies."""

    def __init__(self, world: int, cls: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> None:
        self.model = build()
        mesh = init_device_mesh("cpu", (world,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.data_parallel, self.data_rank = world, mesh.get_local_rank()
        self.optimizer: torch.optim.Optimizer = cls(self.model.parameters(), **kwargs)
        self.scheduler: LRScheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def step(self, number: int) -> float:
        """The loss over the same 8 rows whatever the ranks."""
        rows = torch.randn(8, 10, generator=torch.Generator().manual_seed(number))
        mine = rows.chunk(self.data_parallel)[self.data_rank]
        loss = self.model(mine).pow(2).mean()  # FSDP averages the gradients of equal parts
        loss.backward()
        with torch.no_grad():
            for layer in self.model:
                assert isinstance(layer, Layer) and isinstance(layer.correction, torch.Tensor)
                layer.correction += 0.01 * number
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        return sum(losses) / len(losses)

    @property
    def tensors(self) -> Tensors:
        return checkpoint.policy_tensors([self.model])

    def state(self) -> checkpoint.PolicyState:
        return checkpoint.PolicyState.of(self.tensors, self.optimizer, self.scheduler)

    def load(self, directory: Path) -> None:
        checkpoint.load_tensors(self.tensors, directory / "weights")
        checkpoint.load_optimizer(self.tensors, self.optimizer, self.scheduler, directory)

    def whole(self) -> Tensors:
        return {name: gathered(tensor.detach(), None).clone() for name, tensor in self.tensors.items()}


def goes_on(world: int, directory: Path, options: dict[str, Any], *, resumes: bool) -> Any:
    """Losses and weights of the steps after a checkpoint, which is saved, or read if it `resumes`."""
    policy = Trained(world, **options)
    if resumes:
        policy.load(directory)
    else:
        for number in range(1, 4):
            policy.step(number)
        policy.state().save(directory, "torch_save")
    return [policy.step(number) for number in range(4, 7)], policy.whole()


class CountingSGD(torch.optim.SGD):
    """Keeps a plain number per parameter, and steps ever less."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["num_steps"] = state.get("num_steps", 0) + 1
                    parameter.grad /= state["num_steps"]
        return super().step(closure)


OPTIMIZERS = [
    {"cls": torch.optim.SGD, "lr": 0.1},  # without state
    {"cls": torch.optim.Adam, "lr": torch.tensor(0.01), "amsgrad": True},
    {"cls": CountingSGD, "lr": 0.1},
]


def test_on_the_same_ranks_it_resumes_bitwise_with_any_optimizer(tmp_path):
    def rank_main(rank: int, world: int) -> None:
        for number, options in enumerate(OPTIMIZERS):
            folder = tmp_path / str(number)
            want = goes_on(world, folder, options, resumes=False)
            dist.barrier()
            got = goes_on(world, folder, options, resumes=True)
            assert got[0] == want[0]
            assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])

    run_world(rank_main, 2)


def test_parameters_without_a_gradient_have_no_state_before_and_after(tmp_path):
    def keys(rank: int, world: int, save: bool) -> list[str]:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("used", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if save:
            model["used"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            checkpoint.PolicyState.of(checkpoint.policy_tensors([model]), optimizer, None).save(tmp_path, "torch_save")
        else:
            checkpoint.load_optimizer(checkpoint.policy_tensors([model]), optimizer, None, tmp_path)
        return sorted(name for name, parameter in model.named_parameters() if parameter in optimizer.state)

    assert [run_world(keys, 1, save) for save in (True, False)] == [[["used.bias", "used.weight"]]] * 2


def in_groups(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """One group for each parameter."""
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=lr)


SGD: dict[str, Any] = {"cls": torch.optim.SGD, "lr": 0.1}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (ADAMW, SGD | {"momentum": 0.9}, r"keeps exp_avg, exp_avg_sq, step of .*, SGD needs momentum_buffer"),
        (ADAMW, ADAMW | {"cls": torch.optim.Adam}, r"saved by torch\.optim\.adamw\.AdamW, this run has .*\.Adam:"),
        (SGD | {"cls": in_groups}, SGD, r"has 12 groups of parameters, this run's 1: put `optimizer` back"),
    ],
)
def test_another_optimizer_is_refused_with_what_each_keeps_and_the_remedy(tmp_path, before, after, message):
    def rank_main(rank: int, world: int) -> None:
        goes_on(world, tmp_path, before, resumes=False)
        goes_on(world, tmp_path, after, resumes=True)

    with pytest.raises(CheckpointError, match=message):
        run_world(rank_main, 1)


# -- in the background


class Held:
    """A state whose write waits: the training overtakes the save for certain."""

    def __init__(self, state: checkpoint.PolicyState, opened: threading.Event) -> None:
        self.state, self.opened = state, opened

    def on_host(self) -> "Held":
        return Held(self.state.on_host(), self.opened)

    def save(self, *args: Any) -> None:
        assert self.opened.wait(30)
        self.state.save(*args)


@pytest.mark.parametrize("save_format", ["torch_save", "safetensors"])
def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_leak_into_it(tmp_path, save_format):
    def rank_main(rank: int, world: int) -> Any:
        opened = threading.Event()
        policy = Trained(world, **ADAMW)
        saver = checkpoint.AsyncSaver()
        policy.step(1)
        want = policy.whole()
        saver.start(Held(policy.state(), opened), tmp_path, save_format)
        losses = [policy.step(2), policy.step(3)]  # collectives of the training, none of the save's done
        assert not (tmp_path / "weights").exists()
        dist.barrier()
        opened.set()
        losses += [policy.step(number) for number in range(4, 10)]  # now both at once
        saver.finish()
        saver.close()

        again = Trained(world, **ADAMW)
        again.load(tmp_path)
        assert all(torch.equal(tensor, want[name]) for name, tensor in again.whole().items())
        return losses, [again.step(number) for number in range(2, 10)]

    for losses, again in run_world(rank_main, 2):
        assert losses == again


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_with_its_reason(tmp_path):
    def rank_main(rank: int, world: int) -> str:
        policy = Trained(world, **ADAMW)
        saver = checkpoint.AsyncSaver()
        (tmp_path / "weights").mkdir(exist_ok=True)
        (tmp_path / "weights" / "__1_0.distcp").mkdir(exist_ok=True)  # where rank 1 wants to write
        dist.barrier()
        saver.start(policy.state(), tmp_path, "torch_save")
        policy.step(1)
        try:
            saver.finish()
        except RuntimeError as error:
            message = str(error)
        saver.start(policy.state(), tmp_path / "elsewhere", "torch_save")  # it can be used again
        saver.finish()
        return message

    for message in run_world(rank_main, 2):
        assert "Is a directory" in message and "could not be written" in message


# -- what is refused


def saved_model(directory: Path, save_format: Any, tensors: Tensors) -> None:
    if save_format == "plain":
        directory.mkdir()
        save_file({name: tensor.detach() for name, tensor in tensors.items()}, directory / "model.safetensors")
    else:
        run_world(lambda rank, world: checkpoint.save_tensors(tensors, directory, save_format), 1)


@pytest.mark.parametrize("save_format", ["torch_save", "safetensors", "plain"])
def test_a_checkpoint_of_another_architecture_is_refused_with_the_differences(tmp_path, save_format):
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in checkpoint.policy_tensors([build()]).items()}
    tensors = checkpoint.policy_tensors([build()])
    saved_model(tmp_path / "same", save_format, tensors)
    check_checkpoint_fits(tmp_path / "same", wanted)
    del tensors["1.norm.weight"]
    tensors |= {"2.extra": torch.zeros(2), "0.up.weight": torch.zeros(97, 10)}
    saved_model(tmp_path / "other", save_format, tensors)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint_fits(tmp_path / "other", wanted)
    for text in (
        "1 missing there: 1.norm.weight",
        "1 unknown to the model: 2.extra",
        "1 of another shape: 0.up.weight [97, 10] instead of [98, 10]",
        "(model_name, hf_config_overrides",
    ):
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match=r"1\.norm\.weight"):
        checkpoint.load_tensors(checkpoint.policy_tensors([build()]), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"20 missing there: (x\d+, ){7}x\d+ and 12 more"):
        check_checkpoint_fits(tmp_path / "same", {f"x{i}": (1,) for i in range(20)})


class Dangerous:
    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.stdout.write('executed')",)


def test_damaged_files_and_empty_directories_are_refused_and_reading_a_header_executes_nothing(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="holds no saved tensors"):
        saved_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 5)
    with pytest.raises(CheckpointError, match="is damaged"):
        saved_tensors(tmp_path)
    for content in (b"", b"\x80\x05garbage", pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
            saved_tensors(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Dangerous()))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged \(it asks for builtins\.exec"):
        saved_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load_tensors({"a": torch.zeros(1)}, tmp_path)
    assert "executed" not in capsys.readouterr().out


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

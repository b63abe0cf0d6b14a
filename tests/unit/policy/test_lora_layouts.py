"""The same step with adapters, whatever direction model and batch are cut in; reference, refit and files with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, OptimizerConfig, PolicyConfig, SequencePackingConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.refit.buffers import attach_buffer
from nemo_rl.refit.layout import Segment
from nemo_rl.refit.transfer import WeightReceiver
from nemo_rl.types import TrainResult
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.models import save_random_model
from tests.unit.policy.steps import LOSS, load_step, make_worker, policy_config, whole_weights
from tests.worlds import run_world

Step = tuple[TrainResult, dict[str, torch.Tensor]]

PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=70)}
PADDED = {"padding_free": False}
ADAPTERS = {"enabled": True, "dim": 4, "alpha": 8.0}
TP, CP, PP = "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"


def settings_of(rest: dict[str, Any] | None = None, **directions: Any) -> PolicyConfig:
    return policy_config(
        dtensor_cfg=DTensorConfig(lora_cfg=LoRAConfig.model_validate(ADAPTERS), **directions),
        optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0}),
        **{"train_micro_batch_size": 2} | (rest or {}),
    )


def beginning_with(adapter: Path, config: PolicyConfig) -> PolicyConfig:
    return changed(config, adapter_path=str(adapter))


def changed(config: PolicyConfig, **settings: Any) -> PolicyConfig:
    lora_cfg = config.dtensor_cfg.lora_cfg.model_copy(update=settings)
    return config.model_copy(update={"dtensor_cfg": config.dtensor_cfg.model_copy(update={"lora_cfg": lora_cfg})})


LAYOUTS = {
    "hsdp-packed": (4, settings_of(PACKED, dp_replicate_size=2)),
    "cp-recompute": (2, settings_of(PACKED, **{CP: 2}, activation_checkpointing=True)),
    "pp-packed": (2, settings_of(PACKED, **{PP: 2})),
    "pp-tp-packed": (4, settings_of(PACKED, **{PP: 2, TP: 2})),
    "offloaded": (2, settings_of(PACKED, cpu_offload=True)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_model("llama", path)
    return path


def two_calls(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path | None = None) -> Step:
    """Four optimizer steps: after the first, both matrices of an adapter have gradients."""
    worker = make_worker(path, config)
    for _ in range(2):
        result = train(worker, config)
    if directory is not None:
        directory.mkdir(exist_ok=True)
        worker.save_checkpoint(directory, SaveRequest(model_save_format="safetensors"))
    return result, whole_weights(worker)


@pytest.fixture(scope="module")
def alone(llama: Path) -> Step:
    """One rank, one padded micro-batch per optimizer step: nothing was cut."""
    return run_world(two_calls, 1, llama, settings_of(PADDED | {"train_micro_batch_size": 8}))[0]


def test_the_adapted_layers_move_and_nothing_else(llama: Path, alone: Step) -> None:
    _, weights = alone
    base = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert weights.keys() == base.keys()
    moved = {name for name in base if not torch.equal(weights[name], base[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}
    assert min((weights[name] - base[name]).abs().max() for name in moved) > 1e-4


@pytest.mark.parametrize(
    "name",
    ["pp-packed", *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n != "pp-packed")],
)
def test_a_step_does_not_depend_on_the_layout(
    llama: Path, alone: Step, saved: tuple[Path, list[Step]], name: str
) -> None:
    world, config = LAYOUTS[name]
    expected, expected_weights = alone
    ranks = saved[1] if name == "pp-packed" else run_world(two_calls, world, llama, config)
    for result, weights in ranks:
        assert result.losses == pytest.approx(expected.losses, abs=1e-6)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
        for metric, value in expected.metrics.items():
            assert result.metrics[metric] == pytest.approx(value, rel=1e-5, abs=2e-6), metric
        assert weights.keys() == expected_weights.keys()
        for weight, value in weights.items():
            assert (value - expected_weights[weight]).abs().max() < 3e-6, weight


def test_the_reference_is_the_base_model(llama: Path) -> None:
    assert_reference_of_the_start(llama, settings_of())


def test_the_reference_is_the_model_with_the_given_adapter(llama: Path, adapter: Path) -> None:
    assert_reference_of_the_start(llama, beginning_with(adapter, settings_of()))


def assert_reference_of_the_start(llama: Path, config: PolicyConfig) -> None:
    def logprobs(rank: int, world: int) -> list[Any]:
        worker = make_worker(llama, config)
        load_step(worker, config)
        worker.compute(Logprobs(), "prev_logprobs")
        seen = [row.columns["prev_logprobs"] for row in worker.rows.values()]
        for _ in range(2):
            load_step(worker, config)
            worker.compute_reference_logprobs()
            seen += [row.columns["reference_policy_logprobs"] for row in worker.rows.values()]
            worker.compute(Logprobs(), "prev_logprobs")
            worker.train(ClippedPGLoss(LOSS), Logprobs())
        worker.compute(Logprobs(), "prev_logprobs")
        seen += [row.columns["prev_logprobs"] for row in worker.rows.values()]
        return seen

    seen = run_world(logprobs, 1)[0]
    size = len(seen) // 4
    start, before, after, policy = (torch.cat(seen[part * size : (part + 1) * size]) for part in range(4))
    assert torch.equal(before, after)
    assert (before - start).abs().max() < 1e-6
    assert (policy - after).abs().max() > 1e-3


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    """What a run of two stages saves after the steps of `alone`, and its ranks' results."""
    directory = tmp_path_factory.mktemp("saved") / "step"
    world, config = LAYOUTS["pp-packed"]
    return directory, run_world(two_calls, world, llama, config, directory)


@pytest.fixture(scope="module")
def step(saved: tuple[Path, list[Step]]) -> Path:
    return saved[0]


@pytest.fixture(scope="module")
def adapter(step: Path) -> Path:
    return step / "policy" / "adapter"


def test_a_checkpoint_holds_the_adapters_alone_for_any_layout_and_for_peft(
    llama: Path, alone: Step, step: Path, adapter: Path
) -> None:
    base = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    written = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
    assert written < base
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), str(adapter)).merge_and_unload()
    for name, tensor in merged.state_dict().items():
        assert (tensor - alone[1][name]).abs().max() < 3e-6, name

    def resumed(rank: int, world: int) -> dict[str, torch.Tensor]:
        worker = make_worker(llama, settings_of(PACKED))
        worker.load_checkpoint(step, load_optimizer=True)
        return whole_weights(worker)

    for name, tensor in run_world(resumed, 2)[0].items():
        assert (tensor - alone[1][name]).abs().max() < 3e-6, name


def test_training_begins_with_a_given_adapter(llama: Path, alone: Step, adapter: Path) -> None:
    world, config = LAYOUTS["hsdp-packed"]

    def built(rank: int, world: int) -> dict[str, torch.Tensor]:
        return whole_weights(make_worker(llama, beginning_with(adapter, config)))

    for weights in run_world(built, world):
        for weight, value in weights.items():
            assert (value - alone[1][weight]).abs().max() < 3e-6, weight


@pytest.mark.parametrize("name", [pytest.param("pp-tp-packed", marks=pytest.mark.slow), "offloaded"])
def test_base_weights_and_adapters_sent_apart_make_the_merged_weights(llama: Path, name: str) -> None:
    """After the first sync the adapters alone are packed, whatever the layout."""
    world, config = LAYOUTS[name]

    def synced(rank: int, world: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        worker = make_worker(llama, changed(config, refit="adapter"))
        settings = {"transport": "packed_shm", "wire_dtype": "float32", "bucket_bytes": 4096}
        description, own, receiver = worker.prepare_refit(settings), {}, None
        sender = worker.sender
        assert sender is not None and sender.layout.num_base_buckets > 0
        if rank == 0:
            buffer = attach_buffer("packed_shm", description["endpoints"], worker.device)
            receiver = WeightReceiver(sender.layout, "packed_shm", buffer)
            own = {meta.name: torch.zeros(meta.shape) for meta in sender.layout.weights}
        targets = [[Segment(tuple(tensor.shape), tensor.stride(), 0, tensor)] for tensor in own.values()]
        for first in (0, sender.layout.num_base_buckets):
            train(worker, config)
            if receiver is not None:
                receiver.begin(first, targets=targets, load=None)
            for bucket in range(first, len(sender.layout.buckets)):
                packed = worker.pack(bucket)
                if receiver is not None:
                    receiver.receive(bucket, packed["fingerprints"])
            merged = whole_weights(worker)
            if receiver is not None:
                receiver.finish()
                assert own.keys() == merged.keys()
                for weight, value in own.items():
                    assert (value - merged[weight]).abs().max() < 1e-6, weight

    run_world(synced, world)


def train(worker: DTensorPolicyWorker, config: PolicyConfig) -> TrainResult:
    load_step(worker, config)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    return worker.train(ClippedPGLoss(LOSS), Logprobs())
